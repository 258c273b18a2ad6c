"""`python -m trainrun`, and what the installed command calls."""

import os
import sys

import trainrun.ledger  # noqa: F401  (it looks at the clock)
from trainrun.process.collector import nothing_to_collect, rest_while_starting
from trainrun.process.signals import leave_at_interrupt

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def entry() -> None:
    """Sees to an early Ctrl-C before the rest is imported, and to what is read when torch is."""
    leave_at_interrupt()
    rest_while_starting()
    wait_asleep()
    from trainrun.cli import main

    code = main()
    if "torch" not in sys.modules:  # no run was built, and no code of the user's was called
        nothing_to_collect()
    sys.exit(code)


def wait_asleep() -> None:
    """Threads that wait for each other sleep, unless the user set how they wait.

    OpenMP's usual way is to spin, and where another process has taken the core of the one that is waited for,
    this takes the core from it too: beside busy processes (load 3 on 2 cores, AMD EPYC) a step of 0.16 ms with one
    thread took 166 ms with two, and 0.3 ms asleep. On a quiet machine: `python scripts/bench_speed.py waiting`.

    Read when OpenMP is loaded, so set here, ahead of torch; ranks and workers inherit it.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


if __name__ == "__main__":
    entry()
