"""`parallel=ddp`: every rank holds the whole model and sees its own micro-batches.

What: torch's DistributedDataParallel; gradients are averaged once per step, while the backward pass still runs.
    When: the model fits on one device. When not: on a CPU with few cores, where one process with all threads is as
    fast.
Source: Li et al. 2020, arXiv:2006.15704.

Two things differ from torch's default, so that a resumed run has the same bits:

- DDP rebuilds its buckets after the first step, in the order in which gradients came. With three ranks or more,
  other buckets sum in another order. `fix_buckets` rebuilds them before the first step.
- DDP copies rank 0's buffers (BatchNorm's averages) to all ranks before the *next* forward. Validation and averaged
  weights would see other buffers than a checkpoint holds. Here every step ends with that copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from trainrun.errors import ConfigError, PluginError, TrainrunError
from trainrun.parallel.group import (
    Exchanges,
    Group,
    destroy_group,
    explain_failed_exchange,
    is_lost_contact,
    spread_tensors,
)
from trainrun.tensors import zero_loss

TORCH_BUCKET_MB = 25.0
# the copy of buffers is ours: see above; torch 2.13 has a new word for it and warns of the old one
NEW_WORD = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if NEW_WORD else "broadcast_buffers": False}

FEW_NAMES = 5


class Ddp:
    """The backend of `parallel=ddp`. The arguments are the fields of the config section `parallel`."""

    forward_is_collective = False

    def __init__(
        self,
        group: Group,
        *,
        sync_batchnorm: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float = TORCH_BUCKET_MB,
        compress: str = "none",
    ) -> None:
        if sync_batchnorm and group.device.type != "cuda":
            raise ConfigError(
                f"parallel.sync_batchnorm=true: needs CUDA, and this run is on {group.device.type}; "
                "use parallel.sync_batchnorm=false, or parallel.accelerator=cuda"
            )
        self.device, self.rank, self.world_size = group.device, group.rank, group.world_size
        self.local_world_size, self._host = group.local_world_size, group.host
        self.shares_folder = group.shares_folder
        self._sync_batchnorm = sync_batchnorm
        # torch keeps a small first bucket, so that sending starts early, only while its size is not given
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": None if bucket_cap_mb == TORCH_BUCKET_MB else bucket_cap_mb,
        }
        self._compress = compress
        self._ddp: DistributedDataParallel | None = None
        self._trained: set[nn.Parameter] = set()
        self._has_buffers = False
        self._learns_graph = static_graph
        exchanges = Exchanges(group)
        self.agree, self.sum_over_ranks = exchanges.agree, exchanges.sum_over_ranks
        self.gather, self.barrier, self.broadcast = exchanges.gather, exchanges.barrier, exchanges.broadcast

    def model_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wrap(self, model: nn.Module) -> nn.Module:
        check_parameters(model)
        if self._sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        device_ids = [self.device] if self.device.type == "cuda" else None
        with self._explain_ddp_errors():
            if self._ddp is None:
                ddp = DistributedDataParallel(model, device_ids=device_ids, **OWN_BUFFERS, **self._options)
            else:  # the object that the run calls stays the same, with buckets of other parameters
                ddp = self._ddp
                ddp.__init__(model, device_ids=device_ids, **OWN_BUFFERS, **self._options)  # type: ignore[misc]
            if self._compress == "bf16":
                # torch refuses its hook by its name without CUDA, where gloo can do the same
                ddp.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(None, bucket))  # type: ignore[arg-type]
            self._learns_graph = self._options["static_graph"]
            self._has_buffers = any(True for _ in model.buffers())
            self._ddp = ddp
            self._trained = {param for param in ddp.module.parameters() if param.requires_grad}
            self._broadcast_buffers()
            if not self._finds_buckets_in_backward:
                fix_buckets(ddp)
        return ddp

    def local_model(self, model: nn.Module) -> nn.Module:
        return model

    def adopt_trained(self, model: nn.Module) -> bool:
        trained = {param for param in model.parameters() if param.requires_grad}
        if self._ddp is None or trained == self._trained:
            return False
        grads = {param: param.grad for param in model.parameters()}
        modes = {layer: layer.training for layer in self._ddp.modules()}
        self.wrap(self._ddp.module)
        if not self._finds_buckets_in_backward:
            self._ddp.reducer._rebuild_buckets()  # as the next forward would, for an exchange before it
        for layer, mode in modes.items():
            layer.training = mode
        for param, grad in grads.items():
            param.grad = grad
        return True

    # after the exchange every rank holds the same gradients, and all of the state
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
        if self._learns_graph:  # torch fails where the first backward of a static graph exchanges nothing
            self._learns_graph, last = False, True
        return self._sync_last_backward() if last else self._skip_sync()

    def zero_loss(self, model: nn.Module) -> Tensor:
        assert self._ddp is not None, "wrap comes first"
        loss = zero_loss(model, [param for param in model.parameters() if param.requires_grad])
        if self._ddp.require_backward_grad_sync:
            self._ddp.reducer.prepare_for_forward()
            self._ddp.reducer.prepare_for_backward([loss])
        return loss

    @property
    def _finds_buckets_in_backward(self) -> bool:
        """Return whether torch determines the buckets from the backward pass."""
        return bool(self._options["find_unused_parameters"] or self._options["static_graph"])

    def exchange(self) -> None:
        assert self._ddp is not None, "wrap comes first"
        trained = [param for param in self._ddp.module.parameters() if param.requires_grad]
        there = [param for param in trained if param.grad is not None]
        if len(there) < len(trained) and not self._options["find_unused_parameters"]:
            raise missing_gradient_error(self._ddp.module)
        with self._explain_ddp_errors():
            run_backward_of_zeros(self._ddp, there)
            self._broadcast_buffers()

    def explain_error(self, error: RuntimeError) -> TrainrunError | None:
        return None  # `_explain_ddp_errors` has done so

    def close(self) -> None:
        destroy_group()

    @contextmanager
    def _sync_last_backward(self) -> Iterator[None]:
        with self._explain_ddp_errors():
            yield
            if not self._finds_buckets_in_backward:
                assert self._ddp is not None, "wrap comes first"
                # Raises where a parameter had no gradient: its whole bucket was not exchanged. Torch looks at the
                # next forward alone, when the step was taken, and perhaps saved.
                self._ddp.reducer._rebuild_buckets()
            self._broadcast_buffers()

    @contextmanager
    def _skip_sync(self) -> Iterator[None]:
        assert self._ddp is not None, "wrap comes first"
        with self._explain_ddp_errors(), self._ddp.no_sync():
            yield

    @contextmanager
    def _explain_ddp_errors(self) -> Iterator[None]:
        """Turn errors that DDP raises in forward and backward into errors with advice."""
        try:
            yield
        except AttributeError as error:
            if "'DistributedDataParallel' object" not in str(error):
                raise
            raise PluginError(
                f"task: {error}: ranks exchange the gradients of calls of the whole model, model(...); move what calls "
                "a part of it into its forward, or use parallel=single"
            ) from error
        except RuntimeError as error:
            if is_lost_contact(error):
                raise explain_failed_exchange(error) from error
            if "Expected to have finished reduction in the prior iteration" in str(error):
                assert self._ddp is not None, "wrap comes first"
                raise missing_gradient_error(self._ddp.module) from error
            raise

    def _broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, with one broadcast per device and dtype."""
        if self._has_buffers:
            assert self._ddp is not None
            spread_tensors(list(self._ddp.module.buffers()), self._host)


def missing_gradient_error(model: nn.Module) -> PluginError:
    """Return the error that names the trained parameters that got no gradient."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = [name for name, param in trained.items() if param.grad is None]
    names = ", ".join(missing[:FEW_NAMES]) + (", ..." if len(missing) > FEW_NAMES else "")
    if 2 * len(missing) > len(trained):
        way_out = (
            "most of the model is not trained. A block under torch.utils.checkpoint with use_reentrant=True gets no "
            "gradients where its input needs none: say use_reentrant=False. Else look for detach() and torch.no_grad()"
        )
    else:
        way_out = "use them in the loss, freeze them, or set parallel.find_unused_parameters=true"
    return PluginError(
        f"model: {len(missing)} of {len(trained)} trained tensors got no gradient in the last step, and the ranks wait "
        f"for them ({names}): {way_out}"
    )


def check_parameters(model: nn.Module, mode: str = "ddp") -> None:
    """Raise PluginError for a model that ranks cannot share: without parameters, or with lazy ones."""
    name = type(model).__name__
    parameters = list(model.parameters())
    if not parameters:
        raise PluginError(f"model: {name} has no parameters, so there is nothing to train")
    if any(is_lazy(parameter) for parameter in parameters):
        raise PluginError(
            f"model: {name} has parameters whose shape is not known yet; parallel={mode} needs the shapes, "
            "so name the sizes of its lazy layers, or use parallel=single"
        )
    if any(buffer.layout is not torch.strided for buffer in model.buffers()):
        raise PluginError(
            f"model: {name} has sparse buffers, which ranks cannot exchange; store indices and values as dense "
            "buffers, or use parallel=single"
        )
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise PluginError(
                f"model: max_norm={module.max_norm:g} of {module_name or name} changes in each forward the rows of "
                "a rank's own batch, so the ranks would differ; leave out max_norm, or use parallel=single"
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise PluginError(f"model: no parameter of {name} needs a gradient, so there is nothing to train")


def fix_buckets(ddp: DistributedDataParallel) -> None:
    """Run one backward pass of zeros over all parameters, so that DDP's buckets do not change later.

    DDP rebuilds its buckets once, at the forward after the first exchange, in the order in which the gradients came.
    Here that order is the reverse of `parameters()` in every run, new or resumed. No random number is drawn and no
    forward runs. With `find_unused_parameters` DDP never rebuilds. With `static_graph` it must learn the graph from
    the first real step, and a resume with three ranks or more then rounds differently.
    """
    run_backward_of_zeros(
        ddp, [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    )
    ddp.reducer._rebuild_buckets()  # else the next forward does, which a rank with nothing to learn leaves out
    for parameter in ddp.module.parameters():
        parameter.grad = None


def run_backward_of_zeros(ddp: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Add 0 to the gradients of `parameters` by a backward pass, which makes DDP average all gradients."""
    total = zero_loss(ddp.module, parameters)
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([total])
    total.backward()  # type: ignore[no-untyped-call]
