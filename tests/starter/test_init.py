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
         "trainer.max_epochs=2 precision=bf16-mixed scheduler.warmup_steps=10 seed=3 data.batch_size=8 "
         "optimizer.lr=5e-05 scheduler=linear trainer.gradient_clip_val=1.0 optimizer.weight_decay=0.0"),
        ("hf", "TrainingArguments(max_steps=9, per_device_train_batch_size=4, learning_rate=1, max_grad_norm=2, "
         "lr_scheduler_type='constant', weight_decay=3)",
         "trainer.max_steps=9 data.batch_size=4 optimizer.lr=1 trainer.gradient_clip_val=2 scheduler=constant "
         "optimizer.weight_decay=3"),
        ("hf", "class Mine(torch.nn.Module):\n    pass", "model=mine.Mine task=model_loss"),
        ("lightning", "stop = EarlyStopping('val_loss', 0.1, 2)",
         "trainer.early_stopping=true trainer.early_stopping.monitor=val/loss trainer.early_stopping.min_delta=0.1 "
         "trainer.early_stopping.patience=2"),
        ("lightning", "class Lit(LightningModule):\n  def configure_optimizers(self):\n"
         "    return torch.optim.AdamW(self.parameters(), 1e-4)", "optimizer=adamw optimizer.lr=0.0001"),
        ("lightning", "class Lit(LightningModule):\n  def configure_optimizers(self):\n"
         "    return torch.optim.lr_scheduler.StepLR(opt, 30)",
         "scheduler=step scheduler.step_size=30 scheduler.interval=epoch"),
        ("lightning", "s = torch.optim.lr_scheduler.StepLR(opt, 30)\nd = {'interval': 'step'}",
         "scheduler=step scheduler.step_size=30"),
        ("loop", "accelerator = Accelerator(mixed_precision='bf16', gradient_accumulation_steps=4)",
         "precision=bf16 trainer.accumulate_grad_batches=4"),
        ("loop", "s = torch.optim.lr_scheduler.StepLR(opt, 30)\nfor epoch in range(3):\n"
         "  for x in rows:\n    pass\n  s.step()",
         "scheduler=step scheduler.step_size=30 scheduler.interval=epoch trainer.max_epochs=3"),
        ("loop", "s = torch.optim.lr_scheduler.StepLR(opt, 30)\nfor epoch in range(3):\n"
         "  for x in rows:\n    s.step()", "scheduler=step scheduler.step_size=30 trainer.max_epochs=3"),
        ("loop", "for rows in torch.randperm(99).split(12):\n  pass", "data.batch_size=12"),
        ("loop", "opt = torch.optim.SGD(net.parameters(), 0.1)",
         "optimizer=sgd optimizer.momentum=0.0 optimizer.lr=0.1"),
        ("loop", "opt = torch.optim.SGD(net.parameters(), 0.1, 0.5)",
         "optimizer=sgd optimizer.momentum=0.5 optimizer.lr=0.1"),
        ("loop", "s = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)", "scheduler=plateau scheduler.patience=10"),
        ("loop", "loader = DataLoader(rows, 9, True)", "data.batch_size=9 data.shuffle=true"),
        ("loop", "loss = F.cross_entropy(net(x), y, ignore_index=-1)", "task=classification task.ignore_index=-1"),
        ("loop", "opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)",
         "optimizer=sgd optimizer.momentum=0.9 optimizer.lr=0.1"),
        ("loop", "opt = torch.optim.RMSprop(net.parameters(), lr=0.1)",
         "optimizer._target_=torch.optim.RMSprop optimizer.lr=0.1"),
        ("loop", "RATE = 0.25\nopt = optim.Adam(net.parameters(), lr=RATE)", "optimizer=adam optimizer.lr=0.25"),
        ("loop", "with torch.autocast('cuda', dtype=torch.bfloat16):\n    pass", "precision=bf16-mixed"),
        ("loop", "val_loader = DataLoader(rows, batch_size=9)", "data.val_batch_size=9"),
        ("loop", "loader = DataLoader(rows, batch_size=9, num_workers=2)",
         "data.batch_size=9 data.shuffle=false data.num_workers=2"),
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


@pytest.mark.parametrize(
    ("kind", "line", "named"),
    [
        ("loop", "from nets import Net\nnet = Net(128)", "name its arguments 128"),
        ("loop", "class Net(nn.Module):\n    pass\nnet = Net(**sizes)", "name its arguments **sizes"),
        ("loop", "loss = F.cross_entropy(net(x), y, weight=w)", "weight=w"),
        ("loop", "loss = F.cross_entropy(net(x), y) + penalty(net)", "penalty(...)"),
        ("loop", "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=1)", "norm_type=1"),
        ("loop", "opt = torch.optim.AdamW([{'params': few, 'lr': 1}], lr=1)", "optimizer.groups"),
        ("loop", "opt = torch.optim.SGD(net.parameters(), rate)", "optimizer.lr=rate"),
        ("loop", "for p in net.parameters():\n  p.data.clamp_(-1, 1)\nx.backward()", "for p in"),
        ("lightning", "Trainer(max_epochs=2, logger=WandbLogger())", "WandbLogger(...)"),
        ("lightning", "Trainer(max_epochs=2, callbacks=[Mine()])", "Mine(...)"),
        ("hf", "trainer = Trainer(model, args, compute_metrics=f1)", "compute_metrics=f1"),
    ],
)  # fmt: skip
def test_a_part_of_a_line_that_is_not_understood_is_listed(kind: str, line: str, named: str) -> None:
    mapping = map_script(line, kind, "mine")
    assert mapping.known
    assert named in "\n".join(text for _, text in mapping.unknown)


def test_the_command_of_a_mapping_can_be_pasted() -> None:
    mapping = map_script("TrainingArguments(output_dir='my runs', run_name='a b')", "hf", "mine")
    assert {"output_dir=my runs", "run_name=a b"} <= set(shlex.split(mapping.command))


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
