"""`convert.json` in DEST: whose folder this is, what it is made of, and whether it is finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainrun.data.convert.files import write_whole
from trainrun.errors import ConfigError

NAME = "convert.json"
VERSION = 1


@dataclass(frozen=True)
class Journal:
    """words: of the command line that change what is written.

    use: the words of a run, with {dest} in them; use_test: those of its test data.
    files: name below DEST and size, when it is complete.
    """

    words: list[str]
    identity: str
    complete: bool = False
    use: list[str] = field(default_factory=list)
    use_test: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    version: int = VERSION

    def write(self, dest: Path) -> None:
        write_whole(dest / NAME, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_journal(dest: Path) -> Journal | None:
    """None where there is none. ConfigError: it is no journal that can be read."""
    try:
        found: Any = json.loads((dest / NAME).read_bytes())
        journal = Journal(**found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{dest}: its {NAME} cannot be read ({error}); delete the folder, or name another one"
        ) from error
    if journal.version != VERSION:
        raise ConfigError(
            f"{dest}: was written by another version of trainrun; delete it, or name another folder"
        )
    return journal


def check_place(dest: Path, words: list[str]) -> Journal | None:
    """The journal to go on with. ConfigError: the place is taken, or by a conversion with other words."""
    if not dest.exists():
        return None
    if not dest.is_dir():
        raise ConfigError(f"{dest}: this is a file; DEST is a folder that is made anew")
    journal = read_journal(dest)
    if journal is None:
        others = [item.name for item in dest.iterdir() if not item.name.startswith(f".{NAME}.")]
        if others:
            raise ConfigError(
                f"{dest}: exists and is no conversion of trainrun's (it has {sorted(others)[0]}); name a folder that "
                "does not exist"
            )
        return None
    if journal.words != words:
        state = "a finished" if journal.complete else "an unfinished"
        raise ConfigError(
            f"{dest}: holds {state} conversion with other words: {' '.join(journal.words)}; use those, name "
            "another folder, or delete it"
        )
    return journal


def check_source(dest: Path, journal: Journal, identity: str) -> None:
    if journal.identity != identity:
        raise ConfigError(
            f"{dest}: the source is not what it was when this conversion began; delete {dest} and convert it "
            "anew, or name another folder"
        )
