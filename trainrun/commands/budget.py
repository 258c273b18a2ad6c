"""The word `--budget SECONDS` of the commands that measure."""

from __future__ import annotations

from trainrun.errors import ConfigError
from trainrun.words.checks import parse_seconds

LEAST_SECONDS = 5.0


def take_seconds(argv: list[str], default: float, command: str) -> tuple[list[str], float]:
    """The other words, and the seconds: of `--budget 120`, `--budget=2m`. Raises ConfigError."""
    rest: list[str] = []
    seconds = default
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--budget":
            rest.append(word)
            continue
        text = value if equals else next(words, "")
        try:
            found = parse_seconds(float(text) if text.replace(".", "", 1).isdigit() else text or None)
        except ValueError:
            found = None
        if found is None or found < LEAST_SECONDS:
            raise ConfigError(
                f"{command}: --budget {text}: must be {LEAST_SECONDS:g} seconds or more, as 60 or 2m"
            )
        seconds = found
    return rest, seconds
