"""How fast stored columns are read: CSV and tar shards started again, shuffled Parquet rows, lists of unequal lengths.

    python scripts/bench_columns.py [--epochs 5]

Seconds are of the processor, in one process with one thread. The stored columns lie in a temporary folder.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402
from bench_kit import machine  # noqa: E402
from pyarrow import csv  # noqa: E402

from trainrun.data.pipeline import open_batches  # noqa: E402
from trainrun.data.readers.records import webdataset  # noqa: E402
from trainrun.data.readers.tables import csv_files, huggingface, parquet  # noqa: E402
from trainrun.data.stream_options import StreamOptions  # noqa: E402

BATCH_SIZE = 64


def write_files(folder: Path) -> None:
    """Write a CSV of 200,000 x 21 cells, 100,000 rows of 128 tokens in row groups of 1,000, 20,000 lists and a tar
    shard of 30,000 samples of two members."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((200_000, 20))
    columns = {f"c{number}": numbers[:, number] for number in range(20)}
    csv.write_csv(pa.table({**columns, "y": rng.integers(0, 10, 200_000)}), folder / "table.csv")
    tokens = pa.array(rng.integers(0, 50_000, 100_000 * 128))
    rows = pa.FixedSizeListArray.from_arrays(tokens, 128)
    pq.write_table(pa.table({"tokens": rows}), folder / "rows.parquet", row_group_size=1000)
    ends = np.cumsum(rng.integers(16, 512, 20_000))
    values = pa.array(rng.integers(0, 50_000, ends[-1]))
    lists = pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), values)
    pq.write_table(pa.table({"tokens": lists}), folder / "lists.parquet")
    with tarfile.open(folder / "shard.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(30_000):
            for ending, content in (("txt", b"x" * 100), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:07d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def loading_seconds(load: Callable[[], Any]) -> float:
    start = time.process_time()
    load()
    return time.process_time() - start


def samples_per_second(source: Any, epochs: int) -> list[float]:
    """Return the speed of each epoch in shuffled order."""
    stream, _ = open_batches(source, StreamOptions("data.train", True, BATCH_SIZE, 1))
    speeds = []
    for epoch in range(epochs):
        start = time.process_time()
        num_samples = sum(len(batch.indices) for batch in stream.epoch(epoch))
        speeds.append(num_samples / (time.process_time() - start))
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = name
        write_files(folder)
        table, shard = folder / "table.csv", folder / "shard.tar"
        loads = {
            table: lambda: csv_files.load(str(table), target="y")["train"],
            shard: lambda: webdataset.load(str(shard))["train"],
        }
        for path, load in loads.items():
            seconds = [loading_seconds(load) for _ in range(epochs)]
            size = f"{path.stat().st_size / 1e6:.0f} MB"
            print(f"{path.name} of {size}: {seconds[0]:.2f} s, then {statistics.median(seconds[1:]):.3f} s")
        rows = parquet.load(str(folder / "rows.parquet"), target="none")["train"]
        lists = huggingface.load(str(folder / "lists.parquet"), columns=["tokens"])["train"]
        for what, source in (("rows of 128 tokens", rows), ("lists of 16 to 511 tokens", lists)):
            speeds = samples_per_second(source, epochs)
            middle = statistics.median(speeds)
            print(f"{what}: {middle:,.0f} samples/s ({min(speeds):,.0f} to {max(speeds):,.0f})")


if __name__ == "__main__":
    main()
