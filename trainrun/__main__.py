"""`python -m trainrun`, the same as the command `trainrun`."""

from trainrun.cli import entry

if __name__ == "__main__":
    entry()
