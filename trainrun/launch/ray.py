"""`trainrun launch=ray ...`: run the ranks on the machines of a Ray cluster.

What: a placement group reserves the CPUs and GPUs of each machine. One actor per rank starts the same command, with the
    variables of torchrun. If a rank fails or a machine is lost, the other ranks are ended. All ranks start again from
    the newest checkpoint, at most `parallel.max_restarts` times. When: a cluster on which Ray runs already, with a
    folder that all machines share. When not: one machine, where parallel=ddp needs no Ray. Source:
    https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainrun.config.schema import RunConfig
from trainrun.errors import EXIT_AGAIN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError
from trainrun.launch.launch_options import LaunchOptions
from trainrun.output import print_note, say
from trainrun.parallel.launch import CLEAN_CODES, END_SECONDS, SETTLE_SECONDS
from trainrun.runtime.machine import signal_at_parent_exit
from trainrun.runtime.signals import collect_signals

POLL_SECONDS = 0.2
NOTE_WAITS = 10  # of a second each, until a line says that the cluster has no free machines


class RankActor:
    """The actor of one rank. The rank itself is a process that the actor starts on its machine."""

    def find_address(self) -> tuple[str, int]:
        """Return the address of this machine and a free port, where the ranks can meet."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def start(self, words: Sequence[str], folder: Path, variables: dict[str, str]) -> None:
        """Start the rank in the working directory `folder`. It receives SIGTERM if this actor exits."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainrun", *words],
            cwd=folder, env={**os.environ, **variables},
            preexec_fn=lambda: signal_at_parent_exit(signal.SIGTERM),
        )  # fmt: skip

    def wait(self) -> int:
        """Wait for the end of the rank, and return its exit code."""
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


def run_on_cluster(options: LaunchOptions, config: RunConfig, words: Sequence[str]) -> int:
    """Run all ranks to their end and return the exit code. Raise ConfigError without Ray or a running cluster.

    words: the settings of the run, with its folder.
    """
    ray = connect_to_cluster()
    num_local = count_local_ranks(options, config)
    with collect_signals() as received:
        for attempt in range(config.parallel.max_restarts + 1):
            if attempt:
                print_note(f"the ranks start again ({attempt} of {config.parallel.max_restarts} restarts)")
            code = run_all_ranks(ray, options, num_local, words, received)
            if code in (*CLEAN_CODES, EXIT_USAGE) or received:
                break
    return code


def connect_to_cluster() -> Any:
    """Connect to the cluster that runs here or that RAY_ADDRESS names. Return the package `ray`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("launch=ray: needs Ray; pip install 'trainrun[ray]'") from error
    try:
        ray.init(address="auto", logging_level="WARNING")
    except ConnectionError as error:
        raise ConfigError(
            "launch=ray: no Ray cluster is here; start one by `ray start --head`, or set RAY_ADDRESS"
        ) from error
    return ray


def count_local_ranks(options: LaunchOptions, config: RunConfig) -> int:
    """Return the number of ranks on each machine."""
    devices = config.parallel.devices
    if options.gpus is not None or devices == "auto":
        return options.gpus or 1
    return len(devices) if isinstance(devices, list | tuple) else int(devices)


def run_all_ranks(
    ray: Any, options: LaunchOptions, num_local: int, words: Sequence[str], received: list[int]
) -> int:
    """Run all ranks once and return the exit code. All ranks that can be reached have exited when this returns."""
    resources = {"CPU": num_local} | ({"GPU": options.gpus} if options.gpus else {})
    group = ray.util.placement_group([resources] * options.nodes, strategy="STRICT_SPREAD")
    try:
        if not wait_for_machines(group, received):
            return EXIT_INTERRUPTED if received[0] == signal.SIGINT else EXIT_AGAIN
        return wait_for_actors(ray, start_ranks(ray, group, options, num_local, words), received)
    except ray.exceptions.RayError as error:
        say(f"trainrun: launch=ray: the ranks did not start: {str(error).strip()}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        ray.util.remove_placement_group(group)  # with its actors


def wait_for_machines(group: Any, received: list[int]) -> bool:
    """Wait until the cluster has reserved the machines. Return False at a stop signal."""
    num_waits = 0
    while not group.wait(timeout_seconds=1):
        if received:
            return False
        num_waits += 1
        if num_waits == NOTE_WAITS:
            print_note(
                f"launch=ray: waits for {len(group.bundle_specs)} machines with {group.bundle_specs[0]} each"
            )
    return True


def start_ranks(
    ray: Any, group: Any, options: LaunchOptions, num_local: int, words: Sequence[str]
) -> list[Any]:
    """Start every rank, in the order of the machines. Return the actors."""
    actor_class = ray.remote(num_cpus=1, num_gpus=1 if options.gpus else 0, max_concurrency=2)(RankActor)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    world_size = options.nodes * num_local
    actors = [
        actor_class.options(scheduling_strategy=strategy(group, rank // num_local)).remote()
        for rank in range(world_size)
    ]
    address, port = ray.get(actors[0].find_address.remote())
    starts = []
    for rank, actor in enumerate(actors):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % num_local),
            "LOCAL_WORLD_SIZE": str(num_local), "MASTER_ADDR": address, "MASTER_PORT": str(port),
        }  # fmt: skip
        starts.append(actor.start.remote(words, Path.cwd(), variables if world_size > 1 else {}))
    ray.get(starts)
    return actors


def wait_for_actors(ray: Any, actors: Sequence[Any], received: list[int]) -> int:
    """Wait for all ranks and return the exit code. Pass stop signals on. If a rank fails, end the others."""
    waiting = {actor.wait.remote(): rank for rank, actor in enumerate(actors)}
    failures: list[int] = []
    codes: list[int] = []
    num_passed, failure_time = 0, math.inf
    while waiting:
        for reference in ray.wait(list(waiting), timeout=POLL_SECONDS)[0]:
            code = read_exit_code(ray, reference, waiting.pop(reference))
            (codes if code in CLEAN_CODES else failures).append(code)
        signals = received[num_passed:]
        num_passed = len(received)
        if failures:
            failure_time = min(failure_time, time.monotonic())
        seconds = time.monotonic() - failure_time
        if seconds > SETTLE_SECONDS:
            signals = [signal.SIGTERM if seconds < SETTLE_SECONDS + END_SECONDS else signal.SIGKILL]
        for number in signals:
            for rank in waiting.values():
                actors[rank].send_signal.remote(number)
    for actor in actors:
        ray.kill(actor)
    if failures:
        return EXIT_USAGE if EXIT_USAGE in failures else max(failures[0], EXIT_FAILED)
    return max(codes)


def read_exit_code(ray: Any, reference: Any, rank: int) -> int:
    """Return the exit code of a rank that has ended. If its actor is lost, print why and return EXIT_FAILED."""
    try:
        return int(ray.get(reference))
    except ray.exceptions.RayError as error:
        say(f"trainrun: rank {rank} is lost: {str(error).strip()}", file=sys.stderr, flush=True)
        return EXIT_FAILED
