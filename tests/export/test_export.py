"""`trainrun export`: what was written computes what the network does, and says so; wrong words are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from approved import approve, refused
from PIL import Image
from safetensors import SafetensorError

from trainrun import load_run
from trainrun.cli.main import main
from trainrun.data.scale import Scale
from trainrun.errors import ConfigError
from trainrun.export import export_command, formats
from trainrun.export.served import ModelCall, ServedModel, output_tensors

SHORT = ["trainer.max_steps=2", "monitor=none", "output_dir=run"]
NORMALIZE = "+data.augment.normalize={_target_: trainrun.data.augment.normalize.Normalize, mean: [0.5, 0.4, 0.3], std: [1, 2, 3]}"  # noqa: E501
BOOK = ["data=text", "data.path=book.txt", "data.train.block_size=32", "model.width=16"]
OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
    def forward(self, x):
        return self.b(self.a(x).relu().mean((2, 3)))
"""


def photos(folder: Path, side: int = 8) -> None:
    draw = np.random.default_rng(0)
    for number in range(48):
        place = folder / "photos" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(place)


def test_the_graph_begins_with_bytes_and_takes_any_batch(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    photos(workdir)
    (workdir / "own_export_net.py").write_text(OWN)
    words = [
        "data=image_folder",
        "data.path=photos",
        "data.shape=[3,8,8]",
        "model=own_export_net.Net",
        NORMALIZE,
    ]
    assert main([*words, "data.train.dtype=uint8", "data.val.dtype=uint8", *SHORT]) == 0
    capsys.readouterr()
    formats = "safetensors,onnx,torch.export,huggingface"
    assert main(["export", "run", "--to", formats, "--dynamic", "batch", "--out", "out"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == formats.split(",")
    assert all("largest difference" in line for line in told)
    pixels = torch.randint(
        0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    scaled = (pixels / 255 - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / torch.tensor([1.0, 2, 3])[
        :, None, None
    ]
    with torch.no_grad():
        expected = load_run("run").load_model()(scaled)
    session = onnxruntime.InferenceSession("out/model.onnx")
    (found,) = session.run(None, {"input": pixels.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
    program = torch.export.load("out/model.pt2").module()
    torch.testing.assert_close(program(pixels), expected, rtol=1e-4, atol=1e-5)
    about = json.loads(Path("out/huggingface/config.json").read_text())
    assert about["input_dtype"] == "uint8"
    assert about["input_scaling"]["normalize"]["std"] == [1, 2, 3]
    assert (
        main([*words, "trainer.max_steps=0", "monitor=none", "init_from=out/huggingface", "output_dir=b"])
        == 0
    )


@pytest.mark.parametrize(
    "words",
    [
        ["model.width=8", "model.blocks=[1,1]", "model=resnet"],
        [*BOOK, "model.layers=2", "model.heads=2", "task=language_modeling", "model=gpt"],
        [*BOOK, "task=language_modeling", "model=lstm"],
        ["precision=bf16-true"],
        [*BOOK, "task=vae", "model=sequence_vae"],
    ],
    ids=lambda words: words[-1],
)
def test_networks_of_ours(workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    assert main([*words, *SHORT]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--to", "torch.export", "--dynamic", "batch"]) == 0
    assert Path("run-export/model.pt2").is_file()
    assert not list(Path("run").rglob("*.pt2"))


def test_merge_adds_the_adapters(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transform.lora._target_=trainrun.transform.lora.lora", *SHORT]) == 0
    assert main(["export", "run", "--to", "safetensors", "--merge"]) == 0
    from safetensors.torch import load_file

    names = load_file("run-export/model.safetensors")
    assert names
    assert not [name for name in names if "lora" in name]
    assert main([*SHORT[:-1], "output_dir=b", "init_from=run-export/model.safetensors"]) == 0


def test_a_file_that_computes_something_else_is_an_error(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SHORT) == 0
    file, write = formats.FORMATS["safetensors"]

    def wrong(order: formats.ExportRequest, path: Path) -> tuple[Path, formats.Runner]:
        path, run = write(order, path)
        return path, lambda inputs: tuple(1.01 * one for one in run(inputs))

    monkeypatch.setitem(formats.FORMATS, "safetensors", (file, wrong))
    assert main(["export", "run", "--to", "safetensors"]) == 1
    assert "by 0.01 of the largest output" in capsys.readouterr().err
    assert not list(Path("run-export").iterdir())
    assert main(["export", "run", "--to", "safetensors", "--tolerance", "0.1"]) == 0
    assert [path.name for path in Path("run-export").iterdir()] == ["model.safetensors"]
    assert main(["export", "run", "--to", "onx"]) == 2
    assert "--to onx: no such format. Did you mean onnx?" in capsys.readouterr().err
    for words, told in (
        (["--out", "run/e"], "is inside the folder of the run"),
        (["--tolerance", "x"], "x: must be a number above 0"),
        (["--split", "train"], "--split train: "),
    ):
        assert main(["export", "run", "--to", "safetensors", *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["export", "run", "--to", "onnx", "--merge"]) == 2
    assert "this run has no LoRA layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("torch.export", "x if x.mean() > 0 else -x"),
        ("torch.export", "x + x.new_zeros(len(x), 1)"),
        ("onnx", "x + x.new_zeros(len(x), 1)"),
    ],
)
def test_what_cannot_be_a_graph_is_one_line(
    workdir: Path, name: str, first: str, capfd: pytest.CaptureFixture[str]
) -> None:
    net = "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        x = x.flatten(1)\n"
    Path("one_line_net.py").write_text(f"{net}        return super().forward({first})\n")
    assert main(["model=one_line_net.Net", "model.in_features=64", "model.out_features=10", *SHORT]) == 0
    capfd.readouterr()
    assert main(["export", "run", "--to", name, "--dynamic", "batch"]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1
    approve(lines[0])


@pytest.mark.parametrize("first", ["x - x.mean(0)", "x + torch.rand(1)"])
def test_a_network_whose_samples_depend_on_each_other_or_on_chance(
    workdir: Path, first: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("chance_net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        x = x.flatten(1)\n"
        f"        return super().forward({first})\n"
    )
    words = ["model=chance_net.Net", "model.in_features=64", "model.out_features=10"]
    assert main([*words, "trainer.max_steps=0", *SHORT[1:]]) == 0
    capfd.readouterr()
    assert main(["export", "run", "--to", "safetensors", "--dynamic", "batch"]) == int("rand" in first)
    approve("".join(capfd.readouterr()))


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["torch.export", "safetensors"])
def test_a_full_disk_is_told_and_what_was_there_stays(
    workdir: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=0", *SHORT[1:]]) == 0
    Path("out/huggingface/.git").mkdir(parents=True)
    assert main(["export", "run", "--to", "huggingface", "--out", "out"]) == 0
    assert {path.name for path in Path("out/huggingface").iterdir()} > {".git", "model.safetensors"}
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(
        "safetensors.torch.serialize_file",
        lambda *_, **__: (_ for _ in ()).throw(SafetensorError("disk full")),
    )
    assert main(["export", "run", "--to", name, "--out", "out"]) == 2
    assert "--out out: cannot write in it (" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["huggingface"]


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_what_is_not_a_number_is_the_largest_difference(order: tuple[int, int]) -> None:
    expected = [torch.tensor([1.0, float("-inf")]), torch.tensor([2.0, 1.0])]
    found = [expected[0].clone(), torch.tensor([2.0, float("nan")])]
    assert export_command.relative_difference(expected, expected) == 0
    assert export_command.relative_difference(
        [found[i] for i in order], [expected[i] for i in order]
    ) == float("inf")


def test_an_output_that_is_nearly_zero_is_measured_beside_the_others() -> None:
    logits, zero = torch.tensor([1.0, 0.5]), torch.tensor([1e-8, 0.0])
    assert export_command.relative_difference([logits, zero + 1e-7], [logits, zero]) < 1e-5
    assert export_command.relative_difference([logits, zero + 1e-3], [logits, zero]) > 1e-3


TASKS = """
from torch import nn, tensor, zeros
from trainrun.interfaces import StepOutput
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)
    def encode(self, x):
        return self.a(x.flatten(1))
    def forward(self, x, temperature):
        return {"out": self.encode(x) / temperature, "more": (temperature.exp(),)}
class Informed:
    def __init__(self):
        self.temperatures = []
    def count(self, batch):
        return len(batch[1])
    def step(self, model, batch, info):
        out = model(batch[0], tensor(2.0 if info.training else self.temperatures[0]))["out"]
        return StepOutput(nn.functional.cross_entropy(out, batch[1], reduction="sum"))
    def on_epoch_end(self, model, info):
        self.temperatures = [3.0]
    def state_dict(self):
        return {"temperatures": self.temperatures}
    def load_state_dict(self, state):
        self.temperatures = state["temperatures"]
class Encoding:
    def count(self, batch):
        return len(batch[1])
    def step(self, model, batch):
        return StepOutput(nn.functional.cross_entropy(model.encode(batch[0]), batch[1], reduction="sum"))
"""


@pytest.mark.parametrize("name", ["torch.export", "onnx"])
def test_a_task_with_info_and_state_and_a_number_beside_the_samples(
    workdir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "own_tasks.py").write_text(TASKS)
    words = ["model=own_tasks.Net", "task=own_tasks.Informed", "trainer.max_epochs=1", *SHORT[1:]]
    words.append("trainer.check_task=false")  # `info` is there after the first training step
    assert main([*words, "data.batch_size=1024"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--to", name, "--dynamic", "batch"]) == 0
    assert "largest difference" in capsys.readouterr().out
    if name == "torch.export":
        first, second = torch.export.load("run-export/model.pt2").module()(
            torch.ones(5, 1, 8, 8), torch.tensor(3.0)
        )
        assert first.shape == (5, 10)
        assert float(second) == pytest.approx(20.0855, rel=1e-4)


FLAGS = """
from torch import nn
from trainrun.interfaces import StepOutput
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)
    def forward(self, x, mask=0, scale=1.0, output_dim=5, return_more=False):
        out = self.a(x.flatten(1)) * (scale if mask is None else 0)
        out = out[:, :output_dim]
        return (out, out) if return_more else out
class Task:
    def count(self, batch):
        return len(batch[1])
    def step(self, model, batch):
        out, _ = model(batch[0], None, scale=2.0, output_dim=10, return_more=True)
        return StepOutput(nn.functional.cross_entropy(out, batch[1], reduction="sum"))
"""


@pytest.mark.parametrize("name", ["torch.export", "onnx"])
def test_numbers_that_the_task_gives_are_in_the_graph(workdir: Path, name: str) -> None:
    (workdir / "own_flags.py").write_text(FLAGS)
    assert main(["model=own_flags.Net", "task=own_flags.Task", *SHORT]) == 0
    assert main(["export", "run", "--to", name, "--dynamic", "batch"]) == 0
    if name == "torch.export":
        x, net = torch.rand(5, 1, 8, 8), load_run("run").load_model()
        found = torch.export.load("run-export/model.pt2").module()(x)
        assert torch.allclose(found, net(x, None, 2.0, 10))


def test_weights_are_written_where_the_network_cannot_be_called(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "own_tasks.py").write_text(TASKS)
    assert main(["model=own_tasks.Net", "task=own_tasks.Encoding", *SHORT]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--to", "safetensors,huggingface"]) == 0
    assert capsys.readouterr().out.count("not tried on samples (task: its step does not call the model") == 2
    assert "input_scaling" not in json.loads(Path("run-export/huggingface/config.json").read_text())
    assert (
        main(
            [
                "init_from=run-export/model.safetensors",
                "model=own_tasks.Net",
                "task=own_tasks.Encoding",
                *SHORT[:2],
            ]
        )
        == 0
    )
    assert main(["export", "run", "--to", "safetensors,torch.export"]) == 2


def test_text_is_read_with_the_tokenizer_of_the_run(workdir: Path) -> None:
    (workdir / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (workdir / "two.txt").write_text("abc " * 500)
    text = "data=text model=gpt model.width=16 model.heads=2 model.layers=1 model.context=16 task=language_modeling"
    words = [
        *text.split(),
        "data.train.block_size=16",
        "data.tokenizer=bpe:270",
        "data.batch_size=8",
        *SHORT[:2],
    ]
    assert main([*words, "data.path=two.txt", "output_dir=base"]) == 0
    assert main([*words, "data.path=one.txt", "init_from=base", "output_dir=run"]) == 0
    assert main(["export", "run", "--to", "torch.export"]) == 0


def test_a_folder_of_others_is_not_followed(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SHORT) == 0
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("trainrun.model.mlp.Mlp", "stranger.Net"))
    assert main(["export", "run", "--to", "onnx"]) == 2
    assert "--trust" in capsys.readouterr().err


def test_bytes_are_scaled_as_in_the_run() -> None:
    served = ServedModel(torch.nn.Identity(), ModelCall(), Scale(0.25, 0.5))
    torch.testing.assert_close(
        served(torch.tensor([0, 51, 255], dtype=torch.uint8)), torch.tensor([-0.5, -0.1, 1.5])
    )


def test_an_output_object_gives_its_logits() -> None:
    logits = torch.zeros(2, 3)
    assert output_tensors(SimpleNamespace(logits=logits, hidden=torch.ones(2))) is logits
    assert len(output_tensors({"a": logits, "b": (logits, [logits])})) == 3
    with refused(ConfigError):
        output_tensors(SimpleNamespace(other=logits))


def test_what_the_users_functions_do_before_the_network_is_told(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "my_way.py").write_text("def doubled(sample, by=2):\n    return sample[0] * by, sample[1]\n")
    words = ["data.val_transform._target_=my_way.doubled", "data.val_transform._partial_=true"]
    assert (
        main([*words, "data.val_transform.by=3", "output_dir=run", "trainer.max_steps=2", "monitor=none"])
        == 0
    )
    capsys.readouterr()
    assert main(["export", "run", "--to", "onnx,huggingface"]) == 0
    assert capsys.readouterr().out.count("data.val_transform") == 1
    told = json.loads(Path("run-export/huggingface/config.json").read_text())["before_network"]
    assert told["data.val_transform"]["by"] == 3
