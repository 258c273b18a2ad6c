"""State of tasks, models and hooks: saved and restored to the bit, or told where no checkpoint holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from approved import approve_error
from faults.evidence import other_ranks_of
from test_resume import facts_of, same

from trainrun.cli.main import main

OWN = """
import os
import signal
import time
from collections import deque

import torch
from torch.nn import functional

from trainrun.interfaces import StepOutput


class Sums:
    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch):
        return StepOutput(functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"))


class Stops:
    def __init__(self, at=-1):
        self.at = at

    def on_step(self, step, epoch, row):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class Hidden(Sums):  # trains beside the runner, with an optimizer of its own
    def __init__(self):
        self.momentum, self.calls, self.center = None, 0, torch.zeros(10)

    def check_model(self, model):
        self.weight = list(model.parameters())[0]
        self.momentum = torch.optim.SGD([self.weight], lr=0.01, momentum=0.9)

    def step(self, model, batch):
        if torch.is_grad_enabled():
            self.calls += 1
            self.momentum.zero_grad()
            super().step(model, batch).loss_sum.backward()
            self.momentum.step()
            model.zero_grad()
        logits = model(batch[0])
        if torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        loss = functional.cross_entropy(logits - self.center, batch[1], reduction="sum")
        return StepOutput(loss * (1 + 0.01 * self.calls))


class Counting(Sums):
    def __init__(self):
        self.calls, self.log = 0, []

    def step(self, model, batch):
        self.calls += 1
        self.log.append(self.calls)
        return super().step(model, batch)


class CountingHook:
    def __init__(self):
        self.seen = {"steps": 0}

    def on_step_end(self, run, state):
        self.seen["steps"] += 1


class Changing(Sums):  # one attribute from the first step on, and another one later
    def __init__(self):
        self.calls, self.best = 0, 0

    def step(self, model, batch):
        self.calls += 1
        self.best = max(self.best, self.calls // 20)
        return super().step(model, batch)


class Rows(torch.utils.data.Dataset):  # its level is changed by a hook
    made = []

    def __init__(self):
        self.level = 0.0
        Rows.made.append(self)

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.full((4,), self.level + index % 2), index % 2


class Levels:
    def on_epoch_end(self, run, state):
        Rows.made[-1].level += 1


class Codebook(torch.nn.Module):  # its codes follow the samples of each rank
    def __init__(self, as_buffer=False):
        super().__init__()
        self.last = torch.nn.Linear(64, 10)
        codes = torch.zeros(64)
        if as_buffer:
            self.register_buffer("codes", codes)
        else:
            self.codes = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        if self.training:
            self.codes.mul_(0.9).add_(x.detach().flatten(1).mean(0), alpha=0.1)
        return self.last(x.flatten(1) - self.codes)


class Saved(Hidden):
    def state_dict(self):
        return {"momentum": self.momentum.state_dict(), "calls": self.calls, "center": [("c", self.center)]}

    def load_state_dict(self, state):
        self.momentum.load_state_dict(state["momentum"])
        self.calls, self.center = state["calls"], state["center"][0][1]


class Center(Sums):  # what each rank keeps is of its own samples
    def __init__(self):
        self.center = torch.zeros(10)

    def step(self, model, batch):
        logits = model(batch[0])
        if torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return StepOutput(functional.cross_entropy(logits - self.center, batch[1], reduction="sum"))

    def state_dict(self):
        return {"center": self.center}

    def load_state_dict(self, state):
        self.center = state["center"]


class Late(Sums):  # what is made once, derived, or drawn from is no state
    def __init__(self):
        self.classes = self.logits = None
        self.cache = {}

    def step(self, model, batch):
        self.classes = torch.eye(10) if self.classes is None else self.classes
        self.cache.setdefault("device", batch[0].device)
        self.model, self.logits = model, model(batch[0])
        return StepOutput(functional.cross_entropy(self.logits, batch[1], reduction="sum"))


class Weighted(Sums):  # its weight is in no optimizer
    def __init__(self, rate=0.0):
        self.weight, self.teacher = torch.nn.Parameter(torch.zeros(())), torch.nn.Linear(2, 2)
        self.rate, self.fixed = rate, torch.inference_mode()(torch.ones)(2)

    def step(self, model, batch):
        if self.rate and self.weight.grad is not None:
            with torch.no_grad():
                self.weight -= self.rate * self.weight.grad
        loss = super().step(model, batch).loss_sum
        return StepOutput(loss * (-self.weight).exp() + self.weight * len(batch[1]))


class Module(torch.nn.Module, Weighted):
    def __init__(self, rate=0.0):
        torch.nn.Module.__init__(self)
        Weighted.__init__(self, rate)


class Half(Sums):
    def state_dict(self):
        return {}


class Unsaveable(Sums):
    def state_dict(self):
        return {"thing": object()}

    def load_state_dict(self, state): ...


class Broken(Saved):
    def load_state_dict(self, state):
        raise KeyError("mu")


class Net(torch.nn.Module):  # caches and counters of torch are no state; what a forward leaves may be
    def __init__(self, keeps="", hidden=()):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
        self.keeps, self.temperature, self.teacher = keeps, 5.0, [torch.zeros(10)]
        self.register_buffer("mean", torch.zeros(10), persistent=False)
        self.register_buffer("turns", None, persistent=False)
        self.last, self.middle = 0.0, torch.zeros(())
        self.cache, self.logits, self.seen, self.running = {}, None, False, self.body[2].running_mean

    def forward(self, x):
        self.turns = torch.ones(len(x), 1) if self.turns is None or len(self.turns) < len(x) else self.turns
        self.cache.setdefault(len(x) + len(self.cache), self.turns)
        out = self.body(x)
        self.logits, self.seen = out.detach(), True
        self.last, self.middle = float(self.logits.norm()), self.logits.mean()
        if self.training and self.keeps == "temperature":
            self.temperature *= 0.99
        if self.training and self.keeps == "mean":
            self.mean.lerp_(out.detach().mean(0), 0.1)
        if self.training and self.keeps == "teacher":
            self.teacher[0] = self.teacher[0] + out.detach().mean(0)
        return (out - self.mean) / self.temperature


class Queue(torch.nn.Sequential):  # grows at first
    def __init__(self, hidden=()):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        self.means = deque(maxlen=3)

    def forward(self, x):
        out = super().forward(x)
        if self.training:
            self.means.append(out.detach().mean(0))
        return out - sum(self.means)


class Odd(Net):
    def get_extra_state(self):
        return self.temperature


class SavesItself(Net):
    def state_dict(self):
        return torch.nn.Module.state_dict(self)


class Knows(Net):
    seen_temperatures = ()

    def forward(self, x):
        self.seen_temperatures += (self.temperature,)
        return super().forward(x)

    def get_extra_state(self):
        return torch.tensor(self.seen_temperatures)

    def set_extra_state(self, state):
        self.seen_temperatures = tuple(state.tolist())
        self.temperature = state[-1].item()


class Averages:
    def __init__(self):
        self.log, self.average, self.last = None, None, []

    def on_start(self, run, state):
        self.run, self.optimizer, self.average = run, run.optimizer, torch.optim.swa_utils.AveragedModel(run.model)

    def on_step_end(self, run, state):
        if state.step > 1:
            self.average.update_parameters(run.model)


class Looks:
    def on_start(self, run, state):
        self.run, self.optimizer, self.model, self.ema = run, run.optimizer, run.model, run.ema
        self.at, self.all = 0, []

    def on_step_end(self, run, state):
        self.at, self.all = self.at + 1, [*self.all, {"seconds": time.time() - self.at}]
"""
WORDS = [
    "model.hidden=[16]", "data.batch_size=64", "trainer.max_epochs=2", "trainer.num_threads=1",
    "monitor.log_every_n_steps=4", "monitor.progress_bar=false", "monitor.plots=false", "monitor.hardware=false",
    "monitor.stop._target_=own.Stops", "checkpoint.every_n_train_steps=5",
]  # fmt: skip


def notes_of(run: Path, about: str = "task:") -> list[str]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows if row["kind"] == "note" and about in row["text"]]


def stop_at(step: int) -> str:
    return f"monitor.stop.at={step}"


def test_state_that_a_task_saves_makes_a_resume_exact(own: Path) -> None:
    words = [*WORDS, "task=own.Saved", "trainer.accumulate_grad_batches=2"]
    assert main([*words, "output_dir=whole"]) == 0
    assert main([*words, stop_at(8), "output_dir=stopped"]) == 75
    assert main(["resume", "stopped", stop_at(-1)]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    assert whole[0]["shared"]["task"]["state"]["calls"] > 0
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]
    assert notes_of(own / "whole") == []


@pytest.mark.process
def test_two_ranks_get_their_own_state_again(own: Path) -> None:
    words = [*WORDS, "task=own.Center", "parallel=ddp"]
    assert main([*words, "output_dir=whole"]) == 0
    assert main([*words, stop_at(8), "output_dir=stopped"]) == 75
    assert main(["resume", "stopped", stop_at(-1)]) == 0
    whole, again = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], again[0])
    assert whole[1] == again[1]
    (ours,) = other_ranks_of(own / "whole", 2)
    same(ours["task"], other_ranks_of(own / "stopped", 2)[0]["task"])
    assert not torch.equal(ours["task"]["state"]["center"], whole[0]["shared"]["task"]["state"]["center"])


def test_state_in_no_checkpoint_is_told_once_and_refuses_no_resume(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "task=own.Hidden", stop_at(8), "output_dir=run"]) == 75
    (told,) = notes_of(own / "run")
    assert "Hidden: calls, center, momentum" in told
    assert main(["resume", "run", stop_at(-1)]) == 0
    (_, again) = notes_of(own / "run", "calls, center, momentum")
    assert again.startswith("checkpoint ")


def test_each_attribute_in_no_checkpoint_is_noted_once(own: Path) -> None:
    assert main([*WORDS, "task=own.Changing", "output_dir=run"]) == 0
    noted = [text.partition(" changes")[0] for text in notes_of(own / "run")]
    assert noted == ["task: Changing: calls", "task: Changing: best"]


@pytest.mark.process
def test_a_data_set_that_a_hook_changes_is_noted_because_workers_do_not_see_it(own: Path) -> None:
    data = ["data=custom", "data.train._target_=own.Rows", "data.shape=[4]", "data.num_classes=2"]
    words = [*WORDS, *data, "hook.levels._target_=own.Levels"]
    assert main([*words, "data.num_workers=1", "output_dir=run"]) == 0
    (note,) = notes_of(own / "run", "set_epoch")
    assert note.startswith("data.train: Rows: level changes in the training")


@pytest.mark.process
@pytest.mark.parametrize("as_buffer", [False, True])
def test_a_weight_that_each_rank_changes_in_its_own_way_is_noted(own: Path, as_buffer: bool) -> None:
    model = ["model=own.Codebook", f"model.as_buffer={as_buffer}"]
    words = [word for word in WORDS if not word.startswith("model.")]
    assert main([*words, *model, "parallel=ddp", "trainer.max_steps=4", "output_dir=run"]) == 0
    told = notes_of(own / "run", "the ranks have different values of codes")
    assert len(told) == (not as_buffer)


def test_a_debug_counter_blocks_no_resume_and_changes_no_result(own: Path) -> None:
    words = [*WORDS, "task=own.Counting", "hook.c._target_=own.CountingHook"]
    assert main([*words, "output_dir=whole"]) == 0
    assert main([*words, stop_at(8), "output_dir=stopped"]) == 75
    assert main(["resume", "stopped", stop_at(-1)]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    del whole[0]["shared"]["task"], resumed[0]["shared"]["task"]  # what was told
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]
    assert sorted(text.partition(" changes")[0] for text in notes_of(own / "whole", " changes in the")) == [
        "hook.c: CountingHook: seen", "task: Counting: calls, log",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=own.Net", "model.keeps=temperature"], "model: Net (last, logits, middle, temperature)"),
        (["model=own.Net", "model.keeps=mean"], "model: Net (last, logits, mean, middle)"),
        (["model=own.Net", "model.keeps=teacher"], "model: Net (last, logits, middle, teacher)"),
        (["model=own.Queue"], "model: Queue (means)"),
        (["hook.swa._target_=own.Averages"], "hook.swa: Averages (average)"),
        (["hook.a._target_=own.Looks", "trainer.ema=true"], "hook.a: Looks (all, at)"),
        (["model=own.SavesItself", "model.keeps=mean"], ""),
        (["model=own.Knows", "model.keeps=temperature"], ""),
    ],
)
def test_state_of_models_and_hooks_in_no_checkpoint_is_told_at_once_and_at_a_resume(
    own: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words, stop_at(8), "output_dir=run"]) == 75
    assert main(["evaluate", "run", "--which", "last"]) == 0
    assert ("they have their initial values" in capsys.readouterr().err) == told.startswith("model")
    owner, _, names = told.removesuffix(")").partition(" (")
    (first,) = notes_of(own / "run", " changes in the training") or [""]
    assert first.partition(" changes in")[0] == (f"{owner}: {names}" if told else "")
    assert main(["resume", "run", stop_at(-1), "trainer.max_steps=10"]) == 0
    again = notes_of(own / "run", f"does not contain values that changed in {told}")
    assert len(again) == bool(told)


def test_extra_state_that_no_checkpoint_can_hold_is_refused(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "model=own.Odd", "output_dir=run"]) == 2
    approve_error(capsys.readouterr().err)


@pytest.mark.parametrize(("task", "rate"), [("Weighted", 0.0), ("Module", 0.0), ("Module", 0.1)])
def test_parameters_of_a_task_that_nothing_updates_are_told(own: Path, task: str, rate: float) -> None:
    assert main([*WORDS, f"task=own.{task}", f"task.rate={rate}", "output_dir=run"]) == 0
    told = [text for text in notes_of(own / "run") if "nothing updates them" in text]
    assert [text.partition(": its own parameters ")[2][:8] for text in told] == ([] if rate else ["(weight)"])


@pytest.mark.parametrize("task", ["Half", "Unsaveable"])
def test_a_task_that_cannot_be_saved_is_refused(
    own: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, f"task=own.{task}"]) == 2
    approve_error(capsys.readouterr().err)


def test_a_fault_of_load_state_dict_names_its_line(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "task=own.Broken", stop_at(8), "output_dir=run"]) == 75
    assert main(["resume", "run"]) == 2
    approve_error(capsys.readouterr().err)


def test_another_task_does_not_drop_the_state_of_before(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "task=own.Saved", stop_at(8), "output_dir=run"]) == 75
    assert main([*WORDS, "task=own.Sums", "ckpt_path=run", "output_dir=other"]) == 2
    approve_error(capsys.readouterr().err)


@pytest.mark.parametrize("words", [("trainer.compile=step",), ()])
def test_one_graph_refuses_a_task_that_keeps_state(
    own: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*WORDS, "task=own.Saved", *words, "output_dir=run"])
    refused = "trainer.compile.scope=step: Saved has its own state" in capsys.readouterr().err
    assert (code, refused) == ((2, True) if words else (0, False))


def test_evaluation_has_the_state_of_the_task(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "task=own.Saved", "output_dir=run"]) == 0
    metrics = json.loads((own / "run" / "status.json").read_text())["metrics"]
    assert main(["evaluate", "run", "--which", "last"]) == 0
    found = json.loads((own / "run" / "evaluation-val.json").read_text())
    assert found["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-6)


def test_checksums_tell_contents_apart() -> None:
    from trainrun.runtime.held_state import format_state

    one = {"a": torch.ones(3), "b": [1, 2.0, None]}
    assert format_state(one, set()) == format_state({"a": torch.ones(3), "b": [1, 2.0, None]}, set())
    assert format_state(one, set()) != format_state({"a": torch.ones(3), "b": [1, 2.5, None]}, set())
    assert format_state(one, set()) != format_state({"a": torch.zeros(3), "b": [1, 2.0, None]}, set())
    large = torch.zeros(3, 1 << 20)
    assert format_state(large, set()) == format_state(large.clone(), set())
    assert format_state(large, set()) != format_state(large + 1e-6, set())


def test_what_holds_more_than_can_be_looked_at_soon_is_not_told() -> None:
    from trainrun.runtime.held_state import format_state

    class Item(float):
        looked = 0

        def __repr__(self) -> str:
            Item.looked += 1
            return "item"

    assert format_state([[Item()] * 90] * 100, set())
    assert not format_state([[[Item()] * 100] * 900] * 100, set())
    assert Item.looked < 20_000
