"""`trainrun tune [the words of a run]`: the fastest way to the same training on this machine, as a preset."""

from __future__ import annotations

import contextlib
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.commands.arguments import Parser
from trainrun.commands.budget import take_seconds
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.masking import masked_words
from trainrun.output import say

if TYPE_CHECKING:
    from trainrun.lab.evidence import Outcome
    from trainrun.lab.journal import Journal

BUDGET_SECONDS = 120.0
UNMEASURED_ROWS = 2  # of a journal: the question, and a first look
ABOUT = (
    "Takes the words of a run and measures, on its own model and data, what makes it faster without changing what "
    "it learns: threads and data engine, kernels, precision with layout and attention, micro-batches, ranks, "
    "compilation. Writes conf/preset/tuned-HOST.yaml, which preset=tuned-HOST finds. Interrupted, the same words "
    "go on where it stopped."
)


def main(argv: list[str]) -> int:
    argv, budget = take_seconds(argv, BUDGET_SECONDS, "tune")
    wish, words = tune_parser().parse_known_args(argv)
    wish.budget = budget
    from trainrun.lab.choices import plain_words
    from trainrun.lab.preset_file import host_preset, preset_path
    from trainrun.words.compose import compose_run

    composition = compose_run(words)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    preset = preset_path(wish.name or host_preset(), Path.cwd())
    own = composition.own.get("hydra.run.dir")
    folder, journal = place(wish, words, composition.config.run_name or "run", own)
    typed = [word for word in plain_words(words) if not word.startswith("hydra.run.dir=")]
    with kept_if_worth(folder):
        outcome = measured(wish, typed, journal)
    return told(wish, typed, outcome, folder, preset)


@contextlib.contextmanager
def kept_if_worth(folder: Path) -> Iterator[None]:
    """The journal of a search that ends early stays where something was measured; else nothing does."""
    from trainrun.lab.errand import forget, shown
    from trainrun.lab.journal import NAME, read_rows

    try:
        yield
    except BaseException as error:
        if len(read_rows(folder / NAME)) <= UNMEASURED_ROWS:
            forget(folder / NAME)
            raise
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted; the same words go on from {shown(folder)}") from error
        raise


def tune_parser() -> Parser:
    parser = Parser(prog="trainrun tune", description=ABOUT, allow_abbrev=False, usage="trainrun tune [key=value ...] "
                    "[--allow exact|numeric] [--budget SECONDS] [--name PRESET] [--explain] [--fresh]")  # fmt: skip
    parser.add_argument("--allow", choices=("exact", "numeric"), default="exact",
                        help="exact (default): other kernels, losses equal to 1e-4; numeric: other number types too, "
                        "as bfloat16, losses within 2 %%")  # fmt: skip
    parser.add_argument("--budget", metavar="SECONDS", help="in all (120)")
    parser.add_argument("--name", metavar="PRESET", help="of the preset (tuned-HOST)")
    parser.add_argument("--explain", action="store_true", help="say of every setting why it was not taken")
    parser.add_argument("--fresh", action="store_true", help="do not go on from an interrupted search")
    return parser


def place(wish: Namespace, words: list[str], run_name: str, own: str | None) -> tuple[Path, Journal]:
    """The folder, and the journal: that of an interrupted search of the same words where there is one."""
    from trainrun.lab.errand import new_folder, shown
    from trainrun.lab.journal import NAME, Journal, read_rows, unfinished

    asked = question(wish, words)
    folder = new_folder("tune", run_name, own)
    old = (
        None
        if wish.fresh
        else unfinished([folder] if own else sorted(Path("outputs").absolute().glob("*/*")), asked)
    )
    if old is not None:
        say(f"goes on from {shown(old.parent)} (anew: --fresh)")
        return old.parent, Journal(old, read_rows(old))
    if (folder / NAME).is_file() or (folder / "config.yaml").is_file():
        raise ConfigError(f"output_dir={folder}: holds something already; name another folder")
    return folder, Journal(folder / NAME, asked=asked)


def question(wish: Namespace, words: list[str]) -> dict[str, object]:
    """What two searches must share for one to go on from the other."""
    from trainrun.words.compose import compose_run
    from trainrun.words.tuned import fingerprint

    config = compose_run(words).config
    return {
        "words": masked_words(words),
        "allow": wish.allow,
        "budget": wish.budget,
        **fingerprint(config, Path.cwd()),
    }


def measured(wish: Namespace, typed: list[str], journal: Journal) -> Outcome:
    import trainrun.rank  # noqa: F401 - torch, ahead of the bench: until that one holds signals, Ctrl-C just leaves
    from trainrun.lab.bench import Bench
    from trainrun.lab.contender import RealStand
    from trainrun.lab.errand import end_progress, progress
    from trainrun.lab.knobs import Wish
    from trainrun.lab.tuner import Tuner
    from trainrun.parallel.launch import num_cores

    asked = Wish(wish.allow, wish.budget, num_cores())
    with Bench() as bench:
        try:
            return Tuner(typed, RealStand(bench), asked, journal, progress()).run()
        finally:
            end_progress()


def told(wish: Namespace, typed: list[str], outcome: Outcome, folder: Path, preset: Path) -> int:
    from trainrun.lab import tune_report
    from trainrun.lab.errand import shown
    from trainrun.lab.preset_file import write_preset
    from trainrun.rundir import write_json
    from trainrun.words.tuned import machine

    head = f"trainrun tune {shlex.join(masked_words(typed))}".rstrip()
    say(f"{head} | {machine()} | {outcome.seconds:.0f} s of {wish.budget:.0f} s")
    say(tune_report.noise_line(outcome))
    say(tune_report.table(outcome))
    for line in tune_report.summary(outcome, wish.explain):
        say(line)
    say(f"result: {outcome.verdict}")
    written = write_preset(preset, typed, outcome, Path.cwd()) if outcome.claimed else None
    if written is not None and written.path is not None:
        say(f"wrote {shown(written.path)}; use it with: trainrun {shlex.join(written.use)}")
    elif written is not None:
        say(
            f"no preset: a word of yours, or an experiment, stands above it; say: trainrun {shlex.join(written.use)}"
        )
    elif wish.allow == "exact":
        say("not tried: bfloat16 and other number types, which round more (--allow numeric)")
    write_json(
        folder / "tune.json", {"machine": machine(), "words_typed": masked_words(typed), **outcome.row()}
    )
    picture = tune_report.picture(outcome, folder / "ladder.png", head)
    say(f"details: {shown(folder / 'tune.json')}, {picture.name}, journal.jsonl")
    return EXIT_DONE
