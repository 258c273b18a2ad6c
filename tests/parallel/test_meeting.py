"""Ranks that wait for others before the first step end: at a signal at once, without one in time."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.forks import ForkedCommand

from trainrun.folder.run_folder import RunDir, read_json
from trainrun.parallel import worker

pytestmark = pytest.mark.process

WORDS = ["parallel=ddp", "parallel.accelerator=cpu", "trainer.max_steps=1", "monitor=none", "output_dir=run"]
PLACES = {  # the wait of a rank -> where it begins
    "store": "trainrun.parallel.handshake.TCPStore",
    "config": "trainrun.parallel.handshake.answer_ranks",
    "group": "torch.distributed.init_process_group",
    "exchange": "torch.distributed.all_gather_object",
}
CODES = {signal.SIGTERM: 75, signal.SIGUSR2: 75, signal.SIGINT: 130}


@pytest.fixture
def env() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return place | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def start_rank(rank: int, env: dict[str, str], *words: str) -> ForkedCommand:
    return ForkedCommand(*WORDS, *words, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})


def end_of(*ranks: ForkedCommand) -> tuple[list[int | None], list[str]]:
    """Return the exit codes and what was printed as errors."""
    try:
        errors = [rank.communicate(60.0)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [rank.returncode for rank in ranks], errors


def let_one_rank_sleep(monkeypatch: pytest.MonkeyPatch, place: str, late: int) -> None:
    """From now on the rank `late` never comes to a place, where the other one waits. Both note that they are there."""
    module, name = place.rsplit(".", 1)
    real: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)

    def called(*arguments: Any, **options: Any) -> Any:
        rank = os.environ["RANK"]
        Path(f"there{rank}").touch()
        if int(rank) == late:
            time.sleep(600)
        return real(*arguments, **options)

    monkeypatch.setattr(place, called)


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    time.sleep(0.2)  # the wait itself begins


@pytest.mark.parametrize(
    ("wait", "late", "number"),
    [
        ("store", 0, signal.SIGTERM),
        ("config", 0, signal.SIGINT),
        ("group", 0, signal.SIGUSR2),
        ("group", 1, signal.SIGINT),
        ("exchange", 0, signal.SIGTERM),
        ("exchange", 1, signal.SIGTERM),
    ],
)
def test_a_signal_ends_every_wait_on_every_rank(
    wait: str, late: int, number: signal.Signals, env: dict[str, str], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    let_one_rank_sleep(monkeypatch, PLACES[wait], late)
    ranks = [start_rank(rank, env) for rank in range(2)]
    notes = [workdir / f"there{rank}" for rank in range(2)]
    wait_for(*(notes[:1] if wait == "config" else notes))
    for rank in ranks:
        rank.send_signal(number)
    codes, errors = end_of(*ranks)
    assert codes == [CODES[number]] * 2, errors
    assert "Traceback" not in "".join(errors)
    if wait in ("group", "exchange"):
        status = read_json(RunDir(workdir / "run").status)
        assert (status["state"], status["exit_code"]) == ("stopped", CODES[number])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_partner_never_comes_ends_in_time(rank: int, env: dict[str, str], workdir: Path) -> None:
    alone = start_rank(rank, env, "parallel.meeting_seconds=0.3")
    codes, (errors,) = end_of(alone)
    assert codes == [1], errors
    (line,) = [line for line in errors.splitlines() if line.startswith("trainrun: ")]
    place = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    assert f"rank {rank} waited 0.3 s for rank {1 - rank} (parallel.meeting_seconds) at {place}" in line
    assert ("the port answers" if rank == 0 else "the port does not answer") in line


def test_a_name_that_does_not_resolve_is_in_the_line(env: dict[str, str], workdir: Path) -> None:
    alone = start_rank(1, env | {"MASTER_ADDR": "rank0.invalid"}, "parallel.meeting_seconds=0.3")
    codes, (errors,) = end_of(alone)
    assert codes == [1]
    assert "rank0.invalid does not resolve" in errors


def test_connections_that_do_not_come_about_end_in_time(
    env: dict[str, str], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_one_rank_sleep(monkeypatch, PLACES["group"], late=1)
    end_after = worker.limit_connect_time  # the handshake before it has the usual time
    monkeypatch.setattr(worker, "limit_connect_time", lambda seconds, whom, end: end_after(2.0, whom, end))
    ranks = [start_rank(rank, env) for rank in range(2)]
    codes, errors = end_of(*ranks)
    assert codes == [1, 1], errors
    assert all("waited 2 s for " in text for text in errors), errors
    assert read_json(RunDir(workdir / "run").status)["state"] == "failed"


def test_a_port_in_use_is_a_mistake(env: dict[str, str], workdir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(env["MASTER_PORT"])))
        other.listen()
        codes, (errors,) = end_of(start_rank(0, env))
    assert codes == [2], errors
    assert f"MASTER_PORT={env['MASTER_PORT']}: " in errors
    assert not (workdir / "run").exists()


def test_ranks_with_other_settings_are_refused_by_rank_0_alone(env: dict[str, str], workdir: Path) -> None:
    ranks = [start_rank(rank, env, f"optimizer.lr=0.{rank + 1}") for rank in range(2)]
    codes, errors = end_of(*ranks)
    assert codes == [2, 2], errors
    assert "optimizer.lr=0.2: " in errors[0]
    assert "(rank 1 on " in errors[0]
    assert errors[1] == ""
    assert not (workdir / "run").exists()


BROKEN = """
import os
from torch import nn

class Broken(nn.Module):
    was_trained = False
    def __init__(self, at="build", only=-1):
        super().__init__()
        self.layer, self.at, self.only = nn.Linear(64, 10), at, only
        if at == "build":
            self.fail()
    def fail(self):
        if self.only in (-1, int(os.environ["RANK"])):
            raise RuntimeError("broken here")
    def forward(self, x):
        if self.at == "forward":
            self.fail()
        self.was_trained |= self.training
        if self.at == "validation" and self.was_trained and not self.training and int(os.environ["RANK"]) == self.only:
            os.kill(os.getpid(), 9)
        return self.layer(x.flatten(1))
"""


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["parallel.sync_batchnorm=true"], 2, "parallel.sync_batchnorm=true: "),
        (["model=broken.Broken"], 2, "broken here"),
        (["model=broken.Broken", "model.at=forward", "trainer.check_task=false"], 1, "broken here"),
        (
            ["model=broken.Broken", "model.at=forward", "trainer.check_task=false", "model.only=1"],
            1,
            "broken here",
        ),
    ],
)
def test_a_failure_after_the_ranks_met_is_one_message(
    words: list[str],
    code: int,
    text: str,
    env: dict[str, str],
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (workdir / "broken.py").write_text(BROKEN)
    monkeypatch.setattr("trainrun.runs.torchrun.FAILURE_SECONDS", 0.5 if "model.only=1" in words else 60.0)
    codes, errors = end_of(*[start_rank(rank, env, *words) for rank in range(2)])
    assert codes == [code, code], errors
    messages = [line for line in "".join(errors).splitlines() if line.startswith("trainrun: ")]
    assert len(messages) == 1, errors
    assert text in "".join(errors)
    assert ("trainrun: " in errors[0]) == ("model.only=1" not in words)
    assert text in read_json(RunDir(workdir / "run").status)["message"] or code == 2


def test_a_rank_that_died_in_a_validation_is_named_with_the_last_step(
    env: dict[str, str], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "broken.py").write_text(BROKEN)
    monkeypatch.setattr("trainrun.runs.torchrun.FAILURE_SECONDS", 0.1)
    words = ["model=broken.Broken", "model.at=validation", "model.only=1"]
    codes, errors = end_of(*[start_rank(rank, env, *words) for rank in range(2)])
    assert codes == [1, -signal.SIGKILL], errors
    (line,) = [line for line in errors[0].splitlines() if line.startswith("trainrun: ")]
    assert re.search(
        r"; rank 1 did not enter exchange \d+ \(\w+\) after step 1, in which rank 0 waited$", line
    ), line
