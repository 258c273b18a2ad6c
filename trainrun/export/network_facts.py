"""The facts of an exported network for programs: `config.json`, and the metadata of weights and graphs."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainrun.config.saved_values import public
from trainrun.config.schema import RunConfig, plain_values
from trainrun.export.served import RealSamples
from trainrun.folder.run_folder import RunDir, read_identity


def describe_network(
    run: RunDir, config: RunConfig, model: nn.Module, samples: RealSamples
) -> dict[str, Any]:
    """Return how the network is built and what goes in, as plain values without what is named like a secret."""
    values, data = plain_values(public(config)[0]), read_identity(run).get("data", {})
    sizes = {
        "in_shape": data.get("shape"),
        **dict.fromkeys(("num_classes", "vocab_size"), data.get("num_classes")),
    }
    node = {name: sizes.get(name) if value is None else value for name, value in values["model"].items()}
    return {
        "architectures": [type(model).__name__],
        "torch_dtype": str(next((p.dtype for p in model.parameters()), "")).removeprefix("torch."),
        "model": node,
        "transform": values["transform"],
        "task": values["task"],
        **({} if samples.untried else describe_inputs(samples, values["data"]["augment"])),
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }


def describe_inputs(samples: RealSamples, augment: dict[str, Any]) -> dict[str, Any]:
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
