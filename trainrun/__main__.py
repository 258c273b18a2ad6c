"""`python -m trainrun`, and what the installed command calls."""

import sys

from trainrun.signals import leave_at_interrupt


def entry() -> None:
    """Sees to an early Ctrl-C before the rest is imported."""
    leave_at_interrupt()
    from trainrun.cli import main

    sys.exit(main())


if __name__ == "__main__":
    entry()
