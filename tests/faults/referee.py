"""Plays one case, life after life, and judges it against the same run without faults."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from faults import warm
from faults.defects import plant
from faults.evidence import best_of, differences, facts_of, other_ranks_of
from faults.forks import KILL_CODE, Ending, Strike, fork_ranks, run_forked
from faults.history import PLACE, Life, check_history, check_reference, num_starts, read_history
from faults.inject import COUNTS, NUMBERS, arm, be_patient, keep_history
from faults.plan import CODE, DISK, SIGNALS, WORKER, Case, Fault
from faults.small_disk import leave_free, small_disk
from faults.subjects import SUBJECTS, Subject
from trainrun.cli import train_command
from trainrun.cli.main import main
from trainrun.config.compose import Composition, compose_run
from trainrun.errors import TrainrunError
from trainrun.runtime.signals import exit_at_interrupt

TIMEOUT = 60.0
AGAIN_TIMEOUT = 180.0  # of ranks that start again, up to twelve times
# a full disk or a fault of the model fails the run, unless only a deletion failed; a stop may come too late; a worker
# that stalls ends the run with words about data.worker_timeout_seconds
CODES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(DISK, (0, 1, 2)), **dict.fromkeys(CODE, (0, 1)), **dict.fromkeys(WORKER, (0,)),
    "kill": (0, KILL_CODE), "term": (0, 75, 143), "usr1": (0, 75, 138), "usr2": (0, 75, 140), "int": (0, 130),
    "worker-stop": (0, 2), "full": (0, 1, 2), "stop": (1,),
}  # fmt: skip
EARLY = {"term": -15, "usr1": -10, "usr2": -12, "int": -2}  # ahead of the first handler


@dataclass(frozen=True)
class Reference:
    """A run without faults. counts: of the places of a fault, for each rank; seconds: of the whole process."""

    tree: Any
    others: list[Any]
    rows: list[dict[str, Any]]
    best: list[tuple[int, float]]
    lives: list[Life]
    counts: list[dict[str, int]]
    seconds: float


@dataclass
class Outcome:
    """lost: the run cannot be brought to its end; different: it ends with other bits; problems: in words."""

    case: Case
    seconds: float = 0.0
    struck: int = 0
    lost: bool = False
    different: bool = False
    tracebacks: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.problems


class Referee:
    """folder: where the runs are made; each is removed when it was judged well."""

    def __init__(self, folder: Path, keep: bool = False) -> None:
        self.folder, self.keep = folder, keep
        self._references: dict[str, Reference] = {}
        self._compositions: dict[str, Composition] = {}
        self._number = 0

    def reference(self, name: str) -> Reference:
        if name not in self._references:
            self._references[name] = self._make_reference(SUBJECTS[name])
        return self._references[name]

    def play(self, case: Case) -> Outcome:
        subject, reference = SUBJECTS[case.subject], self.reference(case.subject)
        outcome, place = Outcome(case), self._place()
        with small_disk(place / "run") if case.on_small_disk else nullcontext():
            self._play(outcome, place, subject, reference)
        if outcome.good and not self.keep:
            shutil.rmtree(place)
        return outcome

    def _play(self, outcome: Outcome, place: Path, subject: Subject, reference: Reference) -> None:
        case = outcome.case
        for number, fault in enumerate([*case.faults, None]):
            said = (place / "output").stat().st_size
            by_resume = bool(crc32(f"{case} {number}".encode()) & 1)
            ending = self._live(place, subject, fault, case.defect, by_resume)
            outcome.seconds += ending.seconds
            text = (place / "output").read_bytes()[said:].decode()
            self._judge_ending(outcome, place, number, fault, ending, text)
            if ending.code == 0 or outcome.problems:
                break  # it has come to its end
        if not outcome.problems:
            try:
                self._judge_end(outcome, place, subject, reference)
                self._judge_leavings(outcome, place, fault)
            except TrainrunError as error:  # its end cannot be read
                outcome.lost = True
                outcome.problems.append(str(error))
        history = place / "history"
        outcome.struck += history.read_text().count(" struck ") if history.exists() else 0
        outcome.struck += (place / "struck").exists()

    def _place(self) -> Path:
        self._number += 1
        place = self.folder / f"case-{os.getpid()}-{self._number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "output").touch()  # a life may be killed before it has opened it
        return place

    def _make_reference(self, subject: Subject) -> Reference:
        """Made twice: the second time in a warm process, for the seconds, and it must have the same bits."""
        first, again = self._whole(subject), self._whole(subject)
        if found := list(differences((first.tree, first.rows), (again.tree, again.rows))):
            raise RuntimeError(f"{subject.name}: two runs without a fault differ: {found[:5]}")
        return replace(first, seconds=min(first.seconds, again.seconds))

    def _whole(self, subject: Subject) -> Reference:
        place = self._place()
        os.environ[COUNTS] = str(place / "counts")
        try:
            ending = self._live(place, subject, None)
        finally:
            del os.environ[COUNTS]
        if ending.code != 0:
            raise RuntimeError(f"{subject.name} fails without a fault: {(place / 'output').read_text()}")
        lives = read_history(place / "history")
        if wrong := check_reference(lives, subject.samples, subject.epochs):
            raise RuntimeError(f"{subject.name} without a fault: {wrong}")
        counts = []
        for rank in range(subject.ranks):
            numbers = map(int, (place / f"counts.{rank}").read_text().split())
            counts.append(dict(zip(("mark", "batch", "file"), numbers, strict=True)))
        tree, rows = facts_of(place / "run")
        others = other_ranks_of(place / "run", subject.ranks)
        best = best_of(place / "run")
        shutil.rmtree(place)
        return Reference(tree, others, rows, best, lives, counts, ending.seconds)

    def _live(
        self, place: Path, subject: Subject, fault: Fault | None, defect: str = "", by_resume: bool = False
    ) -> Ending:
        """One life of the run: begun, or gone on with as a user would, by the same command or by `resume`."""
        run, composition, strike = place / "run", self.composed(subject), None
        if fault is not None and fault.place in ("time", "driver"):
            rank = fault.rank if subject.ranks > 1 and fault.place == "time" else None
            strike = Strike(NUMBERS[fault.action], fault.value, rank)
        if run.is_mount():
            leave_free(run, fault.value if fault is not None and fault.place == "disk" else None)

        def work() -> int:
            os.environ[PLACE] = str(place / "history")
            os.chdir(place)
            if fault is not None and fault.place == "sample":
                number = NUMBERS[fault.action.partition("-")[2]]
                os.environ["FAULTS_WORKER"] = f"{fault.value:g}:{number}:{place / 'struck'}"
            be_patient(fault)
            return _enter(run, subject, fault, defect, composition, by_resume)

        timeout = AGAIN_TIMEOUT if subject.starts_again else TIMEOUT
        return run_forked(work, place / "output", timeout, strike)

    def composed(self, subject: Subject) -> Composition:
        """Hydra takes longer than the training; what it makes is the same for every case."""
        if subject.name not in self._compositions:
            if subject.ranks > 1:
                warm.for_ranks()
            self._compositions[subject.name] = compose_run([*subject.words, "output_dir=unknown"])
        return self._compositions[subject.name]

    def _judge_ending(
        self, outcome: Outcome, place: Path, number: int, fault: Fault | None, ending: Ending, text: str
    ) -> None:
        action = fault.kind if fault is not None else ""
        subject = SUBJECTS[outcome.case.subject]
        allowed = (*CODES.get(action, (0,)), EARLY.get(action, 0))
        if subject.starts_again:
            allowed = (0,) if fault is None or fault.kind == fault.action else (0, 1)
        elif action == "kill" and subject.ranks > 1:
            allowed = (0, 1, KILL_CODE)
        outcome.struck += ending.struck + (action == "full" and ending.code != 0)
        if ending.hung:
            outcome.problems.append(f"life {number} hangs")
            outcome.lost = True
        elif ending.code not in allowed:
            outcome.problems.append(f"life {number} ({fault}) ends with {ending.code}: {text[-2000:]}")
            outcome.lost = fault is None
        if subject.starts_again and ending.code == 1:
            said = json.loads((place / "run" / "status.json").read_text())["message"]
            if "no further restart" not in said:
                outcome.problems.append(f"life {number} ({fault}) gave up too early: {said}")
        if "Traceback" in text and action not in (
            "error",
            "kill",
        ):  # loaders may complain that their master is dead
            outcome.tracebacks += 1
            outcome.problems.append(f"life {number} ({fault}) shows a traceback: {text[-3000:]}")
        left = [path.name for path in (place / "run" / "checkpoints").glob(".bad-*")]
        if left:
            outcome.problems.append(f"life {number} ({fault}): a checkpoint was damaged: {left}")

    def _judge_end(self, outcome: Outcome, place: Path, subject: Subject, reference: Reference) -> None:
        run = place / "run"
        tree, rows = facts_of(run)
        expected = reference.tree
        if tree["shared"]["train"]["validated_step"] != tree["shared"]["train"]["step"]:
            # a stop at the last step saved it ahead of its validation, of which only the metric is added later
            expected, tree = _unvalidated(expected), _unvalidated(tree)
        found = [*differences(expected, tree), *differences(reference.rows, rows, "rows")]
        found += differences(reference.others, other_ranks_of(run, subject.ranks), "ranks")
        found += differences(reference.best, best_of(run), "best")
        outcome.different = bool(found)
        outcome.problems += found[:5]
        wrong = check_history(read_history(place / "history"), reference.lives, starts_of(subject))
        outcome.different |= bool(wrong)
        outcome.problems += wrong[:5]

    def _judge_leavings(self, outcome: Outcome, place: Path, last: Fault | None) -> None:
        """last: of the life that came to the end; what a fault of the disk kept from being deleted is only noted."""
        left = [path.name for path in (place / "run" / "checkpoints").glob(".*")]
        if left and (last is None or last.kind not in (*DISK, "full")):
            outcome.problems.append(f"left behind: {left}")


def _unvalidated(tree: Any) -> Any:
    """What a validation does not change: it moves counters, a plateau's schedule and the rate that this sets."""
    shared = {name: tree["shared"][name] for name in ("model", "ema", "precision", "stream")}
    return {"shared": shared | {"optimizer": tree["shared"]["optimizer"]["state"]}, "own": tree["own"]}


def starts_of(subject: Subject) -> dict[int, int]:
    """Step -> micro-batches of one rank before it; the last window of an epoch may be short."""
    told = dict(word.split("=", 1) for word in subject.words)
    accumulate = int(told["trainer.accumulate_grad_batches"])
    batches = -(-subject.samples // (int(told["data.batch_size"]) * subject.ranks))
    starts, step = {}, 0
    for epoch in range(subject.epochs):
        for first in range(0, batches, accumulate):
            starts[step], step = epoch * batches + first, step + 1
    return starts | {step: subject.epochs * batches}


def _enter(
    run: Path, subject: Subject, fault: Fault | None, defect: str, composition: Composition, by_resume: bool
) -> int:
    """With a history, a fault and perhaps a defect."""
    driver = os.getpid()
    keep_history()
    if defect:
        plant(defect)
    if subject.ranks > 1:
        fork_ranks(lambda rank: arm(fault if _strikes(fault, rank) else None, run, driver))
    else:
        arm(fault, run, driver)
    return enter(run, subject, composition, by_resume)


def _strikes(fault: Fault | None, rank: int) -> bool:
    """With a `+` also in the attempts that follow."""
    first = os.environ["TRAINRUN_ATTEMPT"] == "0"
    return fault is not None and fault.rank == rank and (first or fault.action != fault.kind)


def enter(run: Path, subject: Subject, composition: Composition, by_resume: bool = False) -> int:
    """The command that a user would type now, with the signals of its first lines."""
    exit_at_interrupt()
    own = {**composition.own, "hydra.run.dir": str(run)}
    train_command.compose_command_line = lambda *prepared: replace(composition, own=own, notes=[])  # type: ignore[assignment]
    words = [*subject.words, f"output_dir={run}"]
    if by_resume and (run / "config.yaml").exists():
        before = num_starts()
        code = main(["resume", str(run)])
        if code != 2 or num_starts() > before or any((run / "checkpoints").glob("step-*")):
            return code
    return main(words)


assert set(SIGNALS) <= CODES.keys()
