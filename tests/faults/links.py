"""F29: ranks on two machines; the network between them is cut for a while and for ever.

The machines are network namespaces with a cable between them, which needs the rights of root.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from faults.cold import left_behind
from faults.judges import Tally

what = "ranks on two machines, by torchrun or alone: the network is cut for 20 s (goes on) and for ever (one line)"
CASES = 10  # of each kind
CUT_SECONDS = 20.0
TIMEOUT_SECONDS = 10.0  # of an exchange, where the network stays cut
LIMIT_SECONDS = 240.0
EVERY_TORCHRUN = 5  # cases, of which one is started by torchrun
PORT = 29511
WORDS = [
    "parallel=ddp", "parallel.accelerator=cpu", "seed=1", "trainer.max_steps=1500", "monitor.log_every_n_steps=5",
    "monitor.plots=false", "checkpoint.enabled=false", "trainer.limit_val_batches=1",
]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A network namespace, and its end of the cable."""

    namespace: str
    interface: str
    address: str

    def run(self, *words: str) -> list[str]:
        """Return the command that runs another one on this machine."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def set_cable(self, state: str) -> None:
        subprocess.run(self.run("ip", "link", "set", self.interface, state), check=True)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yield two network namespaces with a cable between them."""
    names = [f"trainrun-{os.getpid()}-{number}" for number in range(2)]
    machines = [
        Machine(name, f"cable{number}", f"10.231.7.{number + 1}") for number, name in enumerate(names)
    ]
    with ExitStack() as removed:
        for machine in machines:
            subprocess.run(["ip", "netns", "add", machine.namespace], check=True, capture_output=True)
            removed.callback(subprocess.run, ["ip", "netns", "del", machine.namespace], check=True)
        first, second = machines
        ends = ["type", "veth", "peer", "name", second.interface, "netns", second.namespace]
        subprocess.run(
            first.run("ip", "link", "add", first.interface, *ends), check=True, capture_output=True
        )
        for machine in machines:
            address = ["ip", "address", "add", f"{machine.address}/24", "dev", machine.interface]
            subprocess.run(machine.run(*address), check=True)
            subprocess.run(machine.run("ip", "link", "set", "lo", "up"), check=True)
            machine.set_cable("up")
        yield machines


@cache
def can_connect_machines() -> bool:
    """Return whether this process may make network namespaces."""
    if shutil.which("ip") is None:
        return False
    try:
        with two_machines():
            return True
    except subprocess.CalledProcessError:
        return False


def run(folder: Path, rng: random.Random, size: float, tally: Tally) -> None:
    for number in range(max(1, round(CASES * size))):
        by_torchrun = number % EVERY_TORCHRUN == 0
        for seconds in (CUT_SECONDS, math.inf):
            place = folder / f"link-{number}-{seconds:g}"
            place.mkdir()
            with two_machines() as machines:
                problems = play(place, machines, seconds, by_torchrun)
            tally.cases += 1
            tally.faults += 1
            tally.lost += bool(problems)
            if problems:
                name = f"cut for {seconds:g} s, {'torchrun' if by_torchrun else 'alone'}"
                print(f"  {name}: {problems}", flush=True)
                tally.failed.append((name, "; ".join(problems)))


def play(place: Path, machines: list[Machine], cut_seconds: float, by_torchrun: bool) -> list[str]:
    """Train on both machines, cut the network after the first steps, and return what went wrong."""
    timeout = TIMEOUT_SECONDS if cut_seconds == math.inf else 10 * CUT_SECONDS
    words = [*WORDS, f"output_dir={place / 'run'}", f"parallel.timeout_seconds={timeout}"]
    outputs = [place / f"output{rank}" for rank in range(2)]
    ranks = [start_rank(place, machines, rank, words, by_torchrun) for rank in range(2)]
    try:
        if not wait_for_steps(place / "run" / "metrics.jsonl", ranks):
            return [f"no step was made: {[path.read_text()[-500:] for path in outputs]}"]
        machines[1].set_cable("down")
        cut = time.monotonic()
        if cut_seconds < math.inf:
            time.sleep(cut_seconds)
            still_running = all(rank.poll() is None for rank in ranks)
            machines[1].set_cable("up")
        codes = [rank.wait(LIMIT_SECONDS) for rank in ranks]
        seconds = time.monotonic() - cut
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    print(
        f"  cut for {cut_seconds:g} s, torchrun {by_torchrun}: codes {codes}, {seconds:.1f} s after the cut",
        flush=True,
    )
    lines = [
        [line for line in path.read_text().splitlines() if line.startswith("trainrun: ")] for path in outputs
    ]
    problems = [f"left behind: {left}"] if (left := left_behind(place)) else []
    if cut_seconds < math.inf:
        if codes != [0, 0] or not still_running:
            problems.append(f"ends with {codes}: {lines}")
    elif codes != [1, 1] or any(len(of_rank) != 1 or "lost contact" not in of_rank[0] for of_rank in lines):
        problems.append(f"ends with {codes}: {lines}")
    return problems


def start_rank(
    place: Path, machines: list[Machine], rank: int, words: list[str], by_torchrun: bool
) -> subprocess.Popen[bytes]:
    """Start the rank of a machine: by an agent of torchrun, or as Slurm would."""
    address = machines[0].address
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "trainrun", *words]
    if by_torchrun:
        agent = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", f"--master-addr={address}"]
        agent += [f"--master-port={PORT}", "-m", "trainrun"]
        command = [sys.executable, "-m", "torch.distributed.run", *agent, *words]
    else:
        env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    with (place / f"output{rank}").open("wb") as output:
        return subprocess.Popen(
            machines[rank].run(*command), cwd=place, env=env, stdout=output, stderr=output
        )


def wait_for_steps(rows: Path, ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until steps are logged. Return False if a rank ends first."""
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until and all(rank.poll() is None for rank in ranks):
        if rows.exists() and any(
            json.loads(line)["kind"] == "train" for line in rows.read_text().splitlines()[:-1]
        ):
            return True
        time.sleep(0.1)
    return False
