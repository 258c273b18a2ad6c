"""Sparse gradients of embeddings: which optimizers take them, one for all parameters or one of several by name."""

from __future__ import annotations

import pytest
import torch
from approved import refused
from torch import Tensor

import trainrun
from tests.quiet_runs import QUIET, resumable, weights
from trainrun.errors import ConfigError, PluginError

OWN = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, sparse=True, functional=False, alone=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 3 if alone else 8, sparse=sparse and not functional)
        self.last = nn.Identity() if alone else nn.Linear(8, 3)
        self.functional = functional

    def forward(self, x):
        tokens = (x.abs().clamp(max=2) * 4).long()
        h = F.embedding(tokens, self.table.weight, sparse=True) if self.functional else self.table(tokens)
        return self.last(h.mean(1))

def points(n=40):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)
"""
WORDS = (*QUIET, "model=own.Net", "data.train=own.points", "data.val=own.points", "data.batch_size=8",
         "trainer.max_epochs=2")  # fmt: skip
SEVERAL = (
    "optimizer=custom", "optimizer.sparse._target_=torch.optim.SparseAdam", "optimizer.sparse.params=[table.weight]",
    "optimizer.sparse.lr=0.05", "optimizer.dense._target_=torch.optim.AdamW", "optimizer.dense.params=[last.*]",
    "optimizer.dense.lr=0.01",
)  # fmt: skip


def trained(name: str, *words: str) -> dict[str, Tensor]:
    return weights(str(trainrun.train(*WORDS, f"hydra.run.dir={name}", *words).folder))


@pytest.mark.train
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.functional=true",),
        ("optimizer=custom", "optimizer._target_=torch.optim.RMSprop"),
        ("optimizer=custom", "optimizer._target_=torch.optim.SparseAdam"),
        ("optimizer=custom", "optimizer._target_=torch.optim.SparseAdam", "model.functional=true"),
        ("optimizer=custom", "optimizer._target_=torch.optim.Adagrad", "optimizer.weight_decay=0.1"),
    ],
)
def test_an_optimizer_without_a_way_for_them_is_refused_by_the_parameters_name(
    own: None, words: tuple[str, ...]
) -> None:
    with refused(PluginError, "table.weight"):
        trained("run", *words)


@pytest.mark.train
def test_the_message_names_two_optimizers_that_work(own: None) -> None:
    with pytest.raises(PluginError) as caught:
        trained("run")
    words = [
        word for word in str(caught.value).split() if word.startswith("optimizer") and "_target_" in word
    ]
    params = [word for word in str(caught.value).split() if ".params=" in word]
    trained("advised", "optimizer=custom", *words, *params)


@pytest.mark.train
def test_sparse_adam_refuses_a_model_without_sparse_gradients(own: None) -> None:
    with refused(PluginError):
        trained("run", "model.sparse=false", "optimizer=custom", "optimizer._target_=torch.optim.SparseAdam")


@pytest.mark.train
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad in torch
@pytest.mark.parametrize(
    "words",
    [
        ("model.alone=true", "optimizer=custom", "optimizer._target_=torch.optim.SparseAdam"),
        ("optimizer=sgd",),
        ("optimizer=sgd", "optimizer.momentum=0", "trainer.gradient_clip_val=0.1"),
        ("optimizer=custom", "optimizer._target_=torch.optim.Adagrad"),
        (*SEVERAL, "trainer.gradient_clip_val=0.1"),
        (*SEVERAL, "trainer.accumulate_grad_batches=2", "trainer.ema=true"),
        (*SEVERAL, "precision=bf16-mixed", "scheduler=custom", "scheduler._target_=torch.optim.lr_scheduler.StepLR",
         "scheduler.step_size=2"),
        (*SEVERAL, "model.functional=true", "scheduler=custom", "+scheduler.dense._target_="
         "torch.optim.lr_scheduler.StepLR", "+scheduler.dense.step_size=2"),
    ],
)  # fmt: skip
def test_they_train_and_resume(own: None, words: tuple[str, ...]) -> None:
    run = resumable(*(word for word in WORDS if "epochs" not in word), *words)
    start = trained(
        "start", *words[:2] if words[0].startswith("model") else (), "optimizer=sgd", "trainer.max_steps=0"
    )
    for name, value in weights(run).items():
        if name in start:
            assert not torch.equal(value, start[name])


@pytest.mark.train
def test_two_optimizers_without_a_step_update_as_two_of_torch(own: None) -> None:
    found = trained("run", *SEVERAL, "data.shuffle=false")
    import own as module

    model, (x, y) = module.Net(), module.points()
    optimizers = (
        torch.optim.SparseAdam([model.table.weight], lr=0.05),
        torch.optim.AdamW(model.last.parameters(), lr=0.01),
    )
    for _ in range(2):
        for first in range(0, 40, 8):
            loss = torch.nn.functional.cross_entropy(model(x[first : first + 8]), y[first : first + 8])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.train
@pytest.mark.parametrize("word", ["trainer.compile=step", "parallel=ddp"])
def test_what_does_not_go_with_optimizers_by_name_is_refused(own: None, word: str) -> None:
    with refused(ConfigError):
        trained("run", *SEVERAL, word)
