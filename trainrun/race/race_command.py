"""`trainrun race A.yaml B.yaml --until val/acc=0.91`: find which settings reach a value first, and whether they end
equally well.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import signal
from collections.abc import Sequence

from trainrun.cli.run_arguments import Parser
from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError
from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import RunDir, is_run_folder, remove_new_folder, resolve_folder
from trainrun.output import format_count, format_path_to_paste, report_result, say
from trainrun.race.race_report import PAGE, print_report, race_facts, write_report
from trainrun.race.racers import Racer, Variation, read_racers, variations
from trainrun.race.turns import Race, RaceGoal, choose_race_folder, describe_racers
from trainrun.runtime.signals import catch_stops
from trainrun.sweep.job_queue import StopRelay
from trainrun.task.metrics.directions import guess_direction
from trainrun.user_code import add_import_paths

ABOUT = (
    "Trains each racer with the same seeds, in turns, each run in a new process. A judge evaluates all validation "
    "data at fixed numbers of samples, and its time is not counted. Compares the time until the metric is reached, "
    "from the start of the process and without the start, as a ratio of "
    "geometric means with an interval; and tests whether the trainings end equally well."
)
GOAL = re.compile(r"(?P<metric>[^\s=<>]+/[^\s=<>]+)\s*(?:(?P<sign><=|>=|=)\s*(?P<value>\S+))?")


def main(argv: list[str]) -> int:
    words = race_parser().parse_args(argv)
    if words.seeds < 1:
        raise ConfigError(f"--seeds {words.seeds}: must be 1 or more")
    if words.every is not None and words.every < 1:
        raise ConfigError(f"--every {words.every}: must be 1 or more samples")
    if words.margin is not None and not words.margin > 0:
        raise ConfigError(f"--margin {words.margin:g}: must be above 0, in units of the metric")
    goal = read_goal(words.until, words.mode)
    common = [word for several in words.common for word in several]
    add_import_paths([])
    racers = read_racers(words.racers, common)
    changes = choose_variations(racers) if words.table else []
    varied = [racer for change in changes for racer in (change.alone, change.left_out) if racer is not None]
    folder = choose_race_folder() if words.out is None else resolve_folder(words.out)
    if is_run_folder(RunDir(folder)):
        raise ConfigError(f"--out {folder}: holds a run; name another folder for the race")
    race = Race(folder, [*racers, *varied], goal, words.seeds, words.every, words.margin)
    again = [
        "trainrun race",
        *map(shlex.quote, argv),
        *([] if words.out else ["--out", format_path_to_paste(folder)]),
    ]
    return run_race(race, changes, " ".join(again))


def race_parser() -> Parser:
    parser = Parser(
        prog="trainrun race", description=ABOUT, allow_abbrev=False,
        usage="trainrun race RACER RACER ... [--with key=value ...] [--until METRIC=VALUE] [--seeds N] "
        "[--every SAMPLES] [--margin X] [--table] [--out FOLDER]",
    )  # fmt: skip
    parser.add_argument("racers", metavar="RACER", nargs="*", default=[],
                        help='settings: a YAML file, or quoted words as "preset=fast lr=0.01"')  # fmt: skip
    parser.add_argument("--with", dest="common", metavar="key=value", nargs="+", action="append", default=[],
                        help="settings of all racers")  # fmt: skip
    parser.add_argument("--until", metavar="METRIC=VALUE", default="val/loss",
                        help="the target, as val/acc=0.91. Without a number, a run of the first racer with another "
                             "seed sets it before the race (val/loss)")  # fmt: skip
    parser.add_argument(
        "--mode", choices=("min", "max"), help="which values are better (by the metric's name)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each racer (5)")
    parser.add_argument("--every", type=int, metavar="SAMPLES",
                        help="training samples between two evaluations (a twentieth of A's training)")  # fmt: skip
    parser.add_argument("--margin", type=float, metavar="X",
                        help="ends that differ by less are equal, as 0.01 (1 %% of A's end)")  # fmt: skip
    parser.add_argument("--table", action="store_true",
                        help="also measure each difference between A and B, alone on A and left out of B")  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER",
                        help="folder of the race; finished runs in it are not repeated (races/DATE/TIME)")  # fmt: skip
    return parser


def read_goal(text: str, mode: str | None) -> RaceGoal:
    """Parse a target: `val/acc=0.91`, `val/error<=0.1` or `val/acc`. Raise ConfigError."""
    match = GOAL.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--until {text}: is not a target; write val/acc=0.91, or val/loss to take the target from racer A"
        )
    metric, sign, value = match["metric"], match["sign"], match["value"]
    if not metric.startswith("val"):
        raise ConfigError(f"--until {text}: racers are judged by validation; name a metric as val/acc")
    by_sign = {">=": "max", "<=": "min"}.get(sign or "")
    direction = mode or by_sign or guess_direction(metric)
    if direction is None:
        raise ConfigError(
            f"--until {text}: whether more is better is not known; add --mode max or --mode min"
        )
    if value is None:
        return RaceGoal(metric, direction)
    try:
        number = parse_float(value)
    except ValueError as error:
        raise ConfigError(f"--until {text}: {value} is no number") from error
    return RaceGoal(metric, direction, number)


def parse_float(text: str) -> float:
    """Parse a finite number. Raise ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def choose_variations(racers: Sequence[Racer]) -> list[Variation]:
    """Return the differences between two racers, for --table. Raise ConfigError for any other number of racers."""
    if len(racers) != 2:
        raise ConfigError(f"--table: takes two racers apart, and there are {len(racers)}")
    changes = variations(*racers)
    if not changes:
        raise ConfigError("--table: A and B have the same settings")
    return changes if len(changes) > 1 else []  # a single difference is the race itself


def run_race(race: Race, changes: Sequence[Variation], again: str) -> int:
    """Run the missing runs, print the results, and return the exit code.

    Raise ConfigError for a mistake in the settings of a racer; the folder of a new race without runs is removed then.
    """
    relay = StopRelay()
    is_new = not race.folder.exists()
    with contextlib.ExitStack() as closing:
        race.open()
        closing.enter_context(lock_run_folder(RunDir(race.folder)))
        runs = format_count(len(race.racers) * race.num_seeds, "run")
        differences = f", {format_count(len(changes), 'difference')}" if changes else ""
        say(f"race: {describe_racers(race.racers)}{differences}; {runs} in {race.folder}", flush=True)
        try:
            with catch_stops(relay.handle):
                race.run_all(relay)
        except ConfigError:
            if is_new and not race.runs:
                remove_new_folder(race.folder, "races")
            raise
        if race.list_seed_runs(race.racers[0].name):
            write_report(race, changes)
            print_report(race, changes)
            say(f"page: {race.folder / PAGE}", flush=True)
        if not race.is_done:
            say(f"not finished; to continue: {again}", flush=True)
        report_result(**race_facts(race, changes))
    if relay.number:
        return EXIT_INTERRUPTED if relay.number == signal.SIGINT else EXIT_AGAIN
    failed = any(run.error for racer in race.racers for run in race.list_seed_runs(racer.name))
    return EXIT_FAILED if failed else EXIT_DONE
