"""`trainrun embed RUN_DIR --out emb.parquet`: embeddings of every sample with its target, as data for training."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainrun.assemble.data_pipeline import build_sources, build_stream_options
from trainrun.checkpoint.load import resolve_checkpoint
from trainrun.checkpoint.save import MANIFEST
from trainrun.cli.run_arguments import build_run_parser, parse_arguments
from trainrun.config.compose import compose_run
from trainrun.config.schema import DataConfig
from trainrun.convert.conversion import convert
from trainrun.convert.split_samples import Samples
from trainrun.data.cache.fingerprint import fingerprint_source
from trainrun.data.facts import describe_source
from trainrun.data.pipeline import add_look, open_batches
from trainrun.embedding.layer_output import LayerOutput
from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, DataError
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import Batches, MicroBatch
from trainrun.output import say
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.runs.restore_config import choose_saved_checkpoint, load_network
from trainrun.runs.resume import load_trusted_config
from trainrun.runs.run import open_run

if TYPE_CHECKING:
    from trainrun.config.schema import RunConfig


class EmbeddedSplit:
    """A data set of `(embedding, target)`, or of embeddings if there are no targets.

    size: samples per batch. Raises DataError for data without a length.
    """

    def __init__(
        self, stream: Batches, layer: LayerOutput, key: str, size: int, class_names: Sequence[str],
        num_classes: int | None,
    ) -> None:  # fmt: skip
        if stream.num_samples is None:
            raise DataError(
                f"{key}: its length is not known, so no place in it can be gone on from; give it __len__"
            )
        self._stream, self._layer, self._key, self._size = stream, layer, key, size
        self._length = stream.num_samples
        self.class_names, self.num_classes = class_names, num_classes
        self._batches: Iterator[MicroBatch] = iter(())
        self._next = -1  # the number of the batch that `_batches` gives next
        self._number = -1  # of the newest batch
        self._rows: tuple[Tensor, Tensor | None] = (torch.empty(0), None)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        embeddings, target = self._compute_batch(index // self._size)
        place = index % self._size
        return embeddings[place] if target is None else (embeddings[place], target[place])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def _compute_batch(self, number: int) -> tuple[Tensor, Tensor | None]:
        if number != self._number:
            if number != self._next:
                self._batches, self._next = iter(self._stream.epoch(0, number)), number
            batch = next(self._batches)
            self._next += 1
            begin = number * self._size
            wanted = torch.arange(begin, min(begin + self._size, self._length))
            if batch.indices is None or not torch.equal(batch.indices.cpu(), wanted):
                raise DataError(
                    f"{self._key}: its samples do not come in their order; leave out what changes it"
                )
            self._rows, self._number = self._layer.compute(batch.data), number
        return self._rows


FORMATS = {".parquet": "parquet", ".npy": "npy"}
BATCH = 256
PART = 4096  # samples that a kill costs at most
THROUGH = ("transform", "val_transform", "test_transform", "collate_fn", "max_sequence_length", "truncate", "padding",
           "max_tokens", "pad_multiple")  # fmt: skip
PROBES, TOLERANCE = 4, 1e-3  # samples that are computed again to check what was written


def main(argv: list[str]) -> int:
    """Write a folder of embeddings, check some of its samples, and print the settings with which a run reads it."""
    about = (
        "Writes the output of a layer of a trained model for every sample, as data to train on. If it was stopped, "
        "run the same command again."
    )
    parser = build_run_parser("embed", about)
    parser.add_argument("--out", required=True, help="a folder that ends in .parquet or .npy")
    parser.add_argument(
        "--layer", help="the layer whose output is written (default: the input of the last linear layer)"
    )
    parser.add_argument(
        "--which", help="best, last, or a checkpoint's name (default: best, or last without one)"
    )
    wanted = parse_arguments(parser, argv)
    run_dir, out = open_run(wanted.run_dir), Path(wanted.out).expanduser()
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {wanted.out}: must end in {' or '.join(FORMATS)}")
    which = choose_saved_checkpoint(run_dir, wanted.which)

    checkpoint = resolve_checkpoint(run_dir.checkpoints, which)
    config = _sequential_config(_change_data(run_dir, wanted.overrides, wanted.trust))
    size = config.data.val_batch_size
    assert size is not None
    arguments = [str(run_dir.root), checkpoint.name, f"--layer={wanted.layer or ''}", *wanted.overrides]
    try:
        convert(
            FORMATS[out.suffix], out,
            lambda: _build_splits(run_dir, config, checkpoint, wanted.layer, wanted.trust), arguments,
            -(-PART // size) * size, say, "the run, or its data, is",
        )  # fmt: skip
    except KeyboardInterrupt:
        say(
            "trainrun: interrupted; run the same command again: it continues after what is written",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _change_data(run_dir: RunDir, words: list[str], trust: bool) -> RunConfig:
    """Return the run's config with the data that `words` choose: changed settings, or another group such as
    `data=csv`.

    All other settings of the data stay as in the run, so that samples are processed in the same way.
    """
    others = [word for word in words if word.lstrip("+~").startswith(("data=", "data."))]
    config = load_trusted_config(run_dir, [word for word in words if word not in others], trust)
    usual_data = f"data={config.data.name}"
    if all(word == usual_data for word in others if word.startswith("data=")):
        return load_trusted_config(run_dir, [word for word in words if word != usual_data], trust)
    typed_data, usual = compose_run(others).config.data, DataConfig()
    changes = {
        name: getattr(config.data, name)
        for name in THROUGH
        if getattr(typed_data, name) == getattr(usual, name)
    }
    return replace(
        config,
        data=replace(typed_data, **{**changes, "augment": {**config.data.augment, **typed_data.augment}}),
    )


def _sequential_config(config: RunConfig) -> RunConfig:
    """Return a config that reads every sample once, in order, in batches of equal size."""
    data = config.data
    return replace(config, data=replace(
        data, val_batch_size=data.val_batch_size or BATCH, on_error="raise", padding="longest", sampling="none",
        truncate="right" if data.truncate in ("split", "drop") else data.truncate,
    ))  # fmt: skip


def _build_splits(
    run_dir: RunDir, config: RunConfig, checkpoint: Path, name: str | None, trust: bool
) -> tuple[str, dict[str, Any]]:
    """Return an identity of the embeddings, which detects changes, and the splits to write."""
    parallel = Single(choose_device(config.parallel.accelerator, local_rank=0))
    layer = LayerOutput(load_network(run_dir, checkpoint.name, trust).to(parallel.device), name)
    if "bpe:" in str(config.data.train):
        from trainrun.sampling.run_tokenizer import apply_run_tokenizer

        config = apply_run_tokenizer(config, run_dir, parallel, [])
    sources = {split: source for split, source in build_sources(config, [])[0].items() if source is not None}
    if named := [split for split in sources if "/" in split]:
        raise ConfigError(
            f"embed: data.val has several sets ({', '.join(named)}); name one, as data.val._target_=... of it, or null"
        )
    digest, parts = hashlib.sha256((checkpoint / MANIFEST).read_bytes()), {}
    for split, source in sources.items():
        key = f"data.{split}"
        digest.update(
            f"{layer.name} {split} {getattr(config.data, split)} {fingerprint_source(source)}".encode()
        )
        # training samples go through what those of validation do: no random change, and no shuffling
        kind = "test" if split == "test" else "val"
        options = replace(build_stream_options(config, parallel, kind, lambda text: None), key=key, limit=1.0)
        options = add_look(source, options)
        facts = describe_source(source, key, options)
        stream, _ = open_batches(source, options)
        embedded = EmbeddedSplit(stream, layer, key, options.batch_size, facts.class_names, facts.num_classes)
        parts[split] = Samples(embedded, key, PROBES, TOLERANCE)
        digest.update(f" {len(embedded)} {options.batch_size}".encode())
    first = next(iter(parts.values())).probes[0]
    embedded = first[0] if isinstance(first, tuple) else first  # the other is its target
    say(f"{checkpoint.name}: {layer.name}, {tuple(embedded.shape)} a sample")
    return digest.hexdigest(), parts
