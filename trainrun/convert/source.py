"""Find out how to read SOURCE: the settings of a run, by its file extension or by the content of the folder."""

from __future__ import annotations

import glob
from pathlib import Path

from trainrun.convert.folder import read_journal
from trainrun.data.readers.path_contents import list_data_options
from trainrun.errors import ConfigError

DEST = "{dest}"


def resolve_source(source: str, data: str | None, dest: Path, groups: list[str]) -> tuple[str, list[str]]:
    """Return the data group and the settings that read SOURCE. data: the value of --data.

    Raise ConfigError if no group can read it.
    """
    if data is not None and data not in groups:
        raise ConfigError(f"--data {data}: no such data group; allowed: {', '.join(groups)}")
    place = Path(source).expanduser()
    if data is None and source in groups:
        if place.exists():
            raise ConfigError(f"{source}: is a data group and a place here; write ./{source} for the place")
        return source, [f"data={source}"]
    if data is None and place.is_dir() and (journal := read_journal(place)) is not None:
        if not journal.complete:
            raise ConfigError(
                f"{place}: is a conversion that is not finished; run its own command again first"
            )
        return "converted", fill_in_dest([*journal.use, *journal.use_test], place)
    group = data or _find_data_group(source, place, groups)
    if dest.resolve().is_relative_to(place.resolve()):
        raise ConfigError(f"{dest}: lies in SOURCE, which must not change; name a folder elsewhere")
    return group, [f"data={group}", f"data.path={source}"]


def fill_in_dest(settings: list[str], dest: Path) -> list[str]:
    """Return the settings of a journal with the path of the folder in the place of {dest}."""
    return [setting.replace(DEST, str(dest)) for setting in settings]


def _find_data_group(source: str, place: Path, groups: list[str]) -> str:
    """Return the data group that reads a path. Raise ConfigError if none or several do."""
    way = f"say which data group reads it: --data {' or '.join(groups)}"
    if place.is_dir():
        groups_of_folder = list_data_options(source)
        if len(groups_of_folder) == 1:
            return groups_of_folder[0]
        several = f"has files of several kinds ({', '.join(groups_of_folder)})"
        raise ConfigError(
            f"{source}: this folder {several if groups_of_folder else 'has no file of a known kind'}; {way}"
        )
    if not place.exists() and not (glob.has_magic(source) or "{" in source):
        raise ConfigError(f"{source}: no such place, and no data group of this name (trainrun --help data)")
    groups_of_folder = list_data_options(source)
    if len(groups_of_folder) != 1:
        raise ConfigError(f"{source}: its ending tells nothing of its kind; {way}")
    if place.name.endswith(".npy"):
        raise ConfigError(
            f"{source}: a single array; name the folder, with x_train.npy and y_train.npy in it (see data=arrays)"
        )
    return groups_of_folder[0]
