"""`trainrun quantize` and `trainrun prune`: new runs that load, are compared, and go on or refuse to."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from approved import approve_error, refused
from torch import nn

from trainrun import load_run
from trainrun.checkpoint import manager
from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.smaller import new_run
from trainrun.smaller.prune import Mask, explain_unmasked_layers, mask_weights, narrow_layers, remove_channels
from trainrun.transform.int8 import MODES, Int8Layer, compute_in_floats, int8, record_ranges, store_in_bytes

SHORT = ["trainer.max_steps=20", "monitor=none", "output_dir=run"]


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_run, "SECONDS", 0.0)


def picture_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding="same", bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4),
    ).eval()  # fmt: skip


X = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("x", [X, X.abs(), -X.abs()], ids=["both", "above", "below"])
@torch.no_grad()
def test_bytes_say_nearly_the_same_with_and_without_kernels(mode: str, x: torch.Tensor) -> None:
    expected = picture_net()(x)
    model = int8(picture_net(), mode).eval()  # type: ignore[arg-type]
    if mode == "int8-static":
        with record_ranges(model):
            model(x)
    found = model(x)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert sum(value.dtype is torch.int8 for value in model.state_dict().values()) == 4
    torch.testing.assert_close(
        compute_in_floats(model)(x), found, atol=0.02 * float(expected.abs().max()), rtol=0
    )
    again = int8(picture_net(), mode).eval()  # type: ignore[arg-type]
    again(x)  # packs what it began with
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), found)
    with refused(ConfigError), torch.enable_grad():
        model.train()(x)


@pytest.mark.parametrize("layer", [nn.Linear(40, 6), nn.Conv2d(3, 5, 3)], ids=["linear", "conv"])
def test_weights_use_all_levels_of_a_byte(layer: nn.Module) -> None:
    """Rounding to 255 levels moves a weight by at most half a level of its output channel."""
    nn.init.normal_(layer.weight)  # type: ignore[arg-type]
    weight = layer.weight.detach().flatten(1).clone()  # type: ignore[union-attr, operator]
    store_in_bytes(layer)
    largest = weight.abs().amax(1, keepdim=True)
    with torch.no_grad():
        error = (layer.weight.flatten(1) - weight).abs()  # type: ignore[union-attr, operator]
    assert (error <= 1.001 * largest / 254).all()
    values = layer.state_dict()["parametrizations.weight.original0"]
    assert (values.flatten(1).abs().amax(1) == 127).all()


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.recurrent = kind(32, 24, **options)
        self.head = nn.Linear(24 * (1 + self.recurrent.bidirectional), 5)

    def forward(self, x: torch.Tensor, state: object = None) -> tuple[torch.Tensor, object]:
        states, after = self.recurrent(x, hx=state)
        return self.head(states), after


STACKED = {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.1}


@pytest.mark.parametrize("mode", ["int8-weight-only", "int8-dynamic"])
@pytest.mark.parametrize(
    "options", [{"batch_first": True}, STACKED, {"bias": False}], ids=["one", "two", "bare"]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@torch.no_grad()
def test_recurrent_layers_become_bytes(kind: type[nn.RNNBase], options: dict[str, object], mode: str) -> None:
    torch.manual_seed(0)
    base, x = Tagger(kind, **options).eval(), torch.randn(6, 9, 32)
    model = int8(copy.deepcopy(base), mode).eval()  # type: ignore[arg-type]
    (expected, state), (output, after) = base(x), model(x)
    tolerance = 0.05 * float(expected.abs().max())
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(model(x, after)[0], base(x, state)[0], atol=tolerance, rtol=0)
    assert isinstance(model.recurrent, Int8Layer) is (mode == "int8-dynamic")
    assert model.recurrent.hidden_size == 24
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    sizes = [sum(value.nbytes for value in net.state_dict().values()) for net in (model, base)]
    assert sizes[0] < 0.4 * sizes[1]
    again = int8(Tagger(kind, **options), mode).eval()  # type: ignore[arg-type]
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x)[0], output)
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 32), torch.randn(3, 32)])
    found, wanted = model.recurrent(packed)[0].data, base.recurrent(packed)[0].data
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)


def test_table_shows_milliseconds_a_sample_and_samples_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"before": 0.004, "after": 0.002}
    sides = iter(["before", "after"] * 2)

    def turn_of_fixed_seconds(work: object) -> Callable[[], float]:
        side = next(sides)
        return lambda: seconds[side]

    monkeypatch.setattr(new_run, "SECONDS", 60.0)
    monkeypatch.setattr(new_run, "build_turn", turn_of_fixed_seconds)
    monkeypatch.setattr(new_run, "read_first_batches", lambda stream: [X])
    monkeypatch.setattr(new_run, "record_call", lambda *_: ([X], None))
    nets = [new_run.Measurement({}, 1, picture_net()) for _ in range(2)]
    parts = SimpleNamespace(val=[X], train=None, task=None)
    latency, throughput = new_run.measure_speeds(*nets, parts)  # type: ignore[arg-type]
    assert latency[:3] == ("latency of 1", "4.000 ms", "2.000 ms")
    assert throughput[:3] == ("throughput", "4k a second", "8k a second")
    assert latency[3].startswith("2.00x as fast")
    assert "SLOWER" not in latency[3]
    seconds["after"] = 0.008
    sides = iter(["before", "after"] * 2)
    assert all("SLOWER" in row[3] for row in new_run.measure_speeds(*nets, parts))  # type: ignore[arg-type]


class Streams(nn.Module):
    """A residual sum, a depthwise convolution, a map made flat, and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.wide, self.alone, self.back = (
            nn.Conv2d(8, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 8, 1)
        )  # fmt: skip
        self.flat, self.norm, self.gate = nn.Linear(8 * 9, 10), nn.LayerNorm(10), nn.Linear(10, 10)
        self.head = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.stem(x)).relu()
        x = x + self.back(self.alone(self.wide(x)).relu())
        x = self.flat(nn.functional.avg_pool2d(x, 2).flatten(1))
        return self.head(x * self.gate(self.norm(x)).sigmoid())


ZEROS = {"stem": 8, "bn": 8, "back": 8, "wide": 12, "alone": 12, "flat": 10}


def streams() -> nn.Module:
    torch.manual_seed(0)
    return Streams().eval()


@torch.no_grad()
def test_channels_that_are_zero_can_go_without_a_trace() -> None:
    model = streams()
    for name in ZEROS:
        layer = model.get_submodule(name)
        layer.weight[::2] = layer.bias[::2] = 0  # type: ignore[operator, index]
    model.norm, model.gate = nn.Identity(), nn.Identity()  # a layer norm counts its channels
    model.flat.requires_grad_(False)
    expected = model(X)
    found, sizes, left = remove_channels(model, [X], {}, 0.5)
    torch.testing.assert_close(found(X), expected)
    assert list(left) == ["head"]
    assert not found.flat.weight.requires_grad
    assert found.stem.weight.requires_grad
    outputs = {name: number for name, number, _ in sizes}
    assert outputs == {name: number // 2 for name, number in ZEROS.items()} | {"head": 4}
    again = streams()
    again.norm, again.gate = nn.Identity(), nn.Identity()
    again = narrow_layers(again, sizes).eval()
    again.load_state_dict(found.state_dict())
    assert torch.equal(again(X), found(X))
    assert found.alone.groups == 6
    assert model.stem.weight.shape[0] == 8  # what was given is as it was


def test_channels_of_a_layer_norm_are_removed_with_it() -> None:
    _, sizes, left = remove_channels(streams(), [X], {}, 0.5)
    assert ["norm", 5, 0] in sizes
    assert ["flat", 5, 36] in sizes
    assert ["gate", 5, 5] in sizes
    assert list(left) == ["head"]


class Moved(nn.Module):
    """Moves channels to another dimension, sums over the others, and mixes them with each other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(8, 8), nn.Linear(8, 3), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)  # (batch, 5, 8)
        if self.way == "sum":
            return self.b(h.transpose(1, 2).sum(-1, keepdim=True).squeeze(-1))
        if self.way == "row":
            return self.b(h[:, 0].unsqueeze(1).flatten(1))
        if self.way == "part":
            return self.b(h[..., :4].repeat(1, 1, 2))
        return self.b(h.unflatten(-1, (2, 4)).permute(0, 1, 3, 2).flatten(2))


@pytest.mark.parametrize("way", ["sum", "row", "part", "interleaved"])
def test_channels_are_followed_as_long_as_they_lie_along_one_dimension(way: str) -> None:
    torch.manual_seed(0)
    model, x = Moved(way).eval(), torch.randn(4, 5, 8)
    if way in ("part", "interleaved"):
        with refused(ValueError):
            remove_channels(model, [x], {}, 0.5)
        return
    with torch.no_grad():
        model.a.weight[::2] = model.a.bias[::2] = 0
        expected = model(x)
        narrowed, sizes, _ = remove_channels(model, [x], {}, 0.5)
        torch.testing.assert_close(narrowed(x), expected)
    assert sizes == [["a", 4, 8], ["b", 3, 4]]


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).relu()).view(-1, 4)) + x.new_zeros(2)


class Added(Fixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).relu()) + x)


class Beside(Fixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(torch.cat([self.a(x), x], 1)[:, :4]))


class Twice(Fixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(self.a(x)).chunk(2, 1)[0].repeat(1, 2))


class Heads(Fixed):
    """The size of a head follows from the channels, which would go to other heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.b(self.a(x)).unflatten(-1, (2, -1))
        return self.c((heads * heads.sum(-1, keepdim=True)).flatten(1))


class Recurrent(Fixed):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.lstm(self.b(self.a(x).relu()))[0])


@pytest.mark.parametrize(
    ("net", "unchanged"),
    [
        (Added, {"b", "c"}),
        (Beside, {"a", "c"}),
        (Fixed, {"b", "c"}),
        (Heads, {"b", "c"}),
        (Recurrent, {"b", "c"}),
    ],
)
def test_channels_that_others_need_stay(net: type[Fixed], unchanged: set[str]) -> None:
    torch.manual_seed(0)
    _, sizes, left = remove_channels(net().eval(), [torch.randn(4, 4)], {}, 0.5)
    assert set(left) == unchanged
    assert ["b" if net is Beside else "a", 2, 4] in sizes


class Tied(Fixed):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize(
    "net", [nn.Linear(4, 4), Twice(), Tied(), nn.Tanh()], ids=["one", "twice", "tied", "none"]
)
def test_no_channel_can_go(net: nn.Module) -> None:
    with refused(ValueError):
        remove_channels(net.eval(), [torch.ones(2, 4)], {}, 0.5)


def test_masked_weights_stay_zero() -> None:
    model = mask_weights(picture_net(), 0.75).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(X).square().sum().backward()
    optimizer.step()
    weights = torch.cat(
        [layer.weight.flatten() for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    )
    assert 0.74 < float((weights == 0).float().mean()) < 0.76


@torch.no_grad()
def test_masked_weights_become_bytes_and_stay_zero() -> None:
    model = mask_weights(picture_net(), 0.75)
    expected = model(X)
    found = int8(copy.deepcopy(model), "int8-weight-only").eval()
    assert (found(X) - expected).abs().max() < 0.02 * expected.abs().max()
    assert (
        sum(int((one == 0).sum()) for one in found.parameters() if one.dtype == torch.int8)
        >= 0.75 * (432 + 1152 + 96 + 48) - 1
    )
    assert torch.equal(model(X), expected)  # the copy alone has changed


def test_layers_without_masks_are_named() -> None:
    net = nn.ModuleList(
        [nn.Embedding(4, 2), nn.LSTM(2, 3), nn.Conv1d(3, 2, 3, padding="same"), nn.Linear(3, 2),
         nn.utils.spectral_norm(nn.Linear(3, 2))]
    )  # fmt: skip
    assert explain_unmasked_layers(net) == {
        "0": "no mask for this Embedding",
        "1": "no mask for this LSTM",
        "4": "no mask for this Linear, whose weight is computed",
    }
    assert [layer for layer in mask_weights(net).modules() if isinstance(layer, Mask)] == [
        net[number].parametrizations.weight[0] for number in (2, 3)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_quantized_run(workdir: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.ema=true", *SHORT]) == 0
    capsys.readouterr()
    assert main(["quantize", "run", "--to", mode, "--out", "small"]) == 0
    told = capsys.readouterr().out
    before, after = next(line.split()[1:3] for line in told.splitlines() if line.startswith("val/acc"))
    assert abs(float(before) - float(after)) < 0.05
    assert "0.2" in next(line for line in told.splitlines() if line.startswith("weights"))
    assert main(["evaluate", "small"]) == 0
    found = json.loads(Path("small/evaluation-val.json").read_text())
    assert f"{found['val/acc']:.5g}" == after
    assert main(["predict", "small"]) == 0
    assert main(["export", "small", "--to", "torch.export,safetensors"]) == 0
    assert main(["resume", "small", "trainer.max_steps=3"]) != 0
    assert "quantized weights cannot be trained" in capsys.readouterr().err
    assert main(["quantize", "run", "--to", mode, "--out", "small"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_worse_metric_is_marked(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT]) == 0
    assert main(["prune", "run", "--amount", "0.99", "--out", "small"]) == 0
    monitored = load_run("run").config.checkpoint.monitor or "val/acc"
    lines = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("val/")
    }
    assert lines[monitored].split()[-1] == "WORSE"


@pytest.mark.parametrize("words", [["--structured"], []], ids=["channels", "weights"])
def test_a_pruned_run_goes_on(workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.ema=true", *SHORT]) == 0
    assert main(["prune", "run", *words, "--finetune", "4step", "--out", "small"]) == 0
    assert load_run("small").config.trainer.ema.enabled
    assert main(["prune", "run", *words, "--finetune", "2step", "--out", "twice"]) == 0
    assert main(["resume", "twice", "trainer.max_steps=4"]) == 0
    pair = [load_run(name).load_model("last").state_dict() for name in ("small", "twice")]
    assert all(torch.equal(one, pair[1][name]) for name, one in pair[0].items())
    assert main(["evaluate", "small"]) == 0
    if words:
        assert pair[0]["layers.1.weight"].shape == (128, 64)
    capsys.readouterr()
    assert main(["prune", "small", "--out", "third"]) == 2
    assert "has transform.pruned already" in capsys.readouterr().err


OWN = """
import torch
from torch import nn
from trainrun.interfaces import StepOutput
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)
        self.register_buffer("mean", None)  # until the first forward
        self.register_buffer("seen", torch.zeros(0))
    def encode(self, x):
        if self.mean is None:
            self.mean = x.flatten(1).mean(0)
        self.seen = torch.cat([self.seen, self.mean[:1]]) if self.training else self.seen
        return self.a(x.flatten(1) - self.mean).relu()
    def forward(self, x):
        return self.b(self.encode(x))
class Shifted:
    def __init__(self):
        self.offset = torch.zeros(())
    def count(self, batch):
        return len(batch[1])
    def on_epoch_end(self, model, info):
        self.offset = torch.tensor(3.0)
    def step(self, model, batch):  # calls a part of the model alone
        out = model.b(model.encode(batch[0]))
        return StepOutput((out[:, 0] + self.offset - batch[1]).square().sum())
    def state_dict(self):
        return {"offset": self.offset}
    def load_state_dict(self, state):
        self.offset = state["offset"]
"""


def test_what_a_run_began_with_and_learned_beside_its_weights(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "own_smaller.py").write_text(OWN)
    short, own = (
        ["trainer.max_epochs=1", "monitor=none"],
        ["model=own_smaller.Net", "task=own_smaller.Shifted"],
    )
    assert main([*short, *own, "output_dir=first"]) == 0
    begun = ["init_from=first", "init.skip=b.*", "model.freeze=[a.weight]"]
    groups = 'optimizer.groups=[{params: "*.weight", lr: 1e-4}]'
    assert main([*short, *own, *begun, groups, "output_dir=run"]) == 0
    for command in (
        ["prune", "run", "--amount", "0.01", "--finetune", "1epoch"],
        ["quantize", "run", "--to", "int8-weight-only"],
    ):
        capsys.readouterr()
        assert main([*command, "--which", "last", "--out", command[0]]) == 0
        told = capsys.readouterr().out
        before, after = next(line.split()[1:3] for line in told.splitlines() if line.startswith("val/loss"))
        assert abs(float(before) - float(after)) < 0.2 * float(before)
        assert "without speeds: task: its step does not call the model" in told
    whole, pruned = (load_run(name).load_model("last") for name in ("run", "prune"))
    kept = pruned.a.weight != 0
    assert torch.equal(pruned.a.weight[kept], whole.a.weight[kept])


def test_a_tokenizer_goes_along(workdir: Path) -> None:
    for name, letters in (("one", "abcdefgh"), ("two", "ijklmnop")):
        words = ["".join(letters[i * j % 8] for j in range(2 + i % 5)) for i in range(40)]
        Path(f"{name}.txt").write_text(" ".join(words * 20))
    text = "data=text model=gpt model.width=16 model.heads=2 model.layers=1 model.context=16 task=language_modeling"
    words = [*text.split(), "data.train.block_size=16", "data.tokenizer=bpe:270", *SHORT[:2]]
    assert main([*words, "data.path=one.txt", "output_dir=base"]) == 0
    assert main([*words, "data.path=two.txt", "init_from=base", "output_dir=run"]) == 0
    assert main(["quantize", "run", "--to", "int8-weight-only", "--out", "small"]) == 0
    assert Path("small/tokenizer.json").read_bytes() == Path("base/tokenizer.json").read_bytes()


def test_a_student_is_pruned(workdir: Path) -> None:
    none = ["trainer.max_steps=0", "monitor=none"]
    assert main([*none, "output_dir=teacher"]) == 0
    assert main([*none, "task=distillation", "task.teacher=teacher", "output_dir=student"]) == 0
    assert main(["prune", "student", "--structured"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--amount", "1.5"],
        ["--finetune", "2"],
        ["--amount", "1e-9"],
        ["--out", "run/small"],
        ["--out", "run/config.yaml"],
    ],
)
def test_wrong_words(workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.max_steps=0", *SHORT[1:]]) == 0
    assert main(["prune", "run", *words]) == 2
    approve_error(capsys.readouterr().err)


def test_a_full_disk_leaves_no_half_of_a_run(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=0", *SHORT[1:]]) == 0
    there: list[bool] = []  # nothing is, before its weights are
    monkeypatch.setattr(
        manager, "measure_free_disk", lambda folder: there.append(Path("small").exists()) or 10
    )
    assert main(["quantize", "run", "--to", "int8-dynamic", "--out", "small"]) == 1
    told = capsys.readouterr().err
    assert "nothing of it was kept" in told
    assert "resume" not in told
    assert there
    assert not any([*there, *(path.name.endswith(".part") for path in Path().iterdir())])
    assert not Path("small").exists()
