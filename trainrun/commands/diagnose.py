"""`trainrun diagnose [the words of a run]`: what the training waits for, measured by taking it away."""

from __future__ import annotations

import sys
import time

from trainrun.commands.arguments import Parser, known_and_words
from trainrun.commands.budget import take_seconds
from trainrun.compose import compose_run
from trainrun.errors import EXIT_DONE, ConfigError

BUDGET_SECONDS = 40.0
ABOUT = (
    "Takes the words of a run and measures, in a folder that is thrown away, how much faster it would be without "
    "loading, logging, validation, checkpoints, padding, the update: the real loop, in turns with itself. Says what it "
    "waits for, what this machine allows, and which words to try. Writes diagnosis.json and pictures."
)


def main(argv: list[str]) -> int:
    began = time.monotonic()
    argv, budget = take_seconds(argv, BUDGET_SECONDS, "diagnose")
    wish, words = known_and_words(diagnose_parser(), argv)
    composition = compose_run(words)
    for note in composition.notes:
        print(f"note: {note}", file=sys.stderr)

    import trainrun.rank  # noqa: F401  # once, for all runs under test: they are copies of this process
    from trainrun.lab.choices import plain_words
    from trainrun.lab.diagnosis import diagnose
    from trainrun.lab.errand import end_of_progress, new_folder, progress, shown
    from trainrun.lab.report import lines_of, write_report

    folder = new_folder(
        "diagnose", composition.config.run_name or "run", composition.own.get("hydra.run.dir")
    )
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"output_dir={folder}: holds a run already; name another folder")
    words = [word for word in words if not word.startswith("hydra.run.dir=")]
    deadline, say = began + budget, progress()
    try:
        found = diagnose(
            words, deadline, lambda about: say(about, max(deadline - time.monotonic(), 0.0)), wish.trace
        )
    finally:
        print(end_of_progress(), end="", flush=True)
    print("\n".join(lines_of(found)))
    write_report(found, plain_words(words), folder)
    print(f"in {time.monotonic() - began:.0f} s; pictures and diagnosis.json: {shown(folder)}")
    return EXIT_DONE


def diagnose_parser() -> Parser:
    parser = Parser(
        prog="trainrun diagnose", description=ABOUT, allow_abbrev=False,
        usage="trainrun diagnose [key=value ...] [--budget SECONDS] [--trace]",
    )  # fmt: skip
    parser.add_argument("--budget", metavar="SECONDS", help="in all (40)")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also the operations that take most, and five steps as trace.json.gz for https://ui.perfetto.dev",
    )
    return parser
