"""The folders of config groups: ours, and the user's, which are searched first."""

from __future__ import annotations

from pathlib import Path

from trainrun.errors import ConfigError


def conf_dir() -> Path:
    """The folder of the config groups: inside an installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "trainrun.yaml").is_file():
            return folder
    raise FileNotFoundError(f"trainrun's own config files are not in {here}: install the package again")


def groups(folders: list[Path]) -> list[str]:
    return sorted({item.name for folder in folders for item in folder.iterdir() if item.is_dir()})


def options(group: str, folders: list[Path]) -> list[str]:
    return sorted({item.stem for folder in folders for item in (folder / group).glob("*.yaml")})


def user_conf_dirs(extra: list[str], working_dir: Path) -> list[Path]:
    """Folders searched before ours: each --config-dir, then ./conf if it has one of our groups."""
    folders = [Path(folder).expanduser().resolve() for folder in extra]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
    beside = (working_dir / "conf").resolve()
    if beside != conf_dir() and any((beside / group).is_dir() for group in groups([conf_dir()])):
        folders.append(beside)
    return folders
