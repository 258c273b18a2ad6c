"""`trainrun resume RUN_DIR [key=value ...]`: the same run, from its newest good checkpoint."""

from __future__ import annotations

from trainrun.cli.main import add_import_paths, follows_others, told
from trainrun.cli.run_arguments import parse, run_parser
from trainrun.runs.run import open_run, resume_run


def main(argv: list[str]) -> int:
    """Return the exit code of the run."""
    parser = run_parser(
        "resume", "Goes on with a run in the same folder, bit for bit as if it had never stopped."
    )
    words = parse(parser, argv)
    if follows_others():
        from trainrun.runs.torchrun import follow_run

        return follow_run()
    run = open_run(words.run_dir)
    return told(run.root, lambda: resume_run(run, words.overrides, add_import_paths([]), words.trust))
