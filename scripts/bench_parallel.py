"""What a second thread, a second rank and a second worker of one process give, and what ranks exchange.

    python scripts/bench_parallel.py [mlp|cnn|gpt|update ...] [--rounds 3] [--steps 40] [--devices 2]

Speed: every way trains the same global batch in a run of its own, in turns. Printed are samples a second, the median
over the rounds with their range, and the ratio to one process with one thread. Start-up, validation and files are left
out. `workers` is a loop by hand, as trainrun has no such way: threads of one process, each with its slice of the batch
and a copy of the model on the same weights; gradients are summed once, in the order of the threads. Its ratio is to the
same loop without workers.

Exchange: bytes that a rank sends in a step, counted by the loopback device of a network of its own (`unshare`), beside
the formula of a ring, 2 (N - 1) / N times the bytes of the gradients (3 in place of 2 for shards). From the formula and
the step of one process comes the efficiency that N GPUs would reach over a link: if nothing of the exchange is hidden,
and if all is but what takes longer than the backward pass.

Update: `update` compares the check for NaN and the optimizer of `parallel=fsdp` with those of processes that hold as
many values as a rank. As many of them as ranks run at once, because they share the bandwidth of the memory. They run
once as they are, and once with a pause before each update, so that a step takes as long as with shards: meanwhile the
caches lose the moments. Printed are milliseconds, the medians over the steps. Waiting for other ranks is a row apart.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from bench_diagnose import COMMON, WORKLOADS  # noqa: E402
from bench_kit import machine  # noqa: E402
from faulty_parts import Wide  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from trainrun.model.cnn import Cnn  # noqa: E402
from trainrun.timing.phases import ACCOUNTS  # noqa: E402
from trainrun.train_state import TrainState  # noqa: E402
from trainrun.training.components import Components  # noqa: E402

# What a model needs to be divided into shards.
FOR_SHARDS: dict[str, list[str]] = {"mlp": ["parallel.blocks=[first,middle.*]"], "cnn": [], "gpt": []}
BATCH = {"mlp": 256, "cnn": 64, "gpt": 16}
QUIET = ["checkpoint.enabled=false", "monitor.plots=false", "monitor.log_every_n_steps=1000"]
PER_STEP = ("data", "forward", "backward", "check", "optimizer", "ranks", "runner")  # phases of the ledger
BACKWARD_SHARE = 2 / 3  # of a step: what an exchange of gradients can be hidden behind
UPDATE = ("check", "clip", "optimizer")
UPDATE_WIDTHS = (256, 1024)  # of the layers, of which a rank holds four
WARM_UP = 20  # steps before an update is measured
LINKS = {"10 Gb/s Ethernet": 1.25e9, "PCIe 4": 25e9, "NVLink of an H100": 450e9}  # bytes a second, one way


def ways(model: str, devices: int) -> dict[str, list[str]]:
    """Return the settings of each way to train a model on `devices` cores."""
    shards = ["parallel=fsdp", f"parallel.devices={devices}", "trainer.num_threads=1", *FOR_SHARDS[model]]
    return {
        "1 thread": ["trainer.num_threads=1"],
        f"{devices} threads": [f"trainer.num_threads={devices}"],
        f"{devices} ranks (ddp)": ["parallel=ddp", f"parallel.devices={devices}", "trainer.num_threads=1"],
        f"{devices} shards (fsdp)": shards,
    }


def run_once(words: list[str], steps: int, folder: Path, prefix: str = "") -> dict[str, Any]:
    """Train and return the last ledger of the run: seconds by phase."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["trainrun", *words, *QUIET, f"trainer.max_steps={steps}", f"output_dir={folder}"]
    shown = subprocess.run(
        ["bash", "-c", prefix + shlex.join(command)], cwd=HERE, capture_output=True, text=True, check=False
    )
    if shown.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{shown.stdout}{shown.stderr}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"output": shown.stdout, **next(row for row in reversed(rows) if row["kind"] == "ledger")}


def words_of(model: str, devices: int, way: list[str]) -> list[str]:
    """Return the settings of a run that takes the same global batch on any number of ranks."""
    ranks = devices if any(word.startswith("parallel=") for word in way) else 1
    own = [
        word for word in WORKLOADS[model] if not word.startswith(("data.batch_size", "trainer.max_epochs"))
    ]
    return [*own, f"data.batch_size={BATCH[model] // ranks}", *way]


def samples_per_second(model: str, steps: int, ledger: dict[str, Any]) -> float:
    return BATCH[model] * steps / sum(ledger["seconds"].get(phase, 0.0) for phase in PER_STEP)


def bytes_sent(model: str, devices: int, way: list[str], folder: Path) -> float | None:
    """Return the bytes that a rank sends in a step, from two runs of unequal length; None without `unshare`."""
    counter = "sed -n 's/^ *lo: *//p' /proc/net/dev"
    inside = f"ip link set lo up; {{command}}; {counter} >{shlex.quote(str(folder))}.lo"
    totals = []
    for steps in (2, 12):
        words = [*words_of(model, devices, way), *QUIET, f"trainer.max_steps={steps}", f"output_dir={folder}"]
        shutil.rmtree(folder, ignore_errors=True)
        script = inside.format(command=shlex.join(["trainrun", *words]))
        done = subprocess.run(
            ["unshare", "-rn", "bash", "-ec", script], cwd=HERE, capture_output=True, check=False
        )
        if done.returncode != 0:
            return None
        totals.append(int(Path(f"{folder}.lo").read_text().split()[0]))
    return (totals[1] - totals[0]) / 10 / devices


# ---------------------------------------------------------------- workers of one process, by hand


def model_and_batch(model: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    classes = torch.randint(0, 10, (BATCH[model],))
    if model == "mlp":
        return Wide(hidden=1536), torch.rand(BATCH[model], 512), classes
    if model == "cnn":
        return Cnn(in_shape=(1, 28, 28), num_classes=10), torch.rand(BATCH[model], 1, 28, 28), classes
    layer = nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 256))
    tokens = torch.randint(0, 256, (BATCH[model], 128))
    return network, tokens, tokens


def loss_sum(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = network(x)
    return functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")


def copy_on_same_weights(network: nn.Module) -> nn.Module:
    """Return a copy whose parameters share memory with the network's, with gradients of its own."""
    import copy

    replica = copy.deepcopy(network)
    for own, shared in zip(replica.parameters(), network.parameters(), strict=True):
        own.data = shared.data
    return replica


def hand_step(model: str, workers: int) -> Callable[[], None]:
    """Return one training step by `workers` threads of this process; 0 is the loop without workers."""
    network, x, y = model_and_batch(model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    if workers == 0:

        def step() -> None:
            optimizer.zero_grad()
            (loss_sum(network, x, y) / len(x)).backward()
            optimizer.step()

        return step
    replicas = [network, *[copy_on_same_weights(network) for _ in range(workers - 1)]]
    slices = list(zip(x.chunk(workers), y.chunk(workers), strict=True))
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def work(index: int) -> None:
        replicas[index].zero_grad()
        (loss_sum(replicas[index], *slices[index]) / len(x)).backward()

    def step_of_workers() -> None:
        list(pool.map(work, range(workers)))
        gradients = [[p.grad for p in replica.parameters() if p.grad is not None] for replica in replicas]
        for other in gradients[1:]:
            torch._foreach_add_(gradients[0], other)
        optimizer.step()

    return step_of_workers


def hand_speeds(model: str, devices: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return samples a second by way, a value for each round; the ways take turns."""
    threads = {
        "loop by hand, 1 thread": 1,
        f"loop by hand, {devices} threads": devices,
        f"{devices} workers": 1,
    }
    steppers = {name: hand_step(model, devices if "workers" in name else 0) for name in threads}
    speeds: dict[str, list[float]] = {name: [] for name in threads}
    for turn in range(rounds + 1):  # the first is a warm-up
        for name, step in steppers.items():
            torch.set_num_threads(threads[name])
            began = time.perf_counter()
            for _ in range(steps):
                step()
            if turn > 0:
                speeds[name].append(BATCH[model] * steps / (time.perf_counter() - began))
    return speeds


# ---------------------------------------------------------------- the update of shards


class StepPhases:
    """A hook that writes the seconds of each phase in a step, the median over the steps after the warm-up.

    path: of the file, to which each rank adds its number. pause: seconds to sleep before each update.
    """

    def __init__(self, path: str, steps: int, pause: float) -> None:
        self._path, self._last, self._pause = path, WARM_UP + steps, pause
        self._totals: list[dict[str, float]] = []  # of the phases until the end of each step

    def on_gradients(self, run: Components) -> None:
        time.sleep(self._pause)

    def on_step_end(self, run: Components, state: TrainState) -> None:
        self._totals.append(run.phases.read_from_any_thread())
        if state.step == self._last:
            steps = list(pairwise(self._totals[WARM_UP - 1 :]))
            phases = {
                name: median(after[name] - before[name] for before, after in steps) for name in ACCOUNTS
            }
            Path(f"{self._path}.{run.parallel.rank}").write_text(json.dumps(phases))


def measure_phases(words: list[str], steps: int, folder: Path, pause: float = 0.0) -> dict[str, float]:
    """Train and return the seconds of each phase in a step, the mean over the ranks."""
    values = {
        "_target_": "bench_parallel.StepPhases",
        "path": folder / "phases",
        "steps": steps,
        "pause": pause,
    }
    hook = [f"hook.phases.{key}={value}" for key, value in values.items()]
    run_once([*words, *hook], WARM_UP + steps + 1, folder)
    return mean_by_phase([json.loads(file.read_text()) for file in folder.glob("phases.*")])


def mean_by_phase(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in ACCOUNTS}


def compare_updates(width: int, devices: int, rounds: int, steps: int, folder: Path) -> None:
    """Print the update of shards beside that of as many processes, each of which holds as many values as a rank."""
    common = [*COMMON, "data.train._target_=faulty_parts.Table", "model=custom", "model._target_=faulty_parts.Wide",
              "data.train.width=64", "model.width=64", f"model.hidden={width}", "data.batch_size=32",
              "trainer.num_threads=1"]  # fmt: skip
    shards = [*common, f"model.layers={4 * devices}", *ways("mlp", devices)[f"{devices} shards (fsdp)"]]

    def measure_processes(pause: float) -> dict[str, float]:
        with ThreadPoolExecutor(devices) as pool:
            folders = [folder / str(index) for index in range(devices)]
            words = [*common, "model.layers=4"]
            return mean_by_phase(
                list(pool.map(lambda own: measure_phases(words, steps, own, pause), folders))
            )

    measured: dict[str, list[dict[str, float]]] = {"processes": [], "with a pause": [], "shards": []}
    for _ in range(rounds):
        divided, whole = measure_phases(shards, steps, folder / "shards"), measure_processes(0.0)
        pause = max(0.0, sum(divided.values()) - sum(whole.values()))
        rows = whole, measure_processes(pause), divided
        for name, row in zip(measured, rows, strict=True):
            measured[name].append(row)
    print(f"update, layers of {width}, {devices} ranks or processes at once, milliseconds in a step")
    for name, rounds_of_name in measured.items():
        cells = [
            f"{phase} {format_range([1000 * row[phase] for row in rounds_of_name])}"
            for phase in ("check", "optimizer", "ranks")
        ]
        ratios = [
            sum(divided[phase] for phase in UPDATE) / sum(row[phase] for phase in UPDATE)
            for row, divided in zip(rounds_of_name, measured["shards"], strict=True)
        ]
        ratio = "" if name == "shards" else f"   shards take {format_range(ratios)} times as long"
        print(f"  {name:<14} {'   '.join(cells)}{ratio}")


def format_range(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


# ---------------------------------------------------------------- tables


def show_speeds(speeds: dict[str, list[float]]) -> None:
    """Print a row for each way: samples a second, and the ratio to the first way in each round."""
    first = next(iter(speeds.values()))
    for name, values in speeds.items():
        ratios = [value / other for value, other in zip(values, first, strict=True)]
        print(
            f"  {name:<26} {median(values):9,.0f} samples/s   {median(ratios):5.2f}  "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def show_efficiency(gradient_bytes: int, step_seconds: float) -> None:
    for link, bandwidth in LINKS.items():
        cells = []
        for gpus in (2, 8, 64):
            exchange = 2 * (gpus - 1) / gpus * gradient_bytes / bandwidth
            hidden = max(0.0, exchange - BACKWARD_SHARE * step_seconds)
            lowest, highest = (step_seconds / (step_seconds + wait) for wait in (exchange, hidden))
            cells.append(f"{gpus} GPUs {lowest:.0%} to {highest:.0%}")
        print(f"    {link:<20} {',  '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "models", nargs="*", default=[*BATCH, "update"], metavar="MODEL", help="mlp, cnn, gpt, update"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, default=2, help="threads, ranks and workers")
    options = parser.parse_args()
    print(machine())
    if "update" in options.models:
        for width in UPDATE_WIDTHS:
            with tempfile.TemporaryDirectory() as temporary:
                compare_updates(width, options.devices, options.rounds, options.steps, Path(temporary))
    for model in [model for model in options.models if model != "update"]:
        print(f"{model}, global batch {BATCH[model]}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            chosen = ways(model, options.devices)
            speeds: dict[str, list[float]] = {name: [] for name in chosen}
            for _ in range(options.rounds):
                for name, way in chosen.items():
                    ledger = run_once(words_of(model, options.devices, way), options.steps, folder)
                    speeds[name].append(samples_per_second(model, options.steps, ledger))
            show_speeds(speeds)
            show_speeds(hand_speeds(model, options.devices, options.rounds, options.steps))
            parameters = json.loads((folder / "status.json").read_text())["num_parameters"]
            gradient_bytes = 4 * parameters
            for name, way in chosen.items():
                if "ranks" in name or "shards" in name:
                    passes = (
                        3 if "shards" in name else 2
                    )  # weights twice and gradients, or a sum of gradients
                    share = passes * (options.devices - 1) / options.devices
                    sent = bytes_sent(model, options.devices, way, folder)
                    shown = "not counted: no network of its own" if sent is None else f"{sent:,.0f} bytes"
                    print(
                        f"  a rank of {name} sends in a step: {shown} (ring: {share * gradient_bytes:,.0f})"
                    )
            print("  predicted efficiency, nothing hidden to hidden behind the backward pass:")
            show_efficiency(gradient_bytes, BATCH[model] / median(next(iter(speeds.values()))))


if __name__ == "__main__":
    main()
