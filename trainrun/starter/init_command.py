"""`trainrun init [DIR]`: write the first files of a project. `--from`: translate a script of another trainer."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainrun.cli.run_arguments import Parser
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.output import report_result, say
from trainrun.starter.project_files import build_project_files
from trainrun.starter.script_mapping import KINDS, format_mapping_page, map_script

MAPPING = "mapping.md"


def main(argv: list[str]) -> int:
    """Write the files and print the next commands. No file is overwritten."""
    words = build_init_parser().parse_args(argv)
    folder = Path(words.dir).expanduser()
    if words.source:
        return write_mapping(folder, *words.source)
    write_new_files(folder, build_project_files())
    enter = [] if folder.resolve() == Path.cwd() else [shlex.join(["cd", str(folder)])]
    say("next  " + " && ".join([*enter, "trainrun experiment=first"]))
    return EXIT_DONE


def build_init_parser() -> Parser:
    parser = Parser(
        prog="trainrun init", allow_abbrev=False,
        description="Writes a model, data, an experiment, a notebook and a README, ready to train.",
    )  # fmt: skip
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", default=".", help="the folder, which may be new (default: this one)"
    )
    parser.add_argument(
        "--from", dest="source", metavar=("KIND", "SCRIPT"), nargs=2,
        help=f"write {MAPPING} instead: what each line of SCRIPT becomes. KIND: {', '.join(KINDS)}",
    )  # fmt: skip
    return parser


def write_new_files(folder: Path, files: dict[str, str]) -> None:
    """Write new files below a folder and print their paths. Raise ConfigError if one of them exists."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder")
    if existing := [name for name in files if (folder / name).exists()]:
        raise ConfigError(
            f"{folder}: has {', '.join(existing)} already; name another folder: trainrun init DIR"
        )
    report_result(files=[folder / name for name in files])
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as opened:
            opened.write(text)
        say(f"wrote {path}")


def write_mapping(folder: Path, kind: str, script: str) -> int:
    """Write the translation of a script as a page, and print how many lines were understood. Return the exit code."""
    if kind not in KINDS:
        raise ConfigError(f"--from {kind}: must be one of {', '.join(KINDS)}")
    path = Path(script).expanduser()
    if not path.is_file():
        raise ConfigError(f"--from {kind} {script}: no such file")
    try:
        mapping = map_script(path.read_text(encoding="utf-8"), kind, path.stem)
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"--from {kind} {script}: cannot be read as Python{line}") from error
    write_new_files(folder, {MAPPING: format_mapping_page(mapping, path.name)})
    say(f"{len(mapping.known)} lines have a counterpart, {len(mapping.unknown)} are not understood")
    say(f"next  {mapping.command}")
    report_result(known=len(mapping.known), unknown=len(mapping.unknown), next=mapping.command)
    return EXIT_DONE
