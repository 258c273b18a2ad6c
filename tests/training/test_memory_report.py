"""What a report says of the memory of a model: every byte once, by module and kind."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainrun.folder.run_folder import read_json
from trainrun.training.recovery.memory_report import KINDS, write_memory_report


def test_every_byte_is_counted_once_under_its_module(tmp_path: Path):
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(10, 4))
    model.add_module("blocks", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model.add_module("head", nn.Linear(4, 10, bias=False))
    model.head.weight = model.embed.weight  # tied
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    line = write_memory_report(
        tmp_path / "memory.json", model, [optimizer.state], torch.device("cpu"), "backward"
    )
    report = read_json(tmp_path / "memory.json")
    assert report["phase"] == "backward"
    parameters = list(model.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    assert report["bytes"]["weights"] == report["bytes"]["gradients"] == weights
    assert report["bytes"]["optimizer"] == 2 * weights + 4 * len(parameters)  # with the count of steps
    assert report["bytes"]["buffers"] == sum(buffer.nbytes for buffer in model.buffers())
    assert next(iter(report["modules"])) == "embed"  # the largest; its tied weight is not the head's again
    assert set(report["modules"]) == {"embed", "blocks.0", "blocks.1"}
    assert report["bytes"] == {kind: sum(held[kind] for held in report["modules"].values()) for kind in KINDS}
    assert str(tmp_path / "memory.json") in line
