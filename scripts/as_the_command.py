"""Imported ahead of torch: threads wait for each other as `python -m trainrun` has them wait, for both sides."""

from trainrun.__main__ import set_spin_wait

set_spin_wait()
