"""What a search found out, as plain values: for the table, `tune.json` and the journal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainrun.lab.statistics import Ratio

KEPT, BEATEN, SLOWER, NOISE, REJECTED, UNTRIED, NEEDLESS, UNPAID = (
    "kept", "beaten", "slower", "noise", "rejected", "not tried", "does not apply", "not paid back",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One setting compared with the best one known at that time.

    state: one of the words above; beaten: faster, but another one was faster still. reason: of a state that needs
    one. ratio: its speed over that of the best. loss, cosine: how far it is from the user's own words, see
    `trainrun.lab.gate`. extra_seconds: what it takes longer to start, compilation above all.
    """

    knob: str
    words: tuple[str, ...]
    mathematics: str = "exact"
    state: str = UNTRIED
    reason: str = ""
    ratio: Ratio | None = None
    peak_bytes: int = 0
    loss: float | None = None
    cosine: float | None = None
    extra_seconds: float = 0.0

    @property
    def title(self) -> str:
        return " ".join(self.words) or self.knob

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": ratio_row(self.ratio)}


def ratio_row(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else ratio._asdict()


def ratio_from(row: dict[str, Any] | None) -> Ratio | None:
    return None if row is None else Ratio(**row)


def trial_from(row: dict[str, Any]) -> Trial:
    """Read a trial from a row of the journal."""
    return Trial(**row | {"words": tuple(row["words"]), "ratio": ratio_from(row["ratio"])})


@dataclass(frozen=True)
class Rung:
    """A part of the preset. first_in: alone, against the user's words; last_out: of all, against all but it.
    None if it is all there is, or was not measured."""

    words: tuple[str, ...]
    knob: str
    mathematics: str
    found: Ratio | None
    first_in: Ratio | None = None
    last_out: Ratio | None = None


@dataclass(frozen=True)
class Outcome:
    """words: those that the preset will hold; empty if nothing is claimed.

    claim: the speed of the champion over the user's own words, in fresh processes; None if there is no champion.
    noise: two runs of the same words. speed: items a second of the user's words. verdict: in a sentence.
    """

    base: tuple[str, ...]
    unit: str
    speed: float
    noise: Ratio
    trials: tuple[Trial, ...]
    rungs: tuple[Rung, ...]
    claim: Ratio | None
    claimed: bool
    verdict: str
    seconds: float
    loss: float | None = None
    cosine: float | None = None
    gate_steps: int = 0
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for rung in self.rungs for word in rung.words) if self.claimed else ()

    def row(self) -> dict[str, Any]:
        told = asdict(self)
        told["noise"], told["claim"] = ratio_row(self.noise), ratio_row(self.claim)
        told["trials"] = [trial.row() for trial in self.trials]
        told["rungs"] = [
            asdict(rung)
            | {name: ratio_row(getattr(rung, name)) for name in ("found", "first_in", "last_out")}
            for rung in self.rungs
        ]
        return told | {"words": list(self.words)}
