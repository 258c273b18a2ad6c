"""F28: three workers of one search, each as a machine of its own; two of them are killed again and again."""

from __future__ import annotations

import fcntl
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from faults.judges import Tally
from trainrun.folder.seal import KEY_BYTES

what = "a search with three workers, two of which are killed at random: every point once, every lock free"
KILLS = 20
POINTS = 24
NUM_WORKERS = 3
WORDS = [
    "--multirun", "data=digits", "model=mlp", "trainer.max_steps=150", "checkpoint.every_n_train_steps=20",
    "optimizer.lr=tag(log, interval(1e-4, 1e-1))", "sweep=optuna", f"sweep.trials={POINTS}",
    "parallel.accelerator=cpu",
]  # fmt: skip


def run(folder: Path, rng: random.Random, size: float, tally: Tally) -> None:
    place = folder / "shared"
    place.mkdir()
    kills = max(2, round(KILLS * size))
    key = place / "state-0" / "trainrun" / "key"
    for number in range(NUM_WORKERS):
        own_key = place / f"state-{number}" / "trainrun" / "key"
        own_key.parent.mkdir(parents=True)
        own_key.write_bytes(secrets.token_bytes(KEY_BYTES) if number == 0 else key.read_bytes())
        own_key.chmod(0o600)
    workers = [start_worker(place, number) for number in range(NUM_WORKERS)]
    for _ in range(kills):
        time.sleep(rng.uniform(0.5, 5.0))
        number = rng.randrange(1, NUM_WORKERS)
        if workers[number].poll() is None:
            workers[number].send_signal(signal.SIGKILL)
            tally.faults += 1
        workers[number].wait()
        workers[number] = start_worker(place, number)
    codes = [worker.wait(600) for worker in workers]
    tally.cases += 1
    problems = [f"workers end with {codes}"] if any(codes) else []
    problems += list(faults_of(place / "sweep", [place / f"state-{number}" for number in range(NUM_WORKERS)]))
    if problems:
        tally.lost += 1
        tally.failed.append(("shared", "; ".join(problems)))


def start_worker(place: Path, number: int) -> subprocess.Popen[bytes]:
    """Start the command of the sweep with leases of its own, as another machine has them."""
    environment = {**os.environ, "XDG_STATE_HOME": str(place / f"state-{number}")}
    with (place / f"output-{number}").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "trainrun", *WORDS, f"output_dir={place / 'sweep'}"], cwd=place,
            stdout=output, stderr=output, start_new_session=True, env=environment,
        )  # fmt: skip


def faults_of(sweep: Path, states: list[Path]) -> list[str]:
    """Return what is wrong with a sweep that has ended."""
    if not (sweep / "sweep.json").is_file():
        return ["no sweep was begun"]
    problems = []
    saved: dict[str, Any] = json.loads((sweep / "sweep.json").read_text())
    jobs = [num for numbers in saved["trials"] for num in numbers]
    if len(saved["trials"]) != POINTS or sorted(set(jobs)) != sorted(job["num"] for job in saved["jobs"]):
        problems.append(f"{len(saved['trials'])} points of {POINTS}, with {len(saved['jobs'])} jobs")
    not_done = [job["folder"] for job in saved["jobs"] if job["result"]["state"] != "done"]
    if not_done:
        problems.append(f"not done: {not_done}")
    problems += [
        f"{job['folder']}: {fault}"
        for job in saved["jobs"]
        if (fault := fault_of_rows(sweep / job["folder"]))
    ]
    problems += faults_of_study(sweep, saved)
    locks = [*(sweep / ".locks").iterdir(), *(path for state in states for path in state.rglob("core-*"))]
    problems += [f"{path}: is locked" for path in locks if is_locked(path)]
    return problems


def fault_of_rows(folder: Path) -> str:
    """Return what is wrong with the rows of a job: each step must be there once, whoever trained it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "eval"]
    return "" if len(set(steps)) == len(steps) > 0 else f"validations at steps {steps}"


def faults_of_study(sweep: Path, saved: dict[str, Any]) -> list[str]:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(sweep / "study.log")))
    trials = optuna.load_study(study_name="sweep", storage=storage).trials
    values = {job["num"]: job["result"]["value"] for job in saved["jobs"]}
    return [
        f"trial {trial.number} is {trial.state.name} with {trial.values}"
        for trial, (num,) in zip(trials, saved["trials"], strict=True)
        if trial.state.name != "COMPLETE" or abs(trial.values[0]) != abs(values[num])
    ]


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
