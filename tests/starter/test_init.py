"""`trainrun init`: a folder that trains as it is; the mapping of a script of another trainer."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path

import pytest
from approved import refused
from quiet_runs import QUIET

import trainrun
from trainrun.cli.main import main
from trainrun.cli.manual_pages import FOLDER
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError
from trainrun.starter.init_command import main as init
from trainrun.starter.project_files import build_project_files
from trainrun.starter.script_mapping import map_script

PAGE = (FOLDER / "from_lightning.md").read_text(encoding="utf-8")
SCRIPTS = {"loop": "hand_loop", "lightning": "lit", "hf": "hf"}


def script_of_manual(name: str) -> str:
    found = re.search(rf"^```python\n(# {name}\.py.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_files_of_init_train_as_they_are(workdir: Path) -> None:
    assert main(["init"]) == 0
    run = trainrun.train("experiment=first", *QUIET)
    assert run.status["state"] == "done"
    assert max(row["val/acc"] for row in run.metrics if "val/acc" in row) > 0.6  # 0.33 by chance
    shown = unescape(run._repr_html_())
    assert shown.index("best val/acc") < shown.index("<figure") < shown.index("Evaluations")
    code = [
        cell["source"]
        for cell in json.loads(Path("first.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    names: dict[str, object] = {"run": run}
    for source in code:
        if "trainrun.train" not in source:
            exec(compile(source, "first.ipynb", "exec"), names)
    commands = re.findall(r"^ {4}trainrun (.*)$", Path("README.md").read_text(), re.MULTILINE)
    assert len(commands) == 5
    for words in map(shlex.split, commands):
        if words[0] == "experiment=first":
            compose_run(words)


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    for name in build_project_files():
        folder = tmp_path / name.replace("/", "_")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
        with refused(ConfigError, name):
            init([str(folder)])
        assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["mine"]
    (tmp_path / "file").touch()
    with refused(ConfigError):
        init([str(tmp_path / "file")])


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_scripts_of_the_manual_are_mapped_to_their_settings(kind: str) -> None:
    mapping = map_script(script_of_manual(SCRIPTS[kind]), kind, SCRIPTS[kind])
    config = compose_run(
        [word for word in shlex.split(mapping.command)[1:] if not word.startswith("model")]
    ).config
    assert config.optimizer["lr"] == 3e-3
    assert config.scheduler["_target_"].endswith("cosine")
    assert config.trainer.max_epochs == 5
    assert config.trainer.gradient_clip_val == 1.0
    assert mapping.settings["model"] in ("my_halves.HalvesNet", "hf.WithLoss")


@pytest.mark.parametrize(
    ("kind", "line", "settings"),
    [
        ("lightning", "Trainer(max_steps=7, accumulate_grad_batches=4, precision='bf16-mixed')",
         "trainer.max_steps=7 trainer.accumulate_grad_batches=4 precision=bf16-mixed"),
        ("lightning", "EarlyStopping(monitor='val_loss', patience=2)",
         "trainer.early_stopping=true trainer.early_stopping.monitor=val/loss trainer.early_stopping.patience=2"),
        ("hf", "TrainingArguments(num_train_epochs=2, bf16=True, warmup_steps=10, seed=3)",
         "trainer.max_epochs=2 precision=bf16-mixed scheduler.warmup_steps=10 seed=3"),
        ("loop", "opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)",
         "optimizer=sgd optimizer.momentum=0.9 optimizer.lr=0.1"),
        ("loop", "opt = torch.optim.RMSprop(net.parameters(), lr=0.1)",
         "optimizer._target_=torch.optim.RMSprop optimizer.lr=0.1"),
        ("loop", "RATE = 0.25\nopt = optim.Adam(net.parameters(), lr=RATE)", "optimizer=adam optimizer.lr=0.25"),
        ("loop", "with torch.autocast('cuda', dtype=torch.bfloat16):\n    pass", "precision=bf16-mixed"),
        ("loop", "val_loader = DataLoader(rows, batch_size=9)", "data.val_batch_size=9"),
        ("loop", "loader = DataLoader(rows, batch_size=9, num_workers=2)", "data.batch_size=9 data.num_workers=2"),
        ("loop", "loss = nn.CrossEntropyLoss(label_smoothing=0.1)", "task=classification task.label_smoothing=0.1"),
        ("loop", "class Net(nn.Module):\n    def __init__(self): pass\nnet = Net(width=3)",
         "model=mine.Net model.width=3"),
    ],
)  # fmt: skip
def test_a_line_becomes_settings(kind: str, line: str, settings: str) -> None:
    mapping = map_script(line, kind, "mine")
    assert {f"{key}={value}" for key, value in mapping.settings.items()} == set(settings.split())
    assert mapping.unknown == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("x = make_everything(3)", "make_everything"),
        ("Trainer(reticulate_splines=4)", "reticulate_splines"),
        ("Trainer(max_epochs=count())", "max_epochs=count()"),
        ("s = torch.optim.lr_scheduler.LambdaLR(opt, f)", "LambdaLR"),
        ("model.load_state_dict(torch.load('x.pt'))", "load_state_dict"),
    ],
)
def test_a_line_that_is_not_understood_is_listed(line: str, named: str) -> None:
    mapping = map_script(line, "lightning", "mine")
    assert [number for number, _ in mapping.unknown] == [1]
    assert named in mapping.unknown[0][1]
    assert mapping.settings == {}


def test_from_writes_a_page_and_refuses_what_is_no_script(workdir: Path) -> None:
    Path("old.py").write_text(script_of_manual("hand_loop"))
    assert main(["init", "there", "--from", "loop", "old.py"]) == 0
    assert "trainer.max_epochs=5" in Path("there/mapping.md").read_text()
    Path("broken.py").write_text("def f(:\n")
    for words in (
        ["--from", "keras", "old.py"],
        ["--from", "hf", "missing.py"],
        ["--from", "hf", "broken.py"],
    ):
        with refused(ConfigError, "--from"):
            init(words)
