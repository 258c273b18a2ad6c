"""Load weights from a checkpoint or a file (`init_from`), check that they fit a model, and leave frozen ones out.

With `checkpoint.adapter_only`, a checkpoint holds the trained parameters and the buffers. The frozen weights come
from `init_from`: they are loaded again at each start and compared by SHA-256. Other frozen weights are saved too.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from operator import ge
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainrun.checkpoint.load import (
    LoadedCheckpoint,
    find_best_checkpoint,
    load_on_all_ranks,
    open_regular_file,
    open_tensors,
    resolve_checkpoint,
)
from trainrun.checkpoint.save import run_on_rank_zero
from trainrun.config.schema import InitConfig
from trainrun.errors import CheckpointError, ConfigError, TrainingError
from trainrun.interfaces import Parallel
from trainrun.output import format_count
from trainrun.patterns import match_names
from trainrun.tensors import StoredTensor

KEY = "init_from"
CHECKPOINTS = "checkpoints"  # in a run folder
SHOWN, MOST_SHOWN = 5, 20  # tensors that do not fit
SHOWN_DIGITS = 12  # of a SHA-256
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")  # of files that torch.save wrote
WEIGHT_NAMES = ("state_dict", "model_state_dict", "model")  # of the dict of weights in such a file
SAFE_TORCH = (2, 10)  # older ones run code in spite of weights_only (CVE-2025-32434, CVE-2026-24747)
INDEX_ENDING = ".safetensors.index.json"
INDEX, SINGLE = f"model{INDEX_ENDING}", "model.safetensors"  # in the folder of a Hugging Face model
MAX_INDEX_BYTES = 100 * 2**20
SAME_MODEL = "build it with the same model and model.* as the checkpoint"
BASE = "base"  # of a checkpoint: where the weights are that it leaves out
ADAPTER_ONLY = "checkpoint.adapter_only=true"
EXTRA_STATE = "_extra_state"  # how torch names what get_extra_state() gives
EVERY = "*"  # in `init.rename`: the beginning of every name

Kind = tuple[tuple[int, ...], torch.dtype]


class InitialWeights(NamedTuple):
    """The result of `init_from`: its source, the parameters that were loaded, and lines for the user."""

    source: str
    params: list[nn.Parameter]
    lines: list[str]

    def base(self, model: nn.Module, notes: list[str]) -> FrozenBase:
        """Return the frozen weights that checkpoints leave out. The model has its transforms already.

        Raise ConfigError if no weight is frozen.
        """
        return FrozenBase(model, self, notes)


class FrozenBase:
    """The weights that checkpoints leave out: frozen parameters with the values of `init_from`."""

    def __init__(self, model: nn.Module, initial: InitialWeights, notes: list[str]) -> None:
        """Raise ConfigError if there are no weights to leave out."""
        source = initial.source
        initial_ids = {id(param) for param in initial.params}
        every = dict(model.named_parameters(remove_duplicate=False))
        self._params = {
            name: param
            for name, param in every.items()
            if not param.requires_grad and id(param) in initial_ids
        }
        if not self._params:
            raise ConfigError(
                f"{ADAPTER_ONLY}: no weight of init_from={source} stays frozen; add LoRA, or model.freeze without "
                "model.unfreeze_at, or leave it out"
            )
        self._told = {
            "from": str(Path(source).expanduser().absolute()),
            "sha256": digest_tensors(self._params),
        }
        left_out = {id(param) for param in self._params.values()}
        saved = sum(param.numel() for param in model.parameters() if id(param) not in left_out)
        notes.append(
            f"{ADAPTER_ONLY}: {format_count(saved, 'parameter')} saved; the others stay in {source} "
            f"(SHA-256 {self._told['sha256'][:SHOWN_DIGITS]})"
        )

    def drop_frozen_tensors(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Return the tree of a checkpoint without the frozen weights.

        Raise TrainingError if one of these weights is trained now.
        """
        for name, param in self._params.items():
            if param.requires_grad:
                raise TrainingError(
                    f"{ADAPTER_ONLY}: {name} was frozen at the start and is trained now; leave it out"
                )
        ema = {
            key: {name: tensor for name, tensor in part.items() if name not in self._params}
            if isinstance(part, dict) else part
            for key, part in shared["ema"].items()
        }  # fmt: skip
        model = {name: tensor for name, tensor in shared["model"].items() if name not in self._params}
        return shared | {"model": model, "ema": ema, BASE: self._told}

    def check(self, place: str, shared: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a complete checkpoint has other base weights, which later checkpoints would not
        save.
        """
        weights = shared["model"]
        if BASE not in shared and self._told["sha256"] != digest_tensors(
            {name: weights[name] for name in self._params if name in weights}
        ):
            raise CheckpointError(
                f"checkpoint {place}: its frozen weights are not those of init_from={self._told['from']}, so no "
                f"checkpoint can leave them out; continue without {ADAPTER_ONLY}"
            )


def find_base_weights(init_from: str | None, loaded: LoadedCheckpoint) -> str | None:
    """Return the path of the weights that a checkpoint leaves out: `init_from` if it exists, else the path in the
    checkpoint.

    Return None for a checkpoint that leaves nothing out.
    """
    base_facts = loaded.shared.get(BASE) if isinstance(loaded.shared, dict) else None
    there = init_from is not None and Path(init_from).expanduser().exists()
    return None if base_facts is None else init_from if there else str(base_facts["from"])


def add_left_out_weights(place: str, shared: dict[str, Any], live: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a checkpoint's tree with the weights that it leaves out added from `live`, the model's own weights.

    Raise CheckpointError if the SHA-256 of those weights is not the one in the checkpoint.
    """
    if BASE not in shared:
        return shared
    base = {name: tensor for name, tensor in live.items() if name not in shared["model"]}
    ema, base_facts, here = shared["ema"], shared[BASE], digest_tensors(base)
    if here != base_facts["sha256"]:
        raise CheckpointError(
            f"checkpoint {place}: holds an adapter of init_from={base_facts['from']} (frozen weights with SHA-256 "
            f"{base_facts['sha256'][:SHOWN_DIGITS]}), but the weights here differ ({here[:SHOWN_DIGITS]}); restore "
            f"that file or run, and use {ADAPTER_ONLY}"
        )
    return shared | {
        "model": base | shared["model"],
        "ema": ema | {"module": base | ema["module"]} if ema else ema,
    }


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the names, types, shapes and bytes of tensors, in hex."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def choose_evaluated_weights(
    loaded: LoadedCheckpoint, live: Mapping[str, Tensor] | None = None, wish: bool | None = None
) -> tuple[dict[str, Tensor], bool]:
    """Return the weights with which a checkpoint is evaluated, and whether they are averaged.

    live: the network's own weights, with the base that an adapter needs. wish: True for averaged weights, False for
        the trained ones, None for averaged ones if the checkpoint has them. Raise CheckpointError if they are not
        there.
    """
    shared, weights, averaged = loaded.shared, None, None
    if isinstance(shared, dict):
        if BASE in shared and live is None:
            raise CheckpointError(
                f"checkpoint {loaded.folder.name}: contains only an adapter; export the whole network first: "
                "trainrun export RUN --to huggingface (with --merge for LoRA)"
            )
        shared = shared if live is None else add_left_out_weights(loaded.folder.name, shared, live)
        ema = shared.get("ema")
        averaged = ema.get("module") if isinstance(ema, dict) and wish is not False else None
        weights = averaged if averaged is not None else shared.get("model")
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"checkpoint {loaded.folder.name}: holds no weights")
    if wish and averaged is None:
        raise CheckpointError(f"trainer.ema=true: checkpoint {loaded.folder.name} holds no averaged weights")
    return weights, averaged is not None


def load_initial(
    model: nn.Module, init_from: str, parallel: Parallel, chosen: InitConfig | None = None
) -> InitialWeights:
    """Copy weights into a model. All ranks call it together.

    init_from: a run (its best checkpoint, else its last), a checkpoint, a safetensors file, the index or folder of a
        sharded model, or a file of `torch.save`. chosen: the tensors to skip, how to rename them, and whether all
        others must match the model. Numbers are converted to the model's dtypes. Raises CheckpointError.
    """
    try:
        place, there, about = _read_source(Path(init_from).expanduser().absolute(), parallel)
        selected, lines = _select_tensors(model, there, chosen or InitConfig(), place)
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}={init_from}: {error}") from error
    here = model.state_dict()
    model.load_state_dict(parallel.load_state_dict(here | selected, here))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    params = [parameters[name] for name in selected if name in parameters]
    taken = f"weights: {format_count(len(selected), 'tensor')} of {init_from}{about}"
    return InitialWeights(init_from, params, [taken, *lines])


def _select_tensors(
    model: nn.Module, there: Mapping[str, Tensor], chosen: InitConfig, place: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors to copy, by their names in the model, and a line for each reason why others are skipped."""
    there, here = _rename_tensors(there, chosen.rename or {}), model.state_dict()
    names = [*here, *(name for name in there if name not in here)]
    try:
        skipped = match_names(names, chosen.skip or (), "init.skip")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    made = _find_empty_buffers(model) - set(skipped)
    device = next((tensor.device for tensor in here.values()), torch.device("cpu"))
    allocate_buffers(model, {name: tensor for name, tensor in there.items() if name in made}, device)

    here = {name: tensor for name, tensor in model.state_dict().items() if name not in skipped}
    converted = {}
    for name, tensor in there.items():
        if name not in skipped:
            converted[name] = _convert_dtype(tensor, here.get(name))
    _add_tied_names(here, converted)
    expected, kinds = describe_tensors(here), describe_tensors(converted)
    selected = {name: converted[name] for name in expected if expected[name] == kinds.get(name)}
    if chosen.strict or not selected:
        remedy = _describe_remedy(expected, kinds, chosen.strict)
        check_tensors(place, "this model", expected, kinds, MOST_SHOWN, remedy)
    if not selected:
        raise CheckpointError(f"{place}: init.skip leaves out every tensor")
    new = [name for name in selected if name in made]
    return selected, _describe_selection(expected, kinds, set(selected), skipped, new)


def _describe_selection(
    expected: Mapping[str, Kind], kinds: Mapping[str, Kind], selected: set[str], skipped: Sequence[str],
    new: Sequence[str],
) -> list[str]:  # fmt: skip
    """Return a line for each reason why tensors are not, or newly, taken. expected, kinds: of the model and of the
    source.
    """
    misfits = [name for name in expected if name in kinds and name not in selected]
    reasons = {
        "nothing here before, as it is there": new,
        "skipped (init.skip)": skipped,
        "not in the file, so they stay as initialised": [name for name in expected if name not in kinds],
        "only in the file": [name for name in kinds if name not in expected],
        "of another shape in the file, so they stay as initialised": [
            _describe_difference(name, expected[name], kinds[name]) for name in misfits
        ],
    }
    lines = []
    for reason, names in reasons.items():
        rest = f", and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
        if names:
            lines.append(f"weights: {reason}: {', '.join(names[:MOST_SHOWN])}{rest}")
    return lines


def _find_empty_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that are still empty. An empty buffer of a torch class is an option that is off:
    skip it.
    """
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if (buffer is None or not buffer.numel()) and not _is_registered_by_torch(name, module)
    }


def _is_registered_by_torch(name: str, module: nn.Module) -> bool:
    """Return whether the constructor of a torch class registers the buffer."""
    begins = [
        vars(kind).get("__init__") for kind in type(module).__mro__ if kind.__module__.startswith("torch.")
    ]
    return any(name in code.co_consts for code in (getattr(it, "__code__", None) for it in begins) if code)


def _describe_remedy(expected: Mapping[str, Kind], found: Mapping[str, Kind], strict: bool) -> str:
    """Return advice for weights that do not fit: what to write if names differ by a prefix or only some tensors
    match.
    """
    if any(name.endswith(".lora_a") for name in found.keys() - expected.keys()):
        return "its layers have LoRA adapters; merge them first: trainrun export RUN_DIR --to safetensors --merge"
    here = next((name for name in expected if name not in found), "")
    there = next((name for name in found if here and name not in expected), "")
    longer, shorter = (there, here) if len(there) > len(here) else (here, there)
    if shorter and longer.endswith(f".{shorter}"):
        beginning = longer.removesuffix(shorter)
        pair = f"{beginning}: ''" if longer == there else f"*: {beginning}"
        return f'try other names: "init.rename={{{pair}}}"'
    return f"{SAME_MODEL}{', or take a part of it: init.skip=PATTERN, init.strict=false' if strict else ''}"


def _rename_tensors(tensors: Mapping[str, Tensor], rename: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors by their names in the model. If several prefixes fit a name, the first one is used."""
    renamed: dict[str, Tensor] = {}
    used = set()
    for name, tensor in tensors.items():
        old = next((old for old in rename if name.startswith(_find_prefix(old))), None)
        used.add(old)
        new = name if old is None else f"{rename[old]}{name.removeprefix(_find_prefix(old))}"
        if new in renamed:
            raise CheckpointError(f"init.rename: two tensors of the file would be named {new}")
        renamed[new] = tensor
    for old in rename:
        if old not in used:
            near = difflib.get_close_matches(old, tensors, n=1, cutoff=0.3)
            guess = f", as {near[0]} does" if near else ""
            raise CheckpointError(
                f"init.rename: the file has no name that begins with {old}, or an earlier rule renamed it{guess}; "
                f"names in the file: {', '.join([*tensors][:SHOWN])}"
            )
    return renamed


def _find_prefix(old: str) -> str:
    return "" if old == EVERY else old


def _convert_dtype(tensor: Tensor, here: Tensor | None) -> Tensor:
    both = here is not None and tensor.is_floating_point() and here.is_floating_point()
    return tensor.to(here.dtype) if both and here is not None else tensor


def _add_tied_names(here: Mapping[str, Tensor], found: dict[str, Tensor]) -> None:
    """Add the missing names of shared tensors: a safetensors file may hold only one name of several."""
    tied: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in here.items():
        if tensor.numel():
            memory = tensor.untyped_storage()._cdata, tensor.storage_offset()  # of the meta device too
            tied.setdefault((*memory, tensor.shape, tensor.stride()), []).append(name)
    for names in tied.values():
        there = [name for name in names if name in found]
        for name in there[1:]:
            if not torch.equal(found[there[0]], found[name]):
                raise CheckpointError(
                    f"{there[0]} and {name} are the same tensor in this model, but differ in the checkpoint"
                )
        if there:
            found.update(dict.fromkeys(names, found[there[0]]))


def _read_source(path: Path, parallel: Parallel) -> tuple[str, dict[str, Tensor], str]:
    """Return the name of the source, its weights, and notes about it. Rank 0 chooses the checkpoint for all ranks."""
    name, why = run_on_rank_zero(parallel, lambda: _choose_checkpoint(path))
    if name:
        loaded = load_on_all_ranks(Path(name), parallel, None)
        weights, averaged = choose_evaluated_weights(loaded)
        of_run = f" ({loaded.folder.name}{why})" if why else ""
        return loaded.folder.name, weights, of_run + (", averaged" if averaged else "")
    if path.is_dir():
        path = next(path / name for name in (INDEX, SINGLE) if (path / name).is_file())
    in_parts = parallel.forward_is_collective
    if path.is_file() and path.name.endswith(INDEX_ENDING):
        return path.name, load_stored_tensors(_open_shards(path), in_parts), ""
    if not path.is_file():
        raise CheckpointError(f"{'not a plain file' if path.exists() else 'no such file or folder'}")
    if path.suffix == ".safetensors":
        return path.name, load_stored_tensors(open_tensors([path]), in_parts), ""
    if path.suffix in TORCH_ENDINGS:
        return path.name, *read_torch_weights(path)
    raise CheckpointError(
        f"not a file of weights; their names end in .safetensors, {', '.join(TORCH_ENDINGS)}"
    )


def read_torch_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file that `torch.save` wrote, and a note about where in the file they were.

    No code of the file is run. The file holds a dict of tensors, or a dict with such a dict in it. Raise
    CheckpointError.
    """
    contents = read_torch_file(path)
    if not isinstance(contents, dict) or not contents:
        raise CheckpointError(f"holds a {type(contents).__name__}, not a dict of tensors")
    dicts = {name: inner for name, inner in contents.items() if is_dict_of_tensors(inner)}
    if is_dict_of_tensors(contents):
        weights, about = contents, ""
    elif names := [name for name in (*WEIGHT_NAMES, *dicts) if name in dicts]:
        weights, about = dicts[names[0]], f" (its {str(names[0])[:80]})"
        if len(dicts) > 1 and names[0] not in WEIGHT_NAMES:
            raise CheckpointError(
                f"holds several dicts of tensors: {', '.join(map(repr, names[:SHOWN]))[:200]}"
            )
    else:
        raise CheckpointError(
            f"holds no dict of tensors; there are {', '.join(repr(str(name)[:80]) for name in [*contents][:SHOWN])}"
        )
    for name, tensor in weights.items():
        if not isinstance(name, str) or not name.isprintable():
            raise CheckpointError(f"{str(name)[:80]!r} is no name of a tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"{name[:80]!r} is no dense tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name[:80]!r} shows more elements than the file has")
    return {name: tensor.detach() for name, tensor in weights.items()}, about


def is_dict_of_tensors(value: object) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(item, Tensor) for item in value.values())
    )


def read_torch_file(path: Path) -> Any:
    """Read a file with `torch.load(weights_only=True)`, which runs no code of the file. Raise CheckpointError."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        needed = ".".join(map(str, SAFE_TORCH))
        raise CheckpointError(
            f"torch {torch.__version__} is not safe on foreign files; install {needed} or newer"
        )
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch compares no CRC-32
                    raise ValueError(f"CRC-32 of {damaged[:200]!r}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other protocols, and TorchScript, which it refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = str(error).partition("GLOBAL ")[2].partition(" ")[0][:100]
        content = f"holds more than tensors and plain values{f' ({name})' if name else ''}, or no torch file"
        raise CheckpointError(f"{content}; nothing of it was run: ask for its state_dict alone") from error
    except Exception as error:  # torch has a dozen kinds for damaged files
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointError(f"cannot be read ({type(error).__name__}: {reason})") from error


def load_stored_tensors(stored: Mapping[str, StoredTensor], in_parts: bool) -> dict[str, Tensor]:
    """Return the tensors with their values; those of a model in shards stay in the files until they are copied."""
    return {name: tensor if in_parts else tensor.read() for name, tensor in stored.items()}


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all shards that an index file lists; they are in its folder. Raise CheckpointError."""
    with open_regular_file(index) as file:
        text = file.read(MAX_INDEX_BYTES + 1)
    try:
        places = json.loads(text)["weight_map"] if len(text) <= MAX_INDEX_BYTES else None
    except (ValueError, TypeError, KeyError, RecursionError):
        places = None
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(name, str) for name in places.values())
    ):
        raise CheckpointError(
            f"{index}: not the index of sharded safetensors (a JSON object with weight_map)"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        if shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {shard[:200]!r} is not the name of a .safetensors file in the same folder"
            )
        part = open_tensors([index.parent / shard])
        expected = {name for name, where in places.items() if where == shard}
        if part.keys() != expected:
            raise CheckpointError(
                f"{index}: {min(part.keys() ^ expected)!r} is not in both {shard} and the index"
            )
        tensors |= part
    return tensors


def _choose_checkpoint(path: Path) -> tuple[str, str]:
    """Return the checkpoint to read from a folder, and a note if it is the best or the last of a run; "" for a file."""
    if not path.is_dir():
        return "", ""
    checkpoints = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if not checkpoints.is_dir():
        if any((path / name).is_file() for name in (INDEX, SINGLE)):
            return "", ""
        return str(resolve_checkpoint(path.parent, path)), ""
    best = find_best_checkpoint(checkpoints)
    return (
        (str(best), ", the best")
        if best is not None
        else (str(resolve_checkpoint(checkpoints, "last")), ", the last")
    )


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Return shape and dtype by name, for example of a `state_dict()`."""
    return {name: describe_tensor(tensor) for name, tensor in tensors.items()}


def describe_tensor(tensor: Tensor) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def allocate_buffers(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Allocate the buffers that a forward pass creates or lengthens with their stored size. Return the lengthened
    names.
    """
    longer = []
    for prefix, module in model.named_modules():
        for name, here in [*module._buffers.items()]:
            there = weights.get(place := f"{prefix}.{name}".lstrip("."))
            if there is None or (here is not None and here.numel() and not is_longer(there, here)):
                continue
            if here is not None and here.numel():
                longer.append(place)
            setattr(module, name, torch.empty_like(there, device=device))
    return longer


def describe_unsaveable(name: str, value: object) -> str:
    """Return the message for a value of the model's `state_dict()` that no checkpoint can hold, with the way out."""
    if isinstance(value, Tensor):
        return (
            f"model: {name} is sparse, which no checkpoint holds; say register_buffer"
            f"({name.rpartition('.')[2]!r}, ..., persistent=False) where the model makes it itself"
        )
    return (
        f"model: {name} is a {type(value).__name__}, but checkpoints store tensors; let get_extra_state() return a "
        "torch.tensor(...), and set_extra_state() accept it"
    )


def is_longer(there: Tensor, here: Tensor) -> bool:
    is_larger = there.dim() == here.dim() and all(map(ge, there.shape, here.shape))
    return is_larger and there.shape != here.shape and there.dtype == here.dtype


def check_tensors(
    place: str, owner: str, expected: Mapping[str, Kind], found: Mapping[str, Kind], shown: int = SHOWN,
    way_out: str = SAME_MODEL,
) -> None:  # fmt: skip
    """Raise CheckpointError that names the first tensors that differ, in the order of the model.

    place: the checkpoint. owner: what the tensors are for, as typed (`model=cnn`). expected: shapes and dtypes of
        the model.
    found: those of the checkpoint. shown: the number of differences that are named. way_out: advice.
    """
    names = [*expected, *(name for name in found if name not in expected)]
    faults = [
        fault
        for name in names
        if (fault := _describe_difference(name[:200], expected.get(name), found.get(name)))
    ]
    if faults:
        rest = f", and {len(faults) - shown} more" if len(faults) > shown else ""
        raise CheckpointError(
            f"checkpoint {place} does not fit {owner}: {len(faults)} of {len(names)} tensors differ: "
            f"{', '.join(faults[:shown])}{rest}; {way_out}"
        )


def _describe_difference(name: str, here: Kind | None, there: Kind | None) -> str:
    if there is None:
        return f"{name} is not in the checkpoint"
    if here is None:
        return f"{name} is only in the checkpoint"
    if name.endswith(EXTRA_STATE):  # set_extra_state says what fits
        return ""
    if here[0] != there[0]:
        return f"{name} is {there[0]} in the checkpoint and {here[0]} in the model"
    if here[1] != there[1]:
        return f"{name} is {_dtype_name(there[1])} in the checkpoint and {_dtype_name(here[1])} in the model"
    return ""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
