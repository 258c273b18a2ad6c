"""What an exported network says of itself: `config.json`, metadata, and the card for people."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from torch import nn

from trainrun.checkpoint.load import resolve
from trainrun.checkpoint.save import step_of
from trainrun.config.saved_values import public
from trainrun.config.schema import RunConfig, plain
from trainrun.export.served import RealSamples
from trainrun.monitor.metric_rows import read_rows
from trainrun.runs.run_folder import RunDir, read_identity, read_json
from trainrun.runs.status import read_status


def about_network(run: RunDir, config: RunConfig, model: nn.Module, samples: RealSamples) -> dict[str, Any]:
    """How the network is built and what goes in. Plain values, without what is named like a secret."""
    values, data = plain(public(config)[0]), read_identity(run).get("data", {})
    told = {
        "in_shape": data.get("shape"),
        **dict.fromkeys(("num_classes", "vocab_size"), data.get("num_classes")),
    }
    node = {name: told.get(name) if value is None else value for name, value in values["model"].items()}
    return {
        "architectures": [type(model).__name__],
        "torch_dtype": str(next((p.dtype for p in model.parameters()), "")).removeprefix("torch."),
        "model": node,
        "transform": values["transform"],
        "task": values["task"],
        **({} if samples.untried else about_inputs(samples, values["data"]["augment"])),
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }


def about_inputs(samples: RealSamples, augment: dict[str, Any]) -> dict[str, Any]:
    served, first, scale = samples.served, samples.inputs[0][0], samples.served.scale
    names = [key.removeprefix("data.augment.") for key, _, _ in served.changes]
    return {
        "inputs": samples.names,
        "input_shape": ["batch", *first.shape[1:]],
        "input_dtype": str(first.dtype).removeprefix("torch."),
        "input_scaling": {
            **({} if scale is None else {"divide_by": 255, "mean": scale.mean, "std": scale.std}),
            **{name: augment[name] for name in names},
        },
    }


def card_text(run: RunDir, which: str, about: dict[str, Any]) -> str:
    """The README of a model's folder, with the metrics that were measured."""
    metrics = measured(run, which)
    rows = "\n".join(f"| {name} | {value:.5g} |" for name, value in metrics.items()) or "| none | |"
    inputs = ""
    if "inputs" in about:
        scaling = json.dumps(about["input_scaling"]) if about["input_scaling"] else "none"
        inputs = f"""
Inputs: {", ".join(about["inputs"])}; the first has the shape {about["input_shape"]} and the type
{about["input_dtype"]} as it lies in memory. Before the network: {scaling}. """
    for key, node in about.get("before_network", {}).items():
        inputs += f"\nSamples must go through `{key}` before, which is not part of the network: `{json.dumps(node)}`. "
    return f"""---
library_name: pytorch
tags:
- trainrun
---

# {about["architectures"][0]}

A `{about["model"].get("_target_", "")}` of {about["num_parameters"]:,} parameters, trained with trainrun for the task
`{about["task"].get("_target_", "")}`; the checkpoint is `{which}`.

| metric | value |
| --- | --- |
{rows}
{inputs}
The weights are those of the network alone.

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"))  # built as `model` in config.json says
```
"""


def measured(run: RunDir, which: str) -> dict[str, float]:
    """The metrics of this checkpoint: of the validation at its step, and of `trainrun evaluate`."""
    checkpoint, status = resolve(run.checkpoints, which).name, read_status(run)
    step, found = step_of(checkpoint), dict[str, Any]()
    for row in read_rows(run.metrics) if run.metrics.is_file() else ():
        if row["kind"] == "eval" and row["step"] == step:
            found |= {
                name: value
                for name, value in row.items()
                if "/" in name and not name.startswith("train/") and not name.endswith("/seconds")
            }
    if status.get("step") == step:
        found |= status.get("metrics") or {}
    for path in sorted(run.root.glob("evaluation-*.json")):
        with contextlib.suppress(OSError, ValueError):
            told = read_json(path)
            found |= told if told.get("checkpoint") == checkpoint else {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
