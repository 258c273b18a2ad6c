"""Every command and code block of README and manual is run in a user's folder, with the limits of a short run added.

The word behind a fence says what its block is: `bash` and `python` are run, `yaml` is a file that a command chooses,
`output` is the real output of the command or code before it, which is run as it stands and compared; `text` is any
other output, which holds no command.

Commands of long measurements (`autotune`, the benches) are checked without being run: their settings compose, and their
scripts know their flags. tests/benchmark, tests/verify and tests/scripts run these, tests/smaller and tests/export the
like of those on the page of measurements. A line marked `# on a cluster` or
`# on a GPU`, `# from a store`, or `# needs timm` without it, is composed only; so are the jobs of a sweep, which
tests/sweep runs.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from test_sources import write_fashion

from trainrun.cli.main import COMMANDS, main
from trainrun.cli.manual_pages import FOLDER
from trainrun.cli.train_command import SWEEP_WORD
from trainrun.config.compose import compose_run, prepare_command_line
from trainrun.errors import EXIT_USAGE
from trainrun.race.race_command import race_parser
from trainrun.race.racers import read_racers
from trainrun.sweep.space import list_overrides_to_check

pytestmark = pytest.mark.process


def lacks(package: str) -> bool:
    """Whether a package that no test needs cannot be imported here."""
    try:
        importlib.import_module(package)
    except Exception:  # as where the parts that it stands on do not fit each other
        return True
    return False


ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *FOLDER.glob("*.md")]}
SHORT = [
    "trainer.limit_train_batches=2", "trainer.limit_val_batches=1",
    "monitor.plots=false", "trainer.num_threads=1",
]  # fmt: skip
LONG = ("diagnose", "verify", "autotune", "race")
ELSEWHERE = (
    "on a cluster",
    "on a GPU",
    "from a store",
    "to a store",
    *(f"needs {name}" for name in ("transformers", "timm", "lightning") if lacks(name)),
)
WHOLE = (
    "first_run",
    "from_lightning",
    "reference",
)  # pages that are run from top to bottom, without added limits
MEASURED = "measurements"
REFUSED = "# is refused"  # a command whose error message the page shows
# another page runs the like
ALIKE = ("parallel=ddp  ", "export runs/first", "quantize runs/first", "prune runs/first")
SWEPT = ("sweeps/first",)  # the folder of a sweep, whose jobs tests/sweep runs


def lines_of(text: str) -> list[str]:
    """Lines of `bash` blocks, indented lines and inline code that begin with one of the project's commands."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^ {4}(\S[^\n]*)$", plain, re.MULTILINE)
    lines += [code for code in re.findall(r"`([^`\n]+)`", plain) if code.startswith("python scripts/")]
    return [line for line in lines if re.match(r"(trainrun|python|srun|torchrun)\b", line)]


def fences_of(text: str) -> list[tuple[str, str]]:
    """The word and the body of every fenced block, however deep it is indented and whatever its word is."""
    found = re.findall(r"^( *)```([^\n]*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [(word.strip(), textwrap.dedent(body)) for _, word, body in found]


def name_of(body: str) -> str:
    """The file that a block is, by its first line; "" for code that is run as it stands."""
    named = re.match(r"# ([\w/.]+\.(?:py|yaml))(?:: needs \w+)?\n", body)
    return named.group(1) if named else ""


def files_of(text: str) -> dict[str, str]:
    """The files that a page tells a user to write: their first line is their name."""
    fences = re.findall(r"^```\w+\n# ([\w/.]+)(?:: needs \w+)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(fences)


@pytest.fixture
def project(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with everything that the commands name; Fashion-MNIST is small."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
    write_fashion(workdir / "cache" / "trainrun" / "fashion-mnist", train=1000, test=100, suffix="")
    for text in PAGES.values():
        for name, body in files_of(text).items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_text(body, encoding="utf-8")
    rows = "\n".join(f"{i % 7},{i % 5},{i % 3}" for i in range(80))
    (workdir / "table.csv").write_text(f"a,b,price\n{rows}\n", encoding="utf-8")
    (workdir / "new.csv").write_text("a,b\n1,2\n3,4\n", encoding="utf-8")
    (workdir / "book.txt").write_text("In the beginning was the word.\n" * 3000, encoding="utf-8")
    for kind in ("cat", "dog"):
        (workdir / "photos" / kind).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (64, 64), (number, 90, 120)).save(workdir / "photos" / kind / f"{number}.png")
    hub_set = workdir / "downloaded" / "my-hub-set"
    hub_set.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        shift = {"train": 0.0, "validation": 0.3, "test": 0.6}[split]
        table = pyarrow.table({"x": [i + shift for i in range(40)], "label": [i % 2 for i in range(40)]})
        parquet.write_table(table, hub_set / f"{split}-00000-of-00001.parquet")
    weights = runpy.run_path(str(workdir / "my_net.py"))["Net"]().state_dict()
    torch.save(weights, workdir / "theirs.pt")
    return workdir


def composed(words: list[str]) -> None:
    """Compose the settings among the words; of a sweep those of every job, of a race those of every racer."""
    if words[1] == "race":
        typed = race_parser().parse_args(words[2:])
        read_racers(typed.racers, [word for several in typed.common for word in several])
        return
    settings = [word for word in words if "=" in word and not word.startswith(("-", "launch"))]
    if "--multirun" not in words:
        compose_run(settings)
        return
    options = [word for word in settings if SWEEP_WORD.match(word)]
    settings = [word for word in settings if word not in options]
    jobs = list_overrides_to_check(
        [*prepare_command_line(["--multirun", *settings], Path.cwd())[0].overrides, *options]
    )
    assert len(jobs) > 1
    for job in jobs:
        compose_run(list(job))


def known_to_its_script(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without argparse takes no flags; where it names commands in place of flags, they are in its text."""
    script = ROOT / words[0]
    if "argparse" not in (text := script.read_text(encoding="utf-8")):
        assert [word for word in words[1:] if word not in text] == []
        return
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [words[0], "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code in (0, None)
    shown = capsys.readouterr().out
    assert [word for word in words[1:] if word.startswith("--") and word not in shown] == []


def is_run(line: str) -> list[str] | None:
    """The words of a command that is run here; None for one that is checked without running."""
    words = shlex.split(line, comments=True)
    if (
        any(mark in line for mark in ELSEWHERE + ALIKE + SWEPT)
        or words[0] != "trainrun"
        or words[1] in (*LONG, "--multirun")
        or "sweeps/" in line  # of a sweep, whose jobs are not run here
    ):
        return None
    return [re.sub(r"^(trainer\.max_steps)=\d+$", r"\1=4", word) for word in words[1:]]


FIRST: dict[str, str] = {}  # the page that runs a command which other pages have too
for name, text in PAGES.items():
    for line in () if name in (*WHOLE, MEASURED) else lines_of(text):
        if "runs/" not in line:  # or it stands alone
            FIRST.setdefault(" ".join(is_run(line) or ()), name)


@pytest.mark.parametrize(
    "page",
    [
        name
        for name, text in PAGES.items()
        if name not in (*WHOLE, MEASURED) and any(map(is_run, lines_of(text)))
    ],
)
def test_the_commands_of_a_page_run(page: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = project / "RUN_DIR"
    if "RUN_DIR" in PAGES[page]:
        assert main(["model=my_net.Net", *SHORT, "trainer.max_epochs=1", f"output_dir={run}"]) == 0
    failed = []
    for line in lines_of(PAGES[page]):
        words = is_run(line)
        if words is None or FIRST.get(" ".join(words), page) != page:
            continue
        trains = words[0] not in COMMANDS and not {"--help", "--cfg"} & set(words)
        named = {word.partition("=")[0] for word in words}
        added = [word for word in SHORT if word.partition("=")[0] not in named] if trains else []
        if trains and not {"trainer.max_epochs", "trainer.max_steps"} & named:
            added.append("trainer.max_epochs=1")
        if {"model=gpt", "experiment=text"} & set(words) and trains:
            added.append("data.batch_size=2")
        code = main([*words, *added])
        told = capsys.readouterr()
        if code != (EXIT_USAGE if REFUSED in line else 0):
            failed.append(f"{line}\n{told.out[-600:]}{told.err[-600:]}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize(
    "page", [name for name, text in PAGES.items() if None in map(is_run, lines_of(text))]
)
def test_the_long_commands_of_a_page_are_known(
    page: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in dict.fromkeys(lines_of(PAGES[page])):
        if is_run(line) is not None and page != MEASURED:
            continue
        words = shlex.split(line, comments=True)
        if words[0] == "python" and words[1].startswith("scripts/"):
            known_to_its_script(words[1:], capsys, monkeypatch)
        elif words[0] != "python":
            composed(words)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_marked_as_output(page: str) -> None:
    text, commands = PAGES[page], "\n".join(map("\n".join, map(lines_of, PAGES.values())))
    blocks = fences_of(text)
    assert 2 * len(blocks) == len(re.findall(r"^ *```", text, re.MULTILINE)), "a fence is not closed"
    for word, body in blocks:
        assert word in ("bash", "python", "yaml", "output", "text"), body
        lines = [line for line in body.splitlines() if line.strip()]
        if word == "bash":  # the shell's own words are not the project's
            known = lines_of(f"```bash\n{body}```\n")
            assert [line for line in lines if line not in known and not line.startswith("export ")] == []
        elif word in ("output", "text"):
            assert [
                line
                for line in lines
                if re.match(r"(\$ *)?(trainrun|python|bash|srun|torchrun)\b(?!:)", line)
            ] == []
        elif word == "yaml":
            file = Path(name_of(body))
            assert f"{file.parent.name}={file.stem}" in commands, f"no command takes {file}"
        elif name_of(body) and ": needs " not in body.partition("\n")[0]:
            assert Path(name_of(body)).stem in commands, f"no command names {name_of(body)}"


# What the pages say of the names that a snippet uses but does not make.
BATCH = {"tokens": torch.zeros(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}
GIVEN = {"data": {"batch": BATCH}, "tasks": {"torch": torch}}


@pytest.mark.parametrize(
    "page", [name for name, text in PAGES.items() if "```python" in text and name not in WHOLE]
)
def test_python_of_a_page_runs(page: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainrun

    train = trainrun.train
    short = ["trainer.max_steps=4", "monitor.plots=false", "trainer.num_threads=1"]
    monkeypatch.setattr(trainrun, "train", lambda *words, **objects: train(*words, *short, **objects))
    names: dict[str, object] = dict(GIVEN.get(page, {}))
    for word, body in fences_of(PAGES[page]):
        if word == "python" and (file := name_of(body)):
            runpy.run_path(str(project / file))
        elif word == "python":
            exec(compile(re.sub(r'"trainer\.max_epochs=\d+", ', "", body), f"{page}.md", "exec"), names)


class Part(NamedTuple):
    """A command or a block of code of a page, and the output that the page shows for it ("" if it shows none)."""

    kind: str  # command, python
    text: str
    output: str = ""


def parts_of(page: str) -> list[Part]:
    """The commands and code blocks of a page in their order, each with its output."""
    parts: list[Part] = []
    for word, body, command in re.findall(
        r"^```(\w+)\n(.*?)^```|^ {4}(\S[^\n]*)$", page, re.MULTILINE | re.DOTALL
    ):
        if word == "output":
            parts[-1] = parts[-1]._replace(output=body)
        elif word == "python":
            parts.append(Part("python", body))
        else:
            lines = body if word == "bash" else command
            parts += [
                Part("command", line) for line in lines.splitlines() if re.match(r"trainrun|python", line)
            ]
    return parts


def wanted_parts(page: str) -> list[Part]:
    """The parts with an output, and those that they depend on: scripts, code, and runs in the same folder."""
    parts, wanted = parts_of(PAGES[page]), []
    for number, part in enumerate(parts):
        folder = re.search(r"output_dir=(\S+)", part.text)
        later = [after.text for after in parts[number + 1 :] if after.output]
        makes = folder is not None and any(folder.group(1) in text for text in later)
        makes = (makes and part.kind == "command") or part.text.startswith("python ")
        if part.output or makes or page in WHOLE:
            wanted.append(part)
    return [part for part in wanted if not any(mark in part.text for mark in ELSEWHERE)]


def masked(text: str, folder: Path) -> list[str]:
    """Lines without what differs from run to run: numbers, units of time, folders, and the parts of the wall clock."""
    text = text.replace(str(folder), "/home/you")
    text = re.sub(r"-?\d[\d.,:]*(?:e[-+]?\d+)?[kMGT]?(?: ?(?:ms|s|min)\b)?", "#", text)
    text = re.sub(r"(?:[a-z][a-z -]* # %(?:, )?)+", "shares", text)
    text = re.sub(r"  # (?:samples|tokens)/s", "", text)
    lines = [re.sub(r" +", " ", line).strip() for line in text.splitlines()]
    return [line for line in lines if line not in ("", "...")]


def missing_lines(shown: list[str], real: list[str]) -> list[str]:
    """The lines of a page that the real output does not have, in this order."""
    rest = iter(real)
    return [line for line in shown if line not in rest]


def run_part(part: Part, project: Path, names: dict[str, object]) -> None:
    """Run a command or a block of code in the folder of the user, as it stands."""
    if part.kind == "python":
        if not name_of(part.text):
            exec(compile(part.text, "page.md", "exec"), names)
        return
    words = shlex.split(part.text, comments=True)
    if words[0] == "python" and not words[1].startswith("scripts/"):
        runpy.run_path(str(project / words[1]), run_name="__main__")
    elif words[0] == "trainrun" and words[1] not in LONG:
        assert main(words[1:]) == (EXIT_USAGE if REFUSED in part.text else 0)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "```output" in text])
def test_outputs_of_a_page_are_real(page: str, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for part in wanted_parts(page):
        capfd.readouterr()
        run_part(part, project, names)
        captured = capfd.readouterr()
        real = masked(captured.err + captured.out, project)  # notes are printed first
        assert missing_lines(masked(part.output, project), real) == [], (
            f"{part.text}\n{captured.out}{captured.err}"
        )


def test_a_line_that_is_not_in_the_real_output_is_missing() -> None:
    real = masked(
        "epoch 1/2  val/acc 0.5  3k samples/s\nwall clock 3 s: a 3 %, b 4 %\n/tmp/x/run\n", Path("/tmp/x")
    )
    assert missing_lines(masked("epoch 1/2  val/acc 0.7\n...\n/home/you/run\n", Path("/none")), real) == []
    assert missing_lines(masked("wall clock 9 s: b 1 %\n", Path("/none")), real) == []
    assert missing_lines(masked("epoch 1/2  val/loss 0.7\n", Path("/none")), real) == ["epoch #/# val/loss #"]
    assert missing_lines(["b", "a"], ["a", "b"]) == ["a"]


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_the_package_exists(page: str) -> None:
    """`trainrun.transform.freeze.freeze` was one that did not."""
    names = sorted(set(re.findall(r"\btrainrun(?:\.[A-Za-z_]\w*)+", PAGES[page])))
    assert [name for name in names if not resolves(name)] == []


def resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


CLOSED = "trainer|precision|parallel|checkpoint"  # sections of which the table of settings names every key
OF_OTHERS = {"trainer.fast_dev_run", "trainer.overfit_batches"}  # words that are answered with ours


@pytest.mark.parametrize("page", [name for name in PAGES if name != "settings"])
def test_every_setting_of_a_section_exists(page: str) -> None:
    known = set(re.findall(rf"`((?:{CLOSED})(?:\.\w+)+)`", PAGES["settings"])) | OF_OTHERS
    text = re.sub(r"^```python\n# \S+: needs .*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(rf"(?<![\w./-])((?:{CLOSED})(?:\.[a-z_]\w*)+)(?![\w/(])", text))
    sections = {key.rpartition(".")[0] for key in known}
    assert sorted(named - known - sections) == []


def test_what_counts_as_a_command() -> None:
    text = (
        "x\n\n    trainrun a=1\n    some output\n\n```bash\ntrainrun help\n```\n\n`python scripts/x.py --y`\n"
    )
    assert lines_of(text) == ["trainrun help", "trainrun a=1", "python scripts/x.py --y"]
    assert files_of("```python\n# a.py\nx = 1\n```\n") == {"a.py": "x = 1\n"}
