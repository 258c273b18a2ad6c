"""How often training samples come, folds, and where the data lies: what does not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainrun.config.saved_values import leaves_of
from trainrun.config.schema import RunConfig, plain, validation_nodes
from trainrun.instantiate import TARGET, named_nodes

READERS, ARRAYS = "trainrun.data.", "trainrun.data.readers.arrays."
Rules = tuple[tuple[Any, str], ...]  # whether a line applies, and the line


def sampling(config: RunConfig) -> Rules:
    data, names = config.data, named_nodes(config.data.train)
    mix = f"data.mix={data.mix}".replace("'", "") if data.mix else ""
    asked = mix or (f"data.sampling={data.sampling}" if data.sampling != "none" else "")
    folds, words = f"data.folds={data.folds}", {"padding": data.padding, "truncate": data.truncate}
    return (
        (mix and data.sampling != "none",
         f"data.sampling={data.sampling}: {mix} says how often samples come already; leave one of them out"),
        (isinstance(data.mix, dict) and data.mix and set(data.mix) != set(names),
         f"{mix}: must name the sets of data.train, which are "
         f"{', '.join(names) or 'not named; name them, as data.train.a._target_=my_file.MyClass'}"),
        (data.sampling == "weighted" and data.weights is None,
         "data.sampling=weighted: needs data.weights: a column, a file or a list of one weight a sample"),
        (data.weights is not None and data.sampling != "weighted",
         "data.weights: has no effect without data.sampling=weighted"),
        (data.shuffle_buffer and not data.shuffle,
         f"data.shuffle=false: data.shuffle_buffer={data.shuffle_buffer} shuffles; leave one of them out"),
        (asked and not data.shuffle, f"data.shuffle=false: {asked} has no order of its own; leave one of them out"),
        (data.sampling == "balanced" and (config.task or {}).get("class_weights") == "balanced",
         "data.sampling=balanced: task.class_weights=balanced makes up for the same once more; leave one of them out"),
        *((asked and words[name] == value,
           f"data.{name}={value}: puts samples together once and for all, which {asked} chooses in every epoch; "
           f"use data.{name}={other}")
          for name, value, other in (("padding", "pack", "bucket"), ("padding", "token_budget", "bucket"),
                                     ("truncate", "split", "right"), ("truncate", "drop", "right"))),
        (data.folds is None and data.fold is not None, f"data.fold={data.fold}: of how many? Say data.folds=5"),
        (data.folds is None and data.stratified, "data.stratified=true: has no effect without data.folds"),
        (data.folds is None and data.fold_groups is not None,
         f"data.fold_groups={data.fold_groups}: has no effect without data.folds"),
        (data.fold_groups is not None and data.stratified,
         "data.stratified=true: the samples of a group stay in one fold; leave it or data.fold_groups out"),
        (data.folds is not None and data.fold is None,
         f"{folds}: which of them validates? data.fold=0, or all as a sweep: trainrun --multirun {folds} "
         f"'data.fold=range({data.folds})'"),
        (data.folds is not None and data.fold is not None and data.fold >= data.folds,
         f"data.fold={data.fold}: {folds} are numbered 0 to {(data.folds or 0) - 1}"),
        (data.folds is not None and mix, f"{folds}: {mix} counts whole sets; leave one of them out"),
    )  # fmt: skip


def parts(config: RunConfig) -> Iterator[str]:
    """A validation set that a reader of ours cuts from the training data, but by other settings than that."""
    train = config.data.train or {}
    for split, node in validation_nodes(config.data).items():
        target, key = str(node.get(TARGET)), f"data.{split.replace('/', '.')}"
        if target != train.get(TARGET) or not target.startswith(READERS) or node.get("split") != "val":
            continue
        if node.get("val_path") is not None:  # nothing is cut
            continue
        alike = node.get("path") == train.get("path")
        for name in {"val_fraction", "seed"} & node.keys() & train.keys() if alike else ():
            if str(node[name]) != str(train[name]):
                yield (
                    f"{key}.{name}={node[name]}: both parts are cut from the same data, or samples would be in both; "
                    f"set data.train.{name}"
                )
        cut = "val_fraction" in node and str(node["val_fraction"]) == str(train.get("val_fraction"))
        if not alike and cut and not target.startswith(ARRAYS):
            yield (
                f"{key}.path={node['path']}: {key} is a part held out of its path; for validation data of its own set "
                f"data.train.val_path={node['path']}"
            )


def unread_path(config: RunConfig) -> list[str]:
    """A fault where no node has the path: the run would train on other data than its words name."""
    path, found = config.data.path, plain(config)
    del found["data"]["path"]
    if path is None or any(value == path for _, value in leaves_of(found)):
        return []
    return [
        f"data.path={path}: nothing reads it with data={config.data.name}; say what it is, as data=csv, data=text or "
        "data=image_folder (trainrun --help data), or leave it out"
    ]
