"""Build a model on the meta device, so that its tensors can be made later, one at a time, with the same bits.

What: a dispatch mode for the time in which a model is built. Large tensors have no memory then. Each operation that
    writes into them is recorded, with the state of the random generator before it. `build_tensor` repeats the
    operations that a tensor depends on, and no others.
When: a model does not fit into the memory of one process (`parallel.meta_device=true`).
When not: it fits. Random numbers are drawn twice: while the model is built, so that the generator moves as it does
    in one process, and when the tensor is made.
How: a storage is the unit. Views need no record, since a tensor is a window (shape, strides, offset) on its storage.
    If the constructor reads a value, as `float(tensor.max())`, the tensor is built for that moment. Tensors below
    `LARGE_BYTES` are ordinary ones.
Source: the deferred initialization of torchdistx, which records in C++ and repeats in the order of the recording.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.errors import ConfigError, PluginError
from trainrun.tensors import StoredTensor, map_tree_leaves

LARGE_BYTES = 1 << 16
META, HOST = torch.device("meta"), torch.device("cpu")
# Operations in place that read nothing of the tensor that they write.
OVERWRITING = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_",
               "geometric_"}  # fmt: skip
OF_TORCH = ("_parameters", "_buffers", "_modules")  # attributes of a module
RANDOM = torch.Tag.nondeterministic_seeded
# Positions of arguments that an operation writes although its schema does not say so: the running statistics.
UNDECLARED_WRITES = {torch.ops.aten.native_batch_norm.default: (3, 4)}
WITHOUT_MEMORY = ("meta", "subclass", "incompatible tensor type")  # words of torch's errors, in lower case


class DeferredTensor(Tensor):
    """A tensor on the meta device, which says that it is on the host, but not to the functions that compute shapes.

    Otherwise torch.nn.init would leave the tensor as it is, and a constructor that compares devices would differ.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    computes_shapes = False

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return DeferredTensor.computes_shapes

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return not DeferredTensor.computes_shapes

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return META if DeferredTensor.computes_shapes else HOST

    def new_tensor(self, data: Any, *, dtype: Any = None, **options: Any) -> Tensor:  # type: ignore[override]
        """Return a tensor with memory. Torch's own method shows no operation to a recording."""
        return torch.tensor(data, dtype=dtype or self.dtype, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PluginError(
            "parallel.meta_device=true: the model's constructor saves a tensor, which has no memory yet; use "
            "parallel.meta_device=false"
        )

    @staticmethod
    def __new__(cls, tensor: Tensor) -> DeferredTensor:
        deferred: DeferredTensor = Tensor._make_subclass(cls, tensor, tensor.requires_grad)
        return deferred

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the shape of a result. Outside of a recording, raise PluginError for all but views."""
        if not (cls.computes_shapes or is_view(function)):
            raise PluginError(
                "parallel.meta_device=true: a tensor that the model's constructor made is used outside of the model's "
                "parameters, buffers and attributes; register it as a buffer, or use parallel.meta_device=false"
            )
        with torch._C._DisableTorchDispatch():
            result = function(*args, **(kwargs or {}))
        return result if cls.computes_shapes else map_tree_leaves(result, wrap_deferred)


class Window(NamedTuple):
    """A tensor without memory: a view of a storage. storage: the number of the storage in the recording."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def covers_storage(self) -> bool:
        """Return whether writing all elements writes every byte of the storage."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size == self.num_bytes and 0 not in self.strides


class Constant(NamedTuple):
    """A tensor with memory that an operation reads. checksum: of its bytes when it was recorded; None if stored."""

    tensor: Tensor
    checksum: int | None


class Operation(NamedTuple):
    """A recorded call. reads, writes: storages by number. outputs: the windows of the results.

    random: the generator of the call and its state before the call; None if nothing is drawn. default_dtype: torch's
    at the time of the call.
    """

    function: Any
    args: Any
    kwargs: Any
    outputs: list[Window]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: bool
    random: tuple[torch.Generator, Tensor] | None
    default_dtype: torch.dtype


Storages = dict[int, torch.UntypedStorage]


class DeferredInit(TorchDispatchMode):
    """The recording of how a model is built, and the mode that records."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Operation] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)  # numbers of operations by storage
        self._numbers: dict[int, int] = {}  # of storages, by the identity of torch's object
        self._owners: list[Tensor] = []  # one tensor for each storage, so that no identity is used twice

    @contextmanager
    def record_init(self) -> Iterator[None]:
        """Record the calls of the block. Raise ConfigError if the block reads memory that a deferred tensor has not."""
        try:
            with self:
                yield
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if not any(word in str(error).lower() for word in WITHOUT_MEMORY):
                raise
            raise ConfigError(
                f"parallel.meta_device=true: the model cannot be built without memory ({error}); use "
                "parallel.meta_device=false"
            ) from error

    def build_other_tensors(self, model: nn.Module, device: torch.device) -> None:
        """Give memory to what is no parameter: buffers, and tensors in attributes of modules, lists and dicts.

        A parameter in an attribute, or a view of one, stays without memory. It would not follow the training.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            check_memory(tensor)
        built: dict[int, Tensor] = {}
        weights = {param.untyped_storage()._cdata for param in model.parameters()}

        def allocate_memory(leaf: Any) -> Any:
            if not is_deferred(leaf) or leaf.untyped_storage()._cdata in weights:
                return leaf
            if id(leaf) not in built:
                built[id(leaf)] = self.build_tensor(leaf).to(device)
            return built[id(leaf)]

        for module in model.modules():
            module._buffers.update(map_tree_leaves(dict(module._buffers), allocate_memory))
            attributes = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
            for name, value in attributes.items():
                if any(map(is_deferred, find_tensors(value))):
                    vars(module)[name] = map_tree_leaves(value, allocate_memory)

    def build_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor with memory on the host, as an undeferred constructor would have made it."""
        return self._build(self._window(tensor), len(self._operations))

    def build_rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return some rows of `build_tensor`. If the tensor was loaded from a file, no other rows are read."""
        window = self._window(tensor)
        writers = self._writers[window.storage]
        last = self._operations[writers[-1]] if writers else None
        if last is not None and last.overwrites and last.args and last.args[0] == window:
            source = last.args[1].tensor if isinstance(last.args[-1], Constant) else None
            if isinstance(source, StoredTensor) and source.shape == tensor.shape:
                return source.read(start, stop).to(tensor.dtype)
        return self._build(window, len(self._operations))[start:stop].clone()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not any(map(is_deferred, find_tensors((args, kwargs)))):
            return self._create(function, args, kwargs)
        if must_compute(function, args, kwargs):
            return self._call_with_memory(function, args, kwargs)
        shapes = map_tree_leaves((args, replace_device(kwargs, META)), convert_to_meta_tensor)
        arguments = self._convert_for_recording((args, kwargs))
        DeferredTensor.computes_shapes = True
        try:
            result = function(*shapes[0], **shapes[1])
            has_storage = all(leaf.layout == torch.strided for leaf in find_tensors(result))
        except NotImplementedError:  # the shape is not known without the values
            if written_arguments(function, args, kwargs):
                raise
            has_storage = False
        finally:
            DeferredTensor.computes_shapes = False
        if not has_storage:
            return self._call_with_memory(function, args, kwargs)
        random = self._advance(function, args, kwargs)
        result = map_tree_leaves(result, wrap_deferred)
        self._record(function, arguments, args, kwargs, result, random)
        return result

    def _call_with_memory(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs, options = map_tree_leaves((args, replace_device(kwargs, HOST)), self._allocate_memory)
        return function(*inputs, **options)

    def _create(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that has no deferred arguments. The result is deferred if it is large and new."""
        takes_device = any(argument.name == "device" for argument in function._schema.arguments)
        if not takes_device or find_tensors((args, kwargs)):
            return function(*args, **kwargs)
        device = torch.device(kwargs.get("device") or HOST)
        if (
            device == META
        ):  # a part of an operation with a deferred tensor, as the number in `weight[mask] = number`
            kwargs, device = replace_device(kwargs, HOST), HOST
        if device != HOST:
            return function(*args, **kwargs)
        result = function(*args, **kwargs | {"device": META})
        if not isinstance(result, Tensor) or result.nbytes < LARGE_BYTES:
            return function(*args, **kwargs)
        result = wrap_deferred(result)
        random = self._advance(function, args, kwargs)
        self._record(function, (args, kwargs), args, kwargs, result, random)
        return result

    def _advance(self, function: Any, args: Any, kwargs: Any) -> tuple[torch.Generator, Tensor] | None:
        """Draw the random numbers of a call and drop them. Return the generator and its state before that."""
        if RANDOM not in function.tags:
            return None
        generator = kwargs.get("generator")
        if generator is None:
            generator = next(
                (arg for arg in args if isinstance(arg, torch.Generator)), torch.default_generator
            )
        state = generator.get_state()
        if is_overwriting(function):
            scratch = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
            function(scratch, *args[1:], **kwargs)
        else:
            self._call_with_memory(function, args, kwargs)
        return generator, state

    def _record(
        self, function: Any, arguments: Any, args: Any, kwargs: Any, result: Any, random: Any
    ) -> None:  # fmt: skip
        outputs = [self._window(leaf) for leaf in find_tensors(result)]
        inputs = [self._window(leaf) for leaf in find_tensors((args, kwargs)) if is_deferred(leaf)]
        reads = {window.storage for window in inputs}
        new = {window.storage for window in outputs} - reads
        written = [self._window(leaf) for leaf in written_arguments(function, args, kwargs)]
        writes = new | {window.storage for window in written}
        if not writes or function is torch.ops.aten.empty.memory_format:
            return  # a view, or memory without values
        overwrites = not written
        if len(written) == 1 and is_overwriting(function) and written[0].covers_storage():
            others = [leaf for leaf in find_tensors((args[1:], kwargs)) if is_deferred(leaf)]
            reads, overwrites = {self._window(leaf).storage for leaf in others}, True
            overwrites = written[0].storage not in reads
        for storage in writes:
            self._writers[storage].append(len(self._operations))
        recorded_args, recorded_kwargs = arguments
        self._operations.append(
            Operation(function, recorded_args, recorded_kwargs, outputs, frozenset(reads), frozenset(writes),
                      overwrites, random, torch.get_default_dtype())
        )  # fmt: skip

    def _convert_for_recording(self, tree: Any) -> Any:
        """Return arguments for the recording: windows for deferred tensors, `Constant` for others."""

        def recorded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if is_deferred(leaf):
                return self._window(leaf)
            check_memory(leaf)
            if isinstance(leaf, StoredTensor):
                return Constant(leaf, None)
            if leaf.nbytes < LARGE_BYTES:
                leaf = leaf.detach().clone()
            return Constant(leaf, compute_checksum(leaf))

        return map_tree_leaves(tree, recorded)

    def _window(self, tensor: Tensor) -> Window:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._owners)
            self._owners.append(tensor.detach())
        return Window(
            self._numbers[key], storage.nbytes(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
            int(tensor.storage_offset()),
        )  # fmt: skip

    def _allocate_memory(self, leaf: Any) -> Any:
        return self.build_tensor(leaf) if is_deferred(leaf) else leaf

    def _build(self, window: Window, before: int) -> Tensor:
        """Return the tensor with the values that it had before an operation of the recording."""
        needed: set[int] = set()
        self._collect(window.storage, before, needed)
        storages: Storages = {}
        with torch.no_grad():
            for number in sorted(needed):
                repeat(self._operations[number], storages)
            return build_view(window, storages)

    def _collect(self, storage: int, before: int, needed: set[int]) -> None:
        """Add the operations that give a storage the values that it has before an operation."""
        pending = [(storage, before)]
        while pending:
            storage, before = pending.pop()
            for number in reversed([writer for writer in self._writers[storage] if writer < before]):
                operation = self._operations[number]
                if number not in needed:
                    needed.add(number)
                    pending += [(read, number) for read in operation.reads]
                if operation.overwrites:
                    break


def repeat(operation: Operation, storages: Storages) -> None:
    """Repeat a recorded call. Its results go to the storages that they had in the recording."""

    def allocate_memory(leaf: Any) -> Any:
        if isinstance(leaf, Window):
            return build_view(leaf, storages)
        if isinstance(leaf, Constant):
            if leaf.checksum is not None and compute_checksum(leaf.tensor) != leaf.checksum:
                raise ConfigError(
                    "parallel.meta_device=true: the model changed a tensor after it had copied it into a weight; use "
                    "parallel.meta_device=false"
                )
            return leaf.tensor
        return leaf

    args, kwargs = map_tree_leaves((operation.args, operation.kwargs), allocate_memory)
    kwargs = replace_device(kwargs, HOST)
    present_dtype = torch.get_default_dtype()
    torch.set_default_dtype(operation.default_dtype)
    try:
        if operation.random is None:
            result = operation.function(*args, **kwargs)
        else:
            generator, state = operation.random
            present = generator.get_state()
            generator.set_state(state)
            result = operation.function(*args, **kwargs)
            generator.set_state(present)
    finally:
        torch.set_default_dtype(present_dtype)
    for window, tensor in zip(operation.outputs, find_tensors(result), strict=True):
        if window.storage not in operation.writes:
            continue
        if (tensor.dtype, tuple(tensor.shape)) != (window.dtype, window.shape):
            raise ConfigError(
                f"parallel.meta_device=true: {operation.function} has another result with memory than without; use "
                "parallel.meta_device=false"
            )
        place, made = storages.get(window.storage), tensor.untyped_storage()
        if place is None and window[3:] == (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()):
            storages[window.storage] = made  # a large one is not copied
        elif place is None or place.data_ptr() != made.data_ptr():
            build_view(window, storages).copy_(tensor)


def compute_checksum(tensor: Tensor) -> int:
    """Return a checksum of the values. A change by numpy in the same memory does not change torch's version."""
    if tensor.layout != torch.strided or not tensor.numel():
        return 0
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return zlib.crc32(values.view(torch.uint8).numpy().data)


def build_view(window: Window, storages: Storages) -> Tensor:
    """Return a tensor on its storage, which is allocated if it has no memory yet."""
    if window.storage not in storages:
        storages[window.storage] = torch.UntypedStorage(window.num_bytes)  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=window.dtype)
    return empty.set_(storages[window.storage], window.offset, window.shape, window.strides)


def find_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operation."""
    found: list[Tensor] = []
    map_tree_leaves(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


def is_deferred(leaf: Any) -> bool:
    return isinstance(leaf, DeferredTensor)


def check_memory(tensor: Tensor) -> None:
    """Raise ConfigError for a tensor on the meta device that is not deferred, so its values are not recorded."""
    if tensor.device == META and not is_deferred(tensor):
        raise ConfigError(
            "parallel.meta_device=true: the model cannot be built without memory (it has a tensor on the meta device, "
            "whose values torch does not show); use parallel.meta_device=false"
        )


def wrap_deferred(leaf: Any) -> Any:
    return DeferredTensor(leaf) if isinstance(leaf, Tensor) and not is_deferred(leaf) else leaf


def convert_to_meta_tensor(leaf: Any) -> Any:
    """Return a tensor without memory of the same kind; other values as they are."""
    if not isinstance(leaf, Tensor) or is_deferred(leaf):
        return leaf
    return torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype, device=META)


def replace_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a call with another device, if they name one."""
    return kwargs | {"device": device} if "device" in kwargs else kwargs


def is_view(function: Any) -> bool:
    """Return whether the results of an operation share the memory of its arguments, which it does not change."""
    aliases = [result.alias_info for result in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def is_overwriting(function: Any) -> bool:
    return function.overloadpacket.__name__ in OVERWRITING


def written_arguments(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call changes in place."""
    written: list[Any] = []
    undeclared = UNDECLARED_WRITES.get(function, ())
    for position, argument in enumerate(function._schema.arguments):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if is_declared or position in undeclared:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written.append(given)
    return find_tensors(written)


def must_compute(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call needs values now: it returns a number, or changes a tensor that has memory."""
    returns_tensors = all("Tensor" in str(result.type) for result in function._schema.returns)
    return not returns_tensors or any(
        not is_deferred(tensor) for tensor in written_arguments(function, args, kwargs)
    )
