"""What the reference networks take by name; no torch here, so that a wrong name is found before anything starts."""

from __future__ import annotations

ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
NORMS = ("none", "batch", "layer")
SCHEMES = ("default", "he", "xavier")
RESNET_SIZES = ("18", "34", "50")
STEMS = ("auto", "small", "large")
BODIES = ("auto", "conv", "mlp")
GPT_SIZES = ("0.8M", "3M", "11M", "25M", "124M")
POSITIONS = ("rotary", "learned")
KERNELS = ("auto", "flash", "fp32", "plain", "math")
OUTPUTS = ("each", "last")

CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "trainrun.model.mlp.Mlp": {"activation": ACTIVATIONS, "norm": NORMS, "init": SCHEMES},
    "trainrun.model.cnn.Cnn": {"norm": NORMS, "init": SCHEMES},
    "trainrun.model.resnet.ResNet": {"size": RESNET_SIZES, "stem": STEMS, "norm": NORMS, "init": SCHEMES},
    "trainrun.model.vae.Vae": {"body": BODIES, "init": SCHEMES},
    "trainrun.model.gpt.Gpt": {"size": GPT_SIZES, "positions": POSITIONS, "attention": KERNELS},
    "trainrun.model.lstm.Lstm": {"outputs": OUTPUTS},
}
