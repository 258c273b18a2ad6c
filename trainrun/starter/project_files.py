"""The files of a new project: a model, data, an experiment, a notebook and a README. They train without changes."""

from __future__ import annotations

import json
from typing import Any

MODEL = '''\
"""The network: any nn.Module. Its arguments are settings: model.width=64."""

from torch import Tensor, nn


class Net(nn.Module):
    """Classify pictures (B, 1, 16, 16); return one number per class, (B, 3)."""

    def __init__(self, width: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
'''

DATA = '''\
"""The data: a function that returns tensors, or any data set of torch. Arguments are settings: data.train.count=500."""

import torch
from torch import Tensor

CLASSES = ["disk", "square", "cross"]


def shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of shapes (count, 1, 16, 16) and their classes (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    centres = 5 + 6 * torch.rand(count, 2, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    down, right = (rows - centres[:, 0]).abs(), (columns - centres[:, 1]).abs()
    disks = down.square() + right.square() < 14
    squares = torch.maximum(down, right) < 3.5
    crosses = (torch.minimum(down, right) < 1.2) & (torch.maximum(down, right) < 5)
    drawn = torch.stack([disks, squares, crosses], dim=1).float()
    pictures = drawn[torch.arange(count), labels] + 0.2 * torch.randn(count, 16, 16, generator=generator)
    return pictures[:, None], labels
'''

EXPERIMENT = """\
# @package _global_
# The first experiment of this folder: trainrun experiment=first
defaults:
  - override /data: custom
  - override /model: custom
  - override /scheduler: cosine

run_name: first

model:
  _target_: my_model.Net
  width: 16

data:
  batch_size: 64
  train:
    _target_: my_data.shapes
    count: 2000
    seed: 0
  val:
    _target_: my_data.shapes
    count: 500
    seed: 1

optimizer:
  lr: 1.0e-2

trainer:
  max_epochs: 5
"""

COMMANDS = """\
    trainrun experiment=first output_dir=runs/first
    trainrun again runs/first model.width=32 output_dir=runs/wider
    trainrun compare runs/first runs/wider
    trainrun resume runs/first trainer.max_epochs=10
    trainrun evaluate runs/first
"""

README = f"""\
# A training with trainrun

Run these commands in this folder:

{COMMANDS}
| file | content |
| --- | --- |
| `my_model.py` | the network: any `nn.Module` |
| `my_data.py` | the data: a function that returns tensors, or any data set of torch |
| `conf/experiment/first.yaml` | the settings of the first experiment; copy it for the next one |
| `first.ipynb` | the same training in a notebook |

`trainrun help first_run` leads on. `trainrun --help` lists the settings.
"""

NOTEBOOK_CELLS = (
    ("markdown", "# The first experiment\n\nThe settings are in `conf/experiment/first.yaml`."),
    ("code", 'import trainrun\n\nrun = trainrun.train("experiment=first")'),
    ("code", "run  # result, evaluations and curves"),
    (
        "code",
        "from my_data import CLASSES, shapes\n\nmodel = run.load_model()\npictures, labels = shapes(5, seed=2)\n"
        "[(CLASSES[number], CLASSES[label]) for number, label in zip(model(pictures).argmax(1), labels)]",
    ),
)


def build_notebook() -> str:
    """Return the notebook as JSON of nbformat 4.5 (https://nbformat.readthedocs.io)."""
    cells: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(NOTEBOOK_CELLS):
        cell: dict[str, Any] = {"id": f"cell-{number}", "cell_type": kind, "metadata": {}, "source": source}
        cells.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def build_project_files() -> dict[str, str]:
    """Return the text of each file by its path in the project folder."""
    return {
        "my_model.py": MODEL,
        "my_data.py": DATA,
        "conf/experiment/first.yaml": EXPERIMENT,
        "first.ipynb": build_notebook(),
        "README.md": README,
    }
