"""What the reference networks take by name; no torch here, so that a wrong name is found before anything starts."""

from __future__ import annotations

ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
NORMS = ("none", "batch", "layer")
SCHEMES = ("default", "he", "xavier")

CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "trainrun.model.mlp.Mlp": {"activation": ACTIVATIONS, "norm": NORMS, "init": SCHEMES},
    "trainrun.model.cnn.Cnn": {"norm": NORMS, "init": SCHEMES},
}
