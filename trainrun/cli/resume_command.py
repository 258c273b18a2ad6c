"""`trainrun resume RUN_DIR`: continue a run from its newest checkpoint. `trainrun again RUN_DIR`: repeat it as a new
run.
"""

from __future__ import annotations

import contextlib
import sys

from trainrun.cli.run_arguments import build_run_parser, parse_arguments
from trainrun.cli.train_command import (
    is_follower_rank,
    run_and_print_resume_command,
    run_ranks_of_node,
    use_folder_of_restart,
)
from trainrun.config.aliases import resolve_alias
from trainrun.config.compose import Composition
from trainrun.config.saved_config import load_config, merge_overrides, parse_saved_overrides
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import (
    SEED_DRAWN,
    LaunchSpec,
    read_identity,
    read_overrides,
    resolve_folder,
)
from trainrun.folder.status import is_sweep
from trainrun.output import say
from trainrun.runs.resume import check_modules, compare_configs, format_value_as_typed, load_trusted_config
from trainrun.runs.run import (
    dismiss_other_ranks,
    import_torchrun,
    open_or_create_run,
    open_run,
    resume_run,
    start_training,
)
from trainrun.user_code import add_import_paths


def main(argv: list[str]) -> int:
    """Continue a run or a sweep. Return its exit code."""
    parser = build_run_parser(
        "resume",
        "Continues a run in the same folder, bit for bit as if it had never stopped. Of a sweep, runs the jobs that "
        "are not done.",
    )
    words = parse_arguments(parser, argv)
    code = run_ranks_of_node(lambda: load_config(open_run(words.run_dir).config, words.overrides))
    if code is not None:
        return code
    if is_follower_rank():
        return int(import_torchrun().train_as_other_rank())
    folder = resolve_folder(words.run_dir)
    if is_sweep(folder):
        from trainrun.sweep import options as sweep_options
        from trainrun.sweep import run_sweep

        options, others = sweep_options.split_options(words.overrides)
        if others:
            raise ConfigError(f"{others[0]}: a sweep goes on with its own words; leave this out")
        return run_sweep.resume_sweep(folder, words.trust, options)
    with dismiss_other_ranks():
        run = open_run(words.run_dir)
    return run_and_print_resume_command(
        run.root, lambda: resume_run(run, words.overrides, add_import_paths(words.config_dir), words.trust)
    )


def repeat_command(argv: list[str]) -> int:
    """Start a new run with the settings of another run. Return its exit code."""
    parser = build_run_parser(
        "again",
        "Starts a new run in a new folder, with the settings and the seed of another run. Without other settings it "
        "computes the same results. seed=null uses a new seed.",
    )
    words = parse_arguments(parser, argv)
    code = run_ranks_of_node(lambda: load_config(open_run(words.run_dir).config, words.overrides))
    if code is not None:
        return code
    if is_follower_rank():
        return int(import_torchrun().train_as_other_rank())
    folder = "hydra.run.dir"
    keys = {word: resolve_alias(word.partition("=")[0], lambda _: False) for word in words.overrides}
    places = [word.partition("=")[2] for word, key in keys.items() if key == folder]
    own_settings = {folder: places[-1]} if places else {}
    overrides = [word for word, key in keys.items() if key != folder]
    with contextlib.ExitStack() as held:
        with dismiss_other_ranks():
            earlier = open_run(words.run_dir)
            before = load_trusted_config(earlier, [], words.trust)
            config = load_trusted_config(earlier, overrides, words.trust) if overrides else before
            check_modules(earlier, config)
            changed = "".join(
                f"; {key}={format_value_as_typed(here)} (was {format_value_as_typed(there)})"
                for key, there, here in compare_configs(before, config)
            )
            say(f"note: the settings of {earlier.root}{changed}", file=sys.stderr)
            drawn = [f"seed={before.seed}"] if read_identity(earlier).get(SEED_DRAWN) else []
            typed = merge_overrides(merge_overrides(read_overrides(earlier), drawn), words.overrides)
            translated = parse_saved_overrides(overrides).overrides
            composition = use_folder_of_restart(Composition(config, {}, translated, own_settings))
            run, config, goes_on = held.enter_context(open_or_create_run(composition, typed))
        order = LaunchSpec(goes_on, add_import_paths(words.config_dir))
        return run_and_print_resume_command(run.root, lambda: start_training(run, config, order))
