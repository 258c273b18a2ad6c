"""`trainrun sample RUN_DIR --prompt TEXT`: print generated text token by token."""

from __future__ import annotations

import os
from argparse import Namespace

from trainrun.cli.run_arguments import Parser, add_trust_option
from trainrun.errors import EXIT_DONE, ConfigError, TrainingError
from trainrun.output import report_result, say
from trainrun.parallel.devices import choose_device
from trainrun.runs.restore_config import choose_saved_checkpoint, load_network
from trainrun.runs.resume import load_trusted_config
from trainrun.runs.run import open_run
from trainrun.sampling.next_tokens import SamplingOptions, generate_tokens
from trainrun.sampling.run_tokens import (
    decode_stream,
    encode_text,
    is_trained_on_lines,
    load_model_tokenizer,
    max_context_length,
    stop_at_newline,
)
from trainrun.task.dict_batches import inspect_forward

MOST = 2**63 - 1


def main(argv: list[str]) -> int:
    """Print the prompt and its continuation until it ends, or until Ctrl-C or a closed pipe. Return the exit code."""
    arguments = _check_options(_build_parser().parse_args(argv))
    run_dir = open_run(arguments.run_dir)
    which = choose_saved_checkpoint(run_dir, arguments.which)

    config = load_trusted_config(run_dir, [], arguments.trust)
    tokens = load_model_tokenizer(config, run_dir, "sample")
    if arguments.prompt is None and is_trained_on_lines(config):
        raise ConfigError(
            "--prompt: this run learned from data.train.kind=lines, and not how a line begins; give its first "
            'characters, as --prompt "In the"'
        )
    prompt_text = "\n" if arguments.prompt is None else arguments.prompt
    prompt = encode_text(tokens, prompt_text)
    if not prompt:
        raise ConfigError(
            f"--prompt {prompt_text!r}: the run's tokenizer makes no token of it; give another text"
        )
    model = load_network(run_dir, which, arguments.trust).to(
        choose_device(config.parallel.accelerator, local_rank=0)
    )
    cached = not arguments.no_cache and "cache" in inspect_forward(type(model).forward)[0]
    options = SamplingOptions(arguments.temperature, arguments.top_k, arguments.max_tokens, arguments.seed)
    generated = generate_tokens(
        model, prompt, options, tokens.vocabulary, max_context_length(model, config, cached), cached
    )
    text = decode_stream(tokens, generated)
    reader = os.fstat(1)
    say(prompt_text, end="", flush=True)
    written = [prompt_text]
    try:
        for piece in stop_at_newline(text) if is_trained_on_lines(config) else text:
            say(piece, end="", flush=True)
            written.append(piece)
            if not os.path.samestat(reader, os.fstat(1)):  # closed, see streams.py
                break
    except TrainingError as error:
        raise TrainingError(f"{error}; take an earlier checkpoint (--which)") from error
    finally:
        say()
    report_result(text="".join(written))
    return EXIT_DONE


def _build_parser() -> Parser:
    parser = Parser(
        prog="trainrun sample", allow_abbrev=False,
        description="Prints the text that a trained language model generates after a prompt.",
    )  # fmt: skip
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="the folder of a run with task=language_modeling and data=text")
    add("--prompt", help="the text that is continued (default: a new line)")
    add("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1)")
    add("--top-k", type=int, help="draw among the K likeliest tokens (default: among all)")
    add("--max-tokens", type=int, default=256, help="(default: 256)")
    add("--seed", type=int, default=0, help="of the draws (default: 0)")
    add("--which", help="best, last, or a checkpoint's name (default: best, or last without one)")
    add("--no-cache", action="store_true", help="compute all tokens again for each new one")
    add_trust_option(parser)
    return parser


def _check_options(asked: Namespace) -> Namespace:
    limits = {"temperature": (0, 1e6), "top_k": (1, MOST), "max_tokens": (1, MOST), "seed": (0, MOST)}
    faults = [
        f"--{name.replace('_', '-')} {value}: must be {least} or more, up to {most:g}"
        for name, (least, most) in limits.items()
        if (value := getattr(asked, name)) is not None and not least <= value <= most
    ]
    if faults:
        raise ConfigError(*faults)
    return asked
