"""`trainrun verify`: every planted bug is caught by the check that it belongs to, and good configs pass."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from approved import refused

from trainrun.assemble import step_function
from trainrun.cli.main import main as cli
from trainrun.config.compose import compose_run
from trainrun.data.order import sampler as order
from trainrun.precision.update import Update
from trainrun.training.recovery import restore
from trainrun.verify import continuity, run_checks
from trainrun.verify.certificate import FAIL, NONE, PASS, NotApplicable, different_leaves, largest_difference
from trainrun.verify.run_checks import build_checks
from trainrun.verify.trials import Outcome, Trials

WORDS = (
    "model=subjects.Net", "data.train._target_=subjects.samples", "data.val._target_=subjects.samples",
    "data.val.seed=2", "data.batch_size=8", "optimizer.lr=0.01", "trainer.num_threads=1",
)  # fmt: skip
SEQUENCES = (
    "model=subjects.Reader", "data.train._target_=subjects.Sequences", "data.val._target_=subjects.Sequences",
    "data.batch_size=8", "trainer.num_threads=1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def subjects_can_be_imported(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def number_of_steps_is_not_of_the_clock(monkeypatch):
    """On a busy machine fewer steps would fit into the time of a check, and what acts later would not be seen."""
    monkeypatch.setattr(continuity, "LAP_SECONDS", 1e9)
    monkeypatch.setattr(continuity, "MOST_STEPS", 20)


def table_of(tmp_path, *words):
    named = {word.partition("=")[0] for word in words}
    base = SEQUENCES if "data.train._target_=subjects.Sequences" in words else WORDS
    config = compose_run([*(word for word in base if word.partition("=")[0] not in named), *words]).config
    return build_checks(config, Trials(config, tmp_path, lambda about: None), tmp_path)


def verdict(tmp_path, check, *words):
    return state_of(table_of(tmp_path, *words)[check])


def state_of(check):
    try:
        return check().state
    except NotApplicable:
        return NONE


def plant(monkeypatch, owner, name, make):
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def test_a_stream_has_no_first_samples_and_one_reader(tmp_path):
    table = table_of(
        tmp_path,
        "data.train._target_=subjects.Stream",
        "data.val._target_=subjects.Stream",
        "data.val.seed=1",
    )
    for check in ("evaluation", "engines"):
        with refused(NotApplicable):
            table[check]()


def test_batches_of_shards_depend_on_the_readers(tmp_path):
    table = table_of(tmp_path, "data.train._target_=subjects.Shards", "data.val=null")
    for check in ("ranks", "engines"):
        with refused(NotApplicable, "shards of its own"):
            table[check]()


def test_a_trial_whose_settings_are_refused_is_no_failure_of_the_run(tmp_path):
    config = compose_run(WORDS).config
    trials = Trials(config, tmp_path / "trials", lambda about: None)
    with refused(NotApplicable, "trainer.gradient_clip_val"):
        trials.run(
            "a clipped update",
            lambda config: dataclasses.replace(
                config, trainer=dataclasses.replace(config.trainer, gradient_clip_val=-1.0)
            ),
        )
    assert not (tmp_path / "trials").exists()


def test_an_average_of_averages(tmp_path, monkeypatch):
    def averaged(real):
        def step(run, window):
            accumulate = run.config.trainer.accumulate_grad_batches
            sizes = iter([run.task.count(batch.data) for batch in window])
            with monkeypatch.context() as during:
                plant(during, run.precision, "backward",
                      lambda back: lambda loss, share: back(loss, 1 / next(sizes) / accumulate))  # fmt: skip
                return real(run, window)

        return step

    plant(monkeypatch, step_function, "train_step", averaged)
    assert verdict(tmp_path, "accumulation") == PASS  # the windows are whole there
    assert verdict(tmp_path, "partial window") == FAIL


def test_clipping_before_the_window_is_complete(tmp_path, monkeypatch):
    def clipped(real):
        def backward(self, loss, share):
            real(self, loss, share)
            for parameter in self._model.parameters():
                parameter.grad.clamp_(-1e-3, 1e-3)

        return backward

    plant(monkeypatch, Update, "backward", clipped)
    assert verdict(tmp_path, "accumulation") == FAIL


def test_a_schedule_that_moves_with_micro_batches(tmp_path, monkeypatch):
    def often(real):
        def step(run, window):
            for _ in window[1:]:
                run.schedule.step()
            return real(run, window)

        return step

    plant(monkeypatch, step_function, "train_step", often)
    assert verdict(tmp_path, "learning rate", "scheduler=linear") == FAIL


def test_data_read_again_after_a_resume(tmp_path, monkeypatch):
    def forgetful(real):
        def load(state, saved):
            real(state, saved | {"batches": 0})

        return load

    plant(monkeypatch, restore, "load_train_state", forgetful)
    assert verdict(tmp_path, "resume") == FAIL


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [(restore, "load_named_optimizer_state", ()), (restore, "set_random_state", ("model.dropout=0.5",))],
)
def test_a_state_that_a_resume_forgets(tmp_path, monkeypatch, module, name, words):
    plant(monkeypatch, module, name, lambda real: lambda *args: None)
    assert verdict(tmp_path, "resume", *words) == FAIL


def test_a_forgotten_loss_scale(tmp_path, monkeypatch):
    plant(
        monkeypatch,
        Update,
        "load_state_dict",
        lambda real: lambda self, state: real(self, {**state, "scaler": None}),
    )
    assert verdict(tmp_path, "resume", "precision=16-mixed") == FAIL


def test_a_run_that_ends_before_the_trial_is_resumed_too(tmp_path, monkeypatch):
    """Of two steps, where a longer one would be stopped at a later step; one of a single step cannot be resumed."""
    plant(monkeypatch, restore, "load_named_optimizer_state", lambda real: lambda *args: None)
    assert verdict(tmp_path, "resume", "trainer.max_steps=2") == FAIL
    assert verdict(tmp_path, "resume", "trainer.max_steps=1") == NONE


def test_a_clock_in_an_attribute_is_no_failure(tmp_path):
    assert verdict(tmp_path, "resume", "model=subjects.Clocked", "data.val=null") == PASS


def test_clipping_before_unscaling(tmp_path, monkeypatch):
    def scaled(real):
        def step(self, optimizer, want_norm):
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            return real(self, optimizer, want_norm)

        return step

    words = ("precision=16-mixed", "trainer.gradient_clip_val=1.0", "optimizer=sgd", "optimizer.lr=0.5")
    assert verdict(tmp_path, "rounding", *words) == PASS
    plant(monkeypatch, Update, "optimizer_step", scaled)  # float32 is not scaled, so it is the same there
    assert verdict(tmp_path, "rounding", *words) == FAIL


def test_a_parameter_that_the_optimizer_does_not_have(tmp_path):
    words = ("optimizer._target_=subjects.without_the_first", "optimizer.lr=0.1")
    assert verdict(tmp_path, "parameters", *words) == FAIL


def test_a_bias_before_a_batch_norm_may_stay_as_it_is(tmp_path):
    words = ("model.norm=true", "optimizer=sgd", "optimizer.lr=0.001", "optimizer.momentum=0")
    found = table_of(tmp_path, *words)["parameters"]()
    assert found.state == PASS
    assert "layers.0.bias" in found.text


def test_words_that_no_run_can_have_are_refused_before_the_table(capsys):
    assert cli(["verify", *WORDS, "data.batch_size=1000"]) == 2
    told = capsys.readouterr()
    assert "data.batch_size=1000: larger than the data" in told.err
    assert told.out == ""
    assert cli(["verify", *WORDS, "trainer.cuda_graphs=true", "parallel.accelerator=cpu"]) == 2
    assert capsys.readouterr().out == ""
    assert cli(["verify", *WORDS, "step._target_=trainrun.training.train_step.train_step"]) == 2
    assert "step: your own code" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["val", "val/night"])
def test_an_evaluation_that_pads_with_samples(tmp_path, monkeypatch, split):
    """Of the only validation set, or of the second one alone."""

    def padded(real):
        def evaluate(run, which):
            stream = run.splits()[which]

            class Padded:
                def epoch(self, epoch):
                    batches = list(stream.epoch(epoch))
                    return [*batches, batches[-1]]

                def __getattr__(self, name):
                    return getattr(stream, name)

            if which != split:
                return real(run, which)
            return real(dataclasses.replace(run, validation={which: Padded()}), which)

        return evaluate

    words = WORDS
    if split != "val":
        sets = ("data.val.day._target_=subjects.samples", "data.val.night._target_=subjects.samples")
        words = (*(word for word in WORDS if not word.startswith("data.val.")), *sets)
    config = compose_run([*words, "seed=42"]).config
    check = build_checks(config, Trials(config, tmp_path, lambda about: None), tmp_path)["evaluation"]
    assert check().state == PASS
    plant(monkeypatch, continuity, "evaluate", padded)
    assert check().state == FAIL
    assert f"largest: {split}/" in check().text


def test_a_lost_sample(tmp_path, monkeypatch):
    def shorter(real):
        def build_order(num_samples, *rest):
            lookup = real(num_samples, *rest)
            return lambda positions: lookup(positions % (num_samples - 1))

        return build_order

    plant(monkeypatch, order, "build_order", shorter)
    assert verdict(tmp_path, "every sample once") == FAIL


@pytest.mark.parametrize("words", ["data.sampling=balanced", "trainer.limit_train_batches=3"])
def test_samples_that_repeat_or_are_left_out_are_not_certified_to_be_there_once(tmp_path, words):
    assert verdict(tmp_path, "every sample once", words) == NONE


@pytest.mark.parametrize(
    ("check", "words"),
    [
        pytest.param("sum of losses", ("task._target_=subjects.MeanTask",), id="a mean in place of a sum"),
        pytest.param(
            "sum of losses",
            ("task._target_=subjects.MeanInTraining",),
            id="a mean that is taken in training alone",
        ),
        pytest.param(
            "resume", ("model=subjects.Counting",), id="state outside the checkpoint that acts later"
        ),
        pytest.param(
            "evaluation", ("task._target_=subjects.MeanTask",), id="an evaluation that averages batches"
        ),
        pytest.param("evaluation", ("model=subjects.AlwaysDrops",), id="dropout left on in evaluation"),
        pytest.param(
            "update",
            (
                "model=subjects.Sliced",
                "optimizer=custom",
                "+optimizer._target_=subjects.IgnoresStrides",
                "+optimizer.lr=0.1",
            ),
            id="an optimizer that writes beside a weight",
        ),
        pytest.param("parameters", ("model=subjects.Idle",), id="a layer that is never used"),
        pytest.param("accumulation", ("model=subjects.AcrossSamples",), id="a model that mixes samples"),
        pytest.param(
            "engines",
            ("data.transform._target_=subjects.OwnNoise",),
            id="a transform with random numbers of its own",
        ),
        pytest.param("padding", ("model=subjects.Leaky", *SEQUENCES[1:]), id="padding that reaches the loss"),
    ],
)
def test_code_of_the_users_that_is_wrong(tmp_path, check, words):
    assert verdict(tmp_path, check, *words) == FAIL


GOOD = [
    ("model.dropout=0.5", "model.norm=true", "trainer.gradient_clip_val=0.01", "scheduler=warmup_cosine",
     "scheduler.warmup_steps=2"),
    ("precision=bf16-mixed", "optimizer=sgd", "trainer.ema.enabled=true", "scheduler=plateau", "data.drop_last=true",
     "data.shuffle=false"),
    ("model=subjects.Sliced", "precision=16-mixed", "trainer.accumulate_grad_batches=3"),
    (*SEQUENCES, "data.padding=bucket"),
]  # fmt: skip


@pytest.mark.parametrize("words", GOOD)
def test_good_configs_have_no_failure(tmp_path, words):
    quick = ("sum of losses", "accumulation", "partial window", "learning rate", "every sample once", "padding",
             "update", "evaluation", "parameters", "rounding", "resume")  # fmt: skip
    table = table_of(tmp_path, *words)  # the trials are made once for all of them, as the command does
    states = {check: state_of(table[check]) for check in quick}
    assert FAIL not in states.values(), states
    assert [check for check, state in states.items() if state == NONE] == [
        check for check in quick if (check == "padding" and "model=subjects.Reader" not in words)
        or (check == "rounding" and not any(word.startswith("precision") for word in words))
    ]  # fmt: skip


def test_the_command_prints_a_table_and_its_exit_code(tmp_path, capsys, monkeypatch):
    sys.path.append(str(Path(__file__).parent))
    before = sorted(tmp_path.iterdir())
    assert cli(["verify", *WORDS]) == 0
    table = capsys.readouterr().out
    assert "pass  ranks" in table
    assert "pass  engines" in table
    assert "none failed" in table
    assert sorted(tmp_path.iterdir()) == before  # nothing is left in the user's folder
    plant(monkeypatch, run_checks, "build_checks",
          lambda real: lambda *about: {"sum of losses": real(*about)["sum of losses"]})  # fmt: skip
    assert cli(["verify", *WORDS, "task._target_=subjects.MeanTask"]) == 1
    assert "FAIL  sum of losses" in capsys.readouterr().out
    assert cli(["verify", "model=nonsense"]) == 2


def test_trees_and_tensors_are_compared_bit_by_bit():
    a, nan = torch.tensor([1.0, -0.0]), float("nan")
    assert different_leaves({"a": [a, nan, 1]}, {"a": [a.clone(), nan, 1]}) == []
    assert different_leaves({"a": a}, {"a": torch.tensor([1.0, 0.0])}) == ["a"]
    assert different_leaves({"a": 1}, {"b": 1}) == ["a", "b"]
    assert largest_difference({"a": a}, {"a": a + 0.5}) == pytest.approx(0.5)
    assert largest_difference({"a": a}, {"a": a * nan}) == float("inf")
    assert largest_difference({"a": a}, {"b": a}) == float("inf")


@pytest.mark.parametrize(
    ("device", "noise", "state"), [("cuda", 1.0, NONE), ("cuda", 0.0, FAIL), ("cpu", 1.0, FAIL)]
)
def test_a_gpu_that_does_not_repeat_a_run_is_not_blamed_on_the_resume(monkeypatch, device, noise, state):
    def outcome(weight):
        return Outcome({"weight": torch.tensor(weight), "train": {"step": 6}}, {}, [], {}, 1.0)

    found = {0: [outcome(1.0), outcome(1.0 + noise)], 1: [outcome(2.0)]}  # without a stop, and resumed
    trials = SimpleNamespace(config=compose_run([]).config, pilot=outcome(1.0))
    trials.run_until_stopped = lambda about, steps, then=0: found[int(then > 0)].pop(0)
    found[0].pop(0)  # the pilot was that run
    monkeypatch.setattr(continuity, "MOST_STEPS", 6)
    monkeypatch.setattr(continuity, "choose_device", lambda *_, **__: torch.device(device))
    if state == NONE:
        with refused(NotApplicable, "trainer.deterministic=true"):
            continuity.check_resume(trials)
    else:
        assert continuity.check_resume(trials).state == state
