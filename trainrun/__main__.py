"""The entry point of `python -m trainrun` and of the installed command."""

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
    """Run the command line and exit with its code.

    Ctrl-C is handled before the slow imports, and the variables that torch reads at its import are set.
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
    """Set how long OpenMP threads that wait for each other stay awake, unless the user has set it.

    By default they stay awake for 4 ms (on the machine below). If another process has taken the core of the thread
    that they wait for, this also takes the core from it. Beside one busy process, a step of a small GPT with two
    threads took 286 to 366 ms with the default, 98 to 100 ms with this setting, and 69 ms if threads sleep at once.
    On a quiet machine, the step took 37 ms with the default, 39 ms with this setting, and 57 to 58 ms if threads
    sleep at once, because a sleeping core is slow to wake (2 cores of an Intel Xeon, a virtual machine).

    OpenMP reads the setting when it is loaded. It is therefore set before torch is imported. Ranks and workers
    inherit it.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *WAITING)):
        os.environ.update(WAITING)


if __name__ == "__main__":
    entry()
