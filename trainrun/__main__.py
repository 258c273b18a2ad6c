"""`python -m trainrun`, and what the installed command calls."""

import os
import sys

import trainrun.timing.phases  # noqa: F401  (it looks at the clock)
from trainrun.output import print_uncaught_error
from trainrun.runtime.collector import freeze_objects, suspend_collector
from trainrun.runtime.signals import exit_at_interrupt
from trainrun.runtime.streams import guard_streams

# GNU's OpenMP counts looks, LLVM's and Intel's milliseconds
WAITING = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "1"}

TRAINING = ("resume", "again")  # and what begins with a setting


def entry() -> None:
    """Run the command line.

    Handle Ctrl-C before the slow imports, and set what torch reads when it is imported.
    """
    guard_streams()
    sys.excepthook = print_uncaught_error
    word = next(iter(sys.argv[1:]), "")
    exit_at_interrupt(trains=word in TRAINING or not word.isidentifier())
    suspend_collector()
    set_spin_wait()
    from trainrun.cli.main import main

    code = main()
    if "torch" not in sys.modules:  # no run was built, and no code of the user's was called
        freeze_objects()
    sys.exit(code)


def set_spin_wait() -> None:
    """Threads that wait for each other look for a moment before they sleep, unless the user said how.

    OpenMP's usual way is to look sixty times as long, for 4 ms on the machine named below, and where another process
    has taken the core of the one that is waited for, this takes the core from it too: next to one busy process a step
    of a small GPT took 286 to 366 ms with two threads, 98 to 100 this way and 69 asleep at once. But a core that sleeps
    is slow to wake where nobody else uses it: quiet, that step took 37 ms in the usual way, 39 this way and 57 to 58
    asleep at once (2 cores of an Intel Xeon, a virtual machine).

    Read when OpenMP is loaded, so set here, ahead of torch; ranks and workers inherit it.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *WAITING)):
        os.environ.update(WAITING)


if __name__ == "__main__":
    entry()
