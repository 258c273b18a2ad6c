"""`parallel=single`: one process on one device, where every exchange returns its input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.errors import TrainrunError
from trainrun.interfaces import StepAgreement
from trainrun.tensors import zero_loss

NO_EXCHANGE: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Single:
    """The backend of `parallel=single`."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    forward_is_collective: bool = False
    shares_folder: bool = True

    def model_init_context(self) -> AbstractContextManager[Any]:
        return NO_EXCHANGE

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def local_model(self, model: nn.Module) -> nn.Module:
        return model

    def adopt_trained(self, model: nn.Module) -> bool:
        return False

    def grad_norm(self, norm: Tensor) -> Tensor:
        return norm

    def reduce_any(self, flag: Tensor) -> Tensor:
        return flag

    def state_dict(self, tree: Any) -> Any:
        return tree

    def load_state_dict(self, tree: Any, like: Mapping[str, Tensor]) -> Any:
        return tree

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def sync_gradients(self, last: bool) -> AbstractContextManager[Any]:
        return NO_EXCHANGE

    def zero_loss(self, model: nn.Module) -> Tensor:
        return zero_loss(model, [param for param in model.parameters() if param.requires_grad])

    def exchange(self) -> None: ...

    def explain_error(self, error: RuntimeError) -> TrainrunError | None:
        return None

    def agree(self, items: int, stop: int, save: int) -> StepAgreement:
        return StepAgreement(float(items), stop, save)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, tensors: Iterable[Tensor]) -> None: ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...
