"""Names of files, the commands in README and manual, and words that have no place in the project."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from trainrun.cli.main import COMMANDS
from trainrun.cli.train_command import SWEEP_WORD
from trainrun.config.argv import list_options
from trainrun.config.compose import prepare_command_line

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
PAGES = [ROOT / "README.md", *(ROOT / "trainrun" / "manual").glob("*.md")]
NO_NAMES = ("base", "common", "helper", "helpers", "misc", "util", "utils")
FOLDERS = ("trainrun", "conf", "tests", "scripts", ".ci")

# Each is split, so that this file does not find itself.
FORBIDDEN = [
    "/wo" + "rk/",
    "/ro" + "ot/",
    "/opt/" + r"(?:wheels|pypi)",
    r"\bissue" + r" #?\d{1,3}\b",  # those of other projects have longer numbers
    r"\bissues" + " show",
    r"\b(?:CE" + r"O|SPE" + r"C\.md|ARCHITECT" + r"URE\.md|HOUSE_ST" + "YLE)",
    r"\.\./sha" + "red/",
    r"pypi"
    + r"\.org|python"
    + r"hosted|download\.py"
    + r"torch|deb\.deb"
    + r"ian|npm"
    + r"js\.|ana"
    + r"conda\.org",
    r"\bextra-index" + r"-url|\bindex" + "-url",
]


def project_files() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    beside = [
        path
        for path in ROOT.iterdir()
        if path.suffix in (".md", ".toml", ".yaml") or path.name == ".gitignore"
    ]
    return sorted(path for path in [*inside, *beside] if path.is_file() and "__pycache__" not in path.parts)


def test_package_marks_are_empty():
    marks = [path for path in (ROOT / "trainrun").rglob("__init__.py") if path.parent.name != "trainrun"]
    assert [str(path) for path in marks if path.read_text(encoding="utf-8")] == []
    folders = {path.parent for path in (ROOT / "trainrun").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_file_is_named_after_what_it_does():
    assert [str(path) for path in (ROOT / "trainrun").rglob("*.py") if path.stem in NO_NAMES] == []


# The readers of all formats have `load`; two formats of tables can say what their first targets are; and a sweep and a
# launch have options of their own.
OF_SEVERAL_FILES = {"load", "main", "read_first_targets", "read_options"}


def test_a_public_function_name_has_one_meaning():
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "trainrun").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {
        name: where for name, where in files.items() if len(where) > 1 and name not in OF_SEVERAL_FILES
    } == {}
    assert len(files["load"]) > 10  # some were seen


def test_no_word_of_the_workplace():
    pattern = re.compile("|".join(FORBIDDEN))
    found = []
    for path in project_files():
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        ):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n" + "\n".join(found)


def pages_text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def readme_commands() -> list[list[str]]:
    """The words of every `trainrun ...` in a code block or between backticks."""
    text = pages_text()
    lines = re.findall(r"^(?: {4})?(trainrun [^\n]*)$", text, re.MULTILINE) + re.findall(
        r"`(trainrun [^`\n]+)`", text
    )
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_commands_of_the_readme_exist():
    commands = readme_commands()
    assert len(commands) > 5
    verbs = {words[0] for words in commands if re.fullmatch(r"[a-z]+", words[0])}
    assert verbs <= COMMANDS.keys()
    assert COMMANDS.keys() <= verbs, "a command without a line in the README"
    for script in set(re.findall(r"(?<![\w/.])(?:scripts|\.ci)/[\w.]+", pages_text())):
        assert (ROOT / script).is_file(), script


def test_the_options_of_the_readme_exist(tmp_path: Path):
    text = pages_text()
    shown = set(re.findall(r"conf/(\w+)/([\w-]+)\.yaml", text))  # files that the README tells a user to write
    missing = []
    for words in readme_commands():
        if "=" not in " ".join(words) or words[0] in COMMANDS:
            continue
        prepared, folders = prepare_command_line(
            [word for word in words if "=" in word and not SWEEP_WORD.match(word)], tmp_path
        )
        for word in prepared.overrides:
            group, _, value = word.partition("=")
            if (CONF / group).is_dir():
                known = {
                    *list_options(group, folders),
                    *(name for shown_group, name in shown if shown_group == group),
                }
                missing += [
                    f"{group}={name}" for name in value.replace('"', "").split(",") if name not in known
                ]
    assert missing == []


def test_every_preset_is_in_the_readme():
    rows = re.findall(r"^\| `([\w-]+)` \|", pages_text(), re.MULTILINE)
    assert {path.stem for path in (CONF / "preset").glob("*.yaml")} - {"none"} <= set(rows)
