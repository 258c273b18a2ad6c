"""`parallel=fsdp`: every rank holds a part of each weight, its gradient and its optimizer state.

What: torch's `fully_shard` (FSDP2). The blocks of the model are wrapped one by one, then the rest. A forward gathers
the weights of one block at a time. The backward reduces each gradient to the rank that updates this part. With
`parallel.replicate` groups of ranks hold the whole model each (HSDP).
When: weights, gradients and moments do not fit on one device. When not: they fit, because ddp sends less.
How: the optimizer, the averages and the checkpoints use plain tensors, the local rows of each weight. They share memory
with torch's DTensors. An update of four small tensors takes 17 us; through DTensors it takes 110 us.
Source: Zhao et al. 2023, arXiv:2304.11277; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainrun.errors import ConfigError, PluginError, TrainrunError
from trainrun.interfaces import TensorShard
from trainrun.parallel.ddp import check_parameters
from trainrun.parallel.deferred_init import DeferredInit, is_deferred
from trainrun.parallel.divided_weights import (
    check_shared_memory,
    find_views,
    overwrite_with_nan,
    retire_tensor,
)
from trainrun.parallel.group import (
    Exchanges,
    Group,
    destroy_group,
    explain_failed_exchange,
    explain_lost_contact,
    is_lost_contact,
    spread_tensors,
)
from trainrun.patterns import match_names
from trainrun.tensors import WHOLE_SHAPE, StoredTensor
from trainrun.transform.blocks import model_blocks

AUTO = "auto"
VIEW_WARNING = "FSDP2-wrapped module"  # how torch's warning begins; `protect_block_output` raises an error
NOTHING: AbstractContextManager[Any] = nullcontext()
Place = tuple[int, str]  # of a parameter: the identity of its module, and its name there


class LocalShard(NamedTuple):
    """The rows of a parameter that this rank holds.

    name: of the parameter in the model. whole: the DTensor parameter of torch. local: a plain parameter with the rows
    of this rank, in the same memory. start: the first of these rows in the whole parameter.
    """

    name: str
    whole: nn.Parameter
    local: nn.Parameter
    start: int


class ParameterExtras(NamedTuple):
    """What user code has added to a parameter: attributes, and hooks of its gradient."""

    attributes: dict[str, Any]
    hooks: Any

    @classmethod
    def from_parameter(cls, param: nn.Parameter) -> ParameterExtras:
        return cls(dict(vars(param)), param._backward_hooks)


class Fsdp:
    """The backend of `parallel=fsdp`. It fills the protocol `Parallel`.

    blocks: patterns of module names, each of which is gathered as a whole; `auto` takes the repeated blocks of the
    model, else the layers of its Sequentials. reshard: whether a block's weights are released between forward and
    backward. replicate: how many copies of the model the ranks hold together. offload: whether shards are kept in
    host memory. meta_device: whether the model is built without memory, so that no rank ever holds it whole.
    """

    forward_is_collective = True

    def __init__(
        self,
        group: Group,
        *,
        reshard: bool = True,
        replicate: int = 1,
        blocks: Any = AUTO,
        offload: bool = False,
        meta_device: bool = False,
    ) -> None:
        if group.world_size % replicate:
            raise ConfigError(
                f"parallel.replicate={replicate}: does not divide the {group.world_size} ranks into equal groups"
            )
        if offload and group.device.type != "cuda":
            raise ConfigError(
                f"parallel.offload=true: moves shards from a GPU to the host, and this run is on {group.device.type}; "
                "use parallel.offload=false"
            )
        self.device, self.rank, self.world_size = group.device, group.rank, group.world_size
        self.local_world_size, self._host = group.local_world_size, group.host
        self.shares_folder = group.shares_folder
        exchanges = Exchanges(group)
        self.agree, self.sum_over_ranks = exchanges.agree, exchanges.sum_over_ranks
        self.gather, self.barrier, self.broadcast = exchanges.gather, exchanges.barrier, exchanges.broadcast
        self._reshard, self._replicate, self._blocks, self._offload = reshard, replicate, blocks, offload
        self._recording = DeferredInit() if meta_device else None
        self._shard_group: dist.ProcessGroup | None = None  # all ranks
        self._writes_shards = True
        self._model: nn.Module | None = None
        self._local_module: nn.Module | None = None
        self._sharded_modules: list[Any] = []  # the blocks, and the model itself
        self._shards: list[LocalShard] = []
        self._by_name: dict[str, LocalShard] = {}
        # by gathered parameter: how often torch saw it changed in place before all forwards, and its name
        self._num_writes: dict[nn.Parameter, tuple[int, str]] = {}
        self._training_outputs: list[Tensor] = []  # of the forwards of a micro-batch

    def model_init_context(self) -> AbstractContextManager[Any]:
        return NOTHING if self._recording is None else self._recording.record_init()

    def wrap(self, model: nn.Module) -> nn.Module:
        check_parameters(model, "fsdp")
        check_weights(model)
        check_shared_memory(model)
        blocks = find_blocks(model, self._blocks)
        check_tied_weights(model, blocks)
        deferred = {name: param for name, param in model.named_parameters() if is_deferred(param)}
        if self._recording is not None:
            self._recording.build_other_tensors(model, self.device)
        tensors = [*model.parameters(), *model.buffers()]
        with explain_lost_contact():
            spread_tensors([tensor for tensor in tensors if not is_deferred(tensor)], self._host)
            classes = {id(module): type(module) for module in model.modules()}
            extras = {
                place: ParameterExtras.from_parameter(param)
                for place, param in parameters_by_place(model).items()
            }
            self._sharded_modules = self._shard_modules(model, blocks)
            for part in self._sharded_modules:
                self._prepare_forward(part, extras)
        for part in self._sharded_modules:
            copy_class_name(type(part), classes[id(part)])
        self._model = model
        self._local_module = build_local_module(model, classes, self._shards)
        self._by_name = map_shards_by_name(model, self._shards)
        self._fill_shards(deferred)
        model.register_forward_hook(self._handle_forward)
        return model

    def _prepare_forward(self, part: Any, extras: Mapping[Place, ParameterExtras]) -> None:
        """Gather the weights of a sharded module once, and give them what user code had added to the parameters."""
        shards = {shard.whole: shard for shard in self._shards}
        sharded = parameters_by_place(part)
        part.unshard()  # torch lays out the shards anew in the first forward otherwise
        weights: list[tuple[nn.Parameter, LocalShard]] = []
        for place, gathered in parameters_by_place(part).items():
            if gathered is not sharded[place]:
                shard = shards[sharded[place]]
                copy_extras(extras[place], gathered, shard)
                weights.append((gathered, shard))
                self._num_writes[gathered] = gathered._version, shard.name
        refuse_first_writes(part, weights, self.reduce_any)
        part.reshard()

    def _fill_shards(self, deferred: Mapping[str, nn.Parameter]) -> None:
        """Write the first values into the shards of weights that were built without memory, one weight at a time."""
        if self._recording is None:
            return
        for name, param in deferred.items():
            shard = self._by_name[name]
            rows = self._recording.build_rows(param, shard.start, shard.start + len(shard.local))
            shard.local.detach().copy_(rows)
            retire_tensor(param, name)
        self._recording = None

    def local_model(self, model: nn.Module) -> nn.Module:
        assert self._local_module is not None, "wrap comes first"
        return self._local_module

    def adopt_trained(self, model: nn.Module) -> bool:
        trained = [shard.whole.requires_grad for shard in self._shards]
        if trained == [shard.local.requires_grad for shard in self._shards]:
            return False
        for shard in self._shards:
            shard.local.requires_grad_(shard.whole.requires_grad)
        return False  # gradients are exchanged in the backward, whatever is trained

    def grad_norm(self, norm: Tensor) -> Tensor:
        squared = norm.to(self.device, torch.float64).square()  # shards may be in host memory
        if self.world_size > 1:
            with explain_lost_contact():
                dist.all_reduce(squared, group=self._shard_group)
        return squared.sqrt().to(norm.device, norm.dtype)

    def reduce_any(self, flag: Tensor) -> Tensor:
        # An exchange of its own: the flag depends on the last reduced gradient, and the update on the flag. The norm
        # of `trainer.gradient_clip_val` has the flag in it, so a run that clips makes no further exchange.
        if self.world_size > 1:
            with explain_lost_contact():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag

    def state_dict(self, tree: Any) -> Any:
        return self._convert_to_shards(tree, None)

    def load_state_dict(self, tree: Any, like: Mapping[str, Tensor]) -> Any:
        return self._convert_to_local_rows(tree, None)

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        with explain_lost_contact():
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def sync_gradients(self, last: bool) -> AbstractContextManager[Any]:
        return self._exchange_after(last)

    def zero_loss(self, model: nn.Module) -> Tensor:
        if not self._training_outputs:
            raise PluginError(
                "task: a batch from which nothing is learned needs a forward of the model, as the other ranks exchange "
                "weights in it; call model(...) in step(), or use parallel=ddp"
            )
        return torch.stack([output.sum().real.float() * 0.0 for output in self._training_outputs]).sum()

    def exchange(self) -> None:
        """Give each local parameter its gradient, which the backward has exchanged. Copy rank 0's buffers."""
        for shard in self._shards:
            grad: Any = shard.whole.grad
            shard.local.grad = None if grad is None else grad._local_tensor
        assert self._model is not None, "wrap comes first"
        spread_tensors(list(self._model.buffers()), self._host)

    def explain_error(self, error: RuntimeError) -> TrainrunError | None:
        if is_lost_contact(error):
            return explain_failed_exchange(error)
        text = str(error)
        if "torch.Tensor and DTensor" in text:
            return PluginError(
                "task or model: computes with weights outside of a call of their module, where each rank has only rows "
                "of them; call the module, as model(...), name modules that are called in parallel.blocks, or use "
                "parallel=ddp"
            )
        if "for storage of size 0" in text:  # a backward found weights that were released again
            return PluginError(
                "task or model: differentiates a gradient (create_graph=True), for which parallel=fsdp does not gather "
                "the weights again; use parallel=ddp"
            )
        return None

    def close(self) -> None:
        destroy_group()

    @contextmanager
    def _exchange_after(self, last: bool) -> Iterator[None]:
        self._training_outputs.clear()
        yield
        self._training_outputs.clear()
        for part in self._sharded_modules:
            part.reshard()
        for param, (version, name) in self._num_writes.items():
            if param._version != version:
                raise changed_weight_error(name)
        if last:
            self.exchange()

    def _handle_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Store the outputs of a training forward. After any other forward, release the gathered weights."""
        if torch.is_grad_enabled():
            self._training_outputs += [tensor for tensor in collect_tensors(output) if tensor.requires_grad]
            return
        for part in self._sharded_modules:
            part.reshard()

    def _shard_modules(self, model: nn.Module, blocks: list[nn.Module]) -> list[Any]:
        """Shard the blocks, then the rest of the model, in place. Return the modules that were sharded."""
        kind, groups = self.device.type, self.world_size // self._replicate
        if self._replicate > 1:
            mesh = init_device_mesh(kind, (self._replicate, groups), mesh_dim_names=("replicate", "shard"))
            self._shard_group = mesh.get_group("shard")
            self._writes_shards = mesh.get_local_rank("replicate") == 0
        else:
            mesh = init_device_mesh(kind, (groups,))
        policy = CPUOffloadPolicy() if self._offload else OffloadPolicy()
        warnings.filterwarnings("ignore", VIEW_WARNING)
        names = {param: name for name, param in model.named_parameters()}
        for view, what in find_views(model):
            retire_tensor(view, what)
        for module in [*blocks, model]:
            module.register_forward_hook(protect_block_output)
            memory = prepare_weights(module, self.device)
            fully_shard(module, mesh=mesh, reshard_after_forward=self._reshard, offload_policy=policy)
            for param, before in memory.items():
                retire_tensor(param, names[param])
                overwrite_with_nan(before)
        rank_in_group = mesh.get_local_rank("shard") if self._replicate > 1 else mesh.get_local_rank()
        self._shards = [
            LocalShard(name, whole, *view_local_rows(whole, groups, rank_in_group))
            for name, whole in model.named_parameters()
        ]
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    def _convert_to_shards(self, tree: Any, shard: LocalShard | None) -> Any:
        """Return the tree with a `TensorShard` for each tensor that is a part of a larger one."""
        if isinstance(tree, Tensor):
            if shard is None or tree.shape != shard.local.shape:
                return tree
            return TensorShard(tree, shard.start, tuple(shard.whole.shape), self._writes_shards)
        return self._map_tree(tree, shard, self._convert_to_shards)

    def _convert_to_local_rows(self, tree: Any, shard: LocalShard | None) -> Any:
        """Return the tree with the rows of this rank of each whole tensor. Rows of stored tensors stay in the files."""
        if not isinstance(tree, Tensor):
            return self._map_tree(tree, shard, self._convert_to_local_rows)
        is_whole = shard is not None and tree.shape == shard.whole.shape
        if shard is None or not is_whole:
            return tree.read() if isinstance(tree, StoredTensor) else tree
        rows = shard.start, shard.start + len(shard.local)
        return tree.narrow_rows(*rows) if isinstance(tree, StoredTensor) else tree[slice(*rows)].clone()

    def _map_tree(self, tree: Any, shard: LocalShard | None, change: Callable[..., Any]) -> Any:
        if isinstance(tree, dict):
            return {key: change(value, self._by_name.get(key, shard)) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)([change(value, shard) for value in tree])
        return tree


class OutputOfBlock(torch.autograd.Function):
    """The identity, whose output is a view that autograd does not allow to be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def protect_block_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the output of a block. If it is a view, a later `output += x` raises an error.

    Such a change would remove the hook by which torch gathers the weights of the block for the backward.
    """
    if isinstance(output, Tensor):
        is_view = torch.is_grad_enabled() and output.requires_grad and output._base is not None
        return OutputOfBlock.apply(output) if is_view else output  # type: ignore[no-untyped-call]
    if type(output) in (tuple, list):
        return type(output)([protect_block_output(module, inputs, part) for part in output])
    if type(output) is dict:
        return {name: protect_block_output(module, inputs, part) for name, part in output.items()}
    return output


def collect_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a model: in containers, and in objects such as dataclasses."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple | list):
        parts: Iterable[Any] = output
    elif isinstance(output, Mapping):
        parts = output.values()
    else:
        parts = getattr(output, "__dict__", {}).values()
    return [tensor for part in parts for tensor in collect_tensors(part)]


def find_blocks(model: nn.Module, patterns: Any) -> list[nn.Module]:
    """Return the modules whose weights are gathered together, none inside another. Raise ConfigError for none."""
    if patterns != AUTO:
        modules = dict(model.named_modules())
        try:
            names = match_names([name for name in modules if name], patterns, "parallel.blocks", "module")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        called = [name for name in names if type(modules[name]).forward is not nn.Module.forward]
        if not called:
            raise ConfigError(
                f"parallel.blocks={names[0]}: is a {type(modules[names[0]]).__name__}, which has no forward; name its "
                f"modules, as '{names[0]}.*'"
            )
        outer = tuple(f"{name}." for name in called)  # a `*` fits the parts of a block too
        return [modules[name] for name in called if not name.startswith(outer)]
    found = model_blocks(model)
    layers = [layer for block in found for layer in block.layers if any(True for _ in layer.parameters())]
    blocks = [block.owner for block in found if not block.layers] or layers
    if not blocks:
        raise ConfigError(
            f"parallel=fsdp: {type(model).__name__} has no repeated blocks, so each rank would gather all of it "
            "at once; name the parts to gather, as parallel.blocks='layers.*'"
        )
    return blocks


def check_weights(model: nn.Module) -> None:
    """Raise ConfigError for weights that torch cannot divide: scalars, complex or sparse ones, or several types."""
    for name, param in model.named_parameters():
        if param.ndim == 0:
            raise ConfigError(
                f"parallel=fsdp: {name} is a single number without rows; give it the shape (1,)"
            )
        if param._post_accumulate_grad_hooks:
            raise ConfigError(
                f"parallel=fsdp: {name} has a register_post_accumulate_grad_hook, and each rank has only rows of the "
                "gradient; use register_hook, or parallel=ddp"
            )
        if param.is_complex():
            raise ConfigError(f"parallel=fsdp: {name} is complex; use two real tensors, or parallel=ddp")
    trained = {param.dtype for param in model.parameters() if param.requires_grad}
    if len(trained) > 1:
        types = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in trained))
        raise ConfigError(
            f"parallel=fsdp: the weights have several types ({types}), and one exchange has one; use one type, or "
            "parallel=ddp"
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"parallel=fsdp: {name} has sparse gradients, which torch cannot divide; use sparse=False"
            )


def check_tied_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise ConfigError for a weight with names in two groups, because only one of these groups would gather it."""
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, nn.Module] = {}
    inside = {id(module): block for block in blocks for module in block.modules()}
    for module in model.modules():
        block = inside.get(id(module), model)
        for name, param in module.named_parameters(recurse=False):
            other = owners.setdefault(param, block)
            if other is not block:
                places = " and ".join(names[each] or "the rest of the model" for each in (other, block))
                raise ConfigError(
                    f"parallel=fsdp: the weight {name} is tied between {places}, which are gathered at different "
                    "times; leave these modules out of parallel.blocks, or use parallel=ddp"
                )


def prepare_weights(module: nn.Module, device: torch.device) -> dict[nn.Parameter, Tensor]:
    """Make the weights of a module contiguous, and allocate those without memory. Sharded weights do not change.

    Return the memory that each weight had.
    """
    changed: dict[nn.Parameter, nn.Parameter] = {}
    memory: dict[nn.Parameter, Tensor] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None or isinstance(param, DTensor):
                continue
            if is_deferred(param):
                if param not in changed:
                    empty = torch.empty(param.shape, dtype=param.dtype, device=device)
                    changed[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
                part._parameters[name] = changed[param]
            elif param not in memory:
                memory[param] = param.detach()
                param.data = param.data.contiguous()
    return memory


def view_local_rows(whole: Any, num_parts: int, part: int) -> tuple[nn.Parameter, int]:
    """Return a plain parameter in the memory of a DTensor's local part, and its first row."""
    local = nn.Parameter(whole._local_tensor.detach(), requires_grad=whole.requires_grad)
    setattr(local, WHOLE_SHAPE, tuple(whole.shape))
    size = -(-whole.shape[0] // num_parts)  # torch.chunk: all but the last parts are of this size
    return local, min(part * size, whole.shape[0])


def parameters_by_place(model: nn.Module) -> dict[Place, nn.Parameter]:
    """Return the parameters by the identity of their module and their name there."""
    return {
        (id(module), name): param
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    }


def copy_extras(extras: ParameterExtras, gathered: nn.Parameter, shard: LocalShard) -> None:
    """Give the parameter that a forward sees the gradient hooks, and each of the three parameters the attributes."""
    # the same object, so that the handle of a hook removes it here too
    gathered._backward_hooks = extras.hooks
    for param in (gathered, shard.whole, shard.local):
        vars(param).update(extras.attributes)


def refuse_first_writes(
    part: nn.Module,
    weights: Sequence[tuple[nn.Parameter, LocalShard]],
    reduce_any: Callable[[Tensor], Tensor],
) -> None:
    """Let the first forward of a sharded module raise PluginError if it changes the values of its gathered weights.

    Writes into a tensor are found in every step, because torch counts them. Torch does not count writes into
    `weight.data`. Each rank compares its rows, and all ranks raise the same error.
    """

    def check_values(part: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        handle.remove()
        differs = [float(not has_rows(param, shard)) for param, shard in weights]
        flags = reduce_any(torch.tensor(differs, device=weights[0][0].device)).tolist()
        for flag, (_, shard) in zip(flags, weights, strict=True):
            if flag:
                raise changed_weight_error(shard.name)

    if weights:
        handle = part.register_forward_hook(check_values, prepend=True)


def changed_weight_error(name: str) -> PluginError:
    return PluginError(
        f"model: the weight {name} is changed in the forward, and parallel=fsdp would lose the change; compute the "
        "changed weight as a new tensor, or use parallel=ddp"
    )


def has_rows(gathered: nn.Parameter, shard: LocalShard) -> bool:
    """Return whether a gathered parameter has the values of the shard in its rows, or NaN for NaN."""
    rows = gathered.detach()[shard.start : shard.start + len(shard.local)]
    local = shard.local.detach().to(rows.device)
    return bool(((rows == local) | (rows != rows) & (local != local)).all())


def copy_class_name(kind: type, original: type) -> None:
    """Give a class that torch derived the name of the original class, which messages and checks use."""
    kind.__name__, kind.__qualname__ = original.__name__, original.__qualname__
    kind.__module__ = original.__module__


def build_local_module(
    model: nn.Module, classes: Mapping[int, type], shards: Sequence[LocalShard]
) -> nn.Module:
    """Return a module of the same structure whose parameters are the local ones. Buffers are the same objects.

    Its forward is never called. classes: the classes of the modules before they were sharded, by identity.
    """
    local = {id(shard.whole): shard.local for shard in shards}
    copies: dict[int, nn.Module] = {}

    def copy_of(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            copy: Any = object.__new__(classes[id(module)])
            copies[id(module)] = copy
            vars(copy).update(vars(module))
            params = {
                name: param if param is None else local[id(param)]
                for name, param in module._parameters.items()
            }
            children = {
                name: child if child is None else copy_of(child) for name, child in module._modules.items()
            }
            vars(copy).update(_parameters=params, _modules=children)
        return copies[id(module)]

    return copy_of(model)


def map_shards_by_name(model: nn.Module, shards: Sequence[LocalShard]) -> dict[str, LocalShard]:
    """Return the shards by every name of their parameters."""
    by_whole = {id(shard.whole): shard for shard in shards}
    return {name: by_whole[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
