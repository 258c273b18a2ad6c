"""What to run on the first day with a GPU, in the order that decides most: one JSON line a case in $OUT/results.jsonl.

    python scripts/gpu_day.py --check              # on any machine: composes the words of every case, starts nothing
    python scripts/gpu_day.py [PHASE or CASE ...]  # all phases in their order, or these

| phase | decides | minutes |
| --- | --- | --- |
| smoke | whether anything works at all; the tests marked `gpu` | 9 |
| bugs | what a GPU alone shows: recurrent nets in graphs, memory near its limit, waits | 6 |
| speed | compilation, graphs, number types, offloading; with and without each | 9 |
| start | automatic choices and presets, `diagnose` and `autotune`, the tests marked `gpu` and `slow` | 6 |
| last | the memory checker of CUDA, a large checkpoint during training | 5 |

Every case is a process of its own with its own limit, so that one hang or fault of CUDA costs no other. Texts are in
$OUT/log.txt. DAY_DEVICE=cpu tries the script itself on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SELF = Path(__file__).resolve()
ROOT = SELF.parents[1]
DEVICE = os.environ.get("DAY_DEVICE", "cuda")
PHASES = ("smoke", "bugs", "speed", "start", "last")

GPU = (
    f"parallel.accelerator={DEVICE}", "monitor.plots=false", "monitor.progress_bar=false", "checkpoint.enabled=false",
)  # fmt: skip
STEPS = ("trainer.max_epochs=null", "data.val=null")
TEXT = ("data=text", "task=language_modeling")
SMALL = (
    *TEXT,
    "model=gpt",
    "data.train.block_size=256",
    "model.layers=2",
    "model.width=128",
    "model.heads=4",
)
GPT = (
    *TEXT, *STEPS, "model=gpt", "model.layers=12", "model.width=768", "model.heads=12", "model.context=1024",
    "model.vocab_size=50304", "data.train.block_size=1024", "monitor.log_every_n_steps=10",
)  # fmt: skip
MIXED = ("data.batch_size=32", "precision=bf16-mixed", "trainer.max_steps=60")
PICTURES = ("data=synthetic", "data.shape=[3,32,32]", "data.train.num_samples=50000", *STEPS)
CNN = (*PICTURES, "model=cnn", "model.norm=batch", "data.batch_size=512", "trainer.max_steps=200")
MLP = ("data=digits", *STEPS, "data.batch_size=64", "trainer.max_steps=3000")
LSTM = (
    *TEXT, "model=lstm", "data.train.block_size=256", "data.batch_size=32", "trainer.max_epochs=null",
    "trainer.max_steps=60", "trainer.val_check_interval=10", "optimizer.lr=0.01",
)  # fmt: skip
FP8 = (
    *SMALL, "model.width=256", "precision=bf16-mixed", "precision.fp8=true", "data.batch_size=7",
    "data.train.block_size=65", "trainer.max_epochs=null", "trainer.max_steps=300",
)  # fmt: skip
GRAPHS, STEP = ("trainer.cuda_graphs=true",), ("trainer.compile=step",)
SHARDS = ("parallel=fsdp", "parallel.devices=1")
SHORT = ("trainer.max_steps=60",)
LARGE = (*GPT, *MIXED, "trainer.max_steps=200", "checkpoint.every_n_train_steps=50")

# name: (phase, seconds, words). What is read from each: state, seconds, speed, peak memory, notes.
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "smoke mlp": ("smoke", 90, ("data=digits", "trainer.max_epochs=2")),
    "smoke cnn fast": ("smoke", 120, ("data=digits", "model=cnn", "trainer.max_epochs=2", "preset=fast")),
    "smoke gpt bf16": ("smoke", 120, (*SMALL, *STEPS, "precision=bf16-mixed", "trainer.max_steps=30")),
    "smoke compile": ("smoke", 180, (*SMALL, *STEPS, "trainer.max_steps=30", "trainer.compile=model")),
    "lstm plain": ("bugs", 120, LSTM),
    "lstm graphs": ("bugs", 120, (*LSTM, *GRAPHS)),  # the validation losses of both must fall alike
    "fp8 ragged": ("bugs", 120, FP8),
    "fsdp offload": ("bugs", 240, (*GPT, *MIXED, *SHARDS, "parallel.offload=true", "trainer.max_steps=20")),
    "fsdp meta device": (
        "bugs",
        180,
        (*GPT, *MIXED, *SHARDS, "parallel.meta_device=true", "trainer.max_steps=20"),
    ),
    "fsdp pictures": ("bugs", 120, (*CNN, *SHARDS, "trainer.channels_last=true")),
    "gpt plain": ("speed", 120, (*GPT, *MIXED)),
    "gpt one chunk": ("speed", 120, (*GPT, *MIXED, "task.loss_chunks=1")),
    "gpt compile": ("speed", 240, (*GPT, *MIXED, "trainer.compile=model")),
    "gpt step": ("speed", 240, (*GPT, *MIXED, *STEP)),
    "gpt step graphs": ("speed", 240, (*GPT, *MIXED, *STEP, *GRAPHS)),
    "gpt graphs": ("speed", 120, (*GPT, *MIXED, *GRAPHS)),
    "gpt fsdp": ("speed", 180, (*GPT, *MIXED, *SHARDS)),
    "gpt fsdp compiled blocks": ("speed", 300, (*GPT, *MIXED, *SHARDS, "trainer.compile=regional")),
    "gpt fsdp of all GPUs": ("speed", 240, (*GPT, *MIXED, "parallel=fsdp")),
    "gpt muon": ("speed", 120, (*GPT, *MIXED, "optimizer=muon")),
    "gpt full": ("speed", 120, (*GPT, *MIXED, "trainer.gradient_checkpointing=full")),
    "gpt act offload": (
        "speed",
        120,
        (*GPT, "data.batch_size=32", "trainer.activation_offload=true", *SHORT),
    ),
    "cnn plain": ("speed", 90, CNN),
    "cnn bf16 last": ("speed", 90, (*CNN, "precision=bf16-mixed", "trainer.channels_last=true")),
    "cnn graphs": ("speed", 90, (*CNN, *GRAPHS)),
    "mlp plain": ("speed", 60, MLP),
    "mlp graphs": ("speed", 60, (*MLP, *GRAPHS)),
    "mlp reduce-overhead": (
        "speed",
        90,
        (*MLP, "trainer.compile=model", "trainer.compile.mode=reduce-overhead"),
    ),
    "cnn tf32": ("speed", 90, (*CNN, "precision.matmul=high")),
    "mlp step graphs": ("speed", 180, (*MLP, *STEP, *GRAPHS)),
    "preset fast": ("start", 120, ("data=digits", "model=cnn", "preset=fast", "trainer.max_epochs=200")),
}


def one_run(*words: str) -> dict[str, Any]:
    import torch

    import trainrun

    start = time.perf_counter()
    done = trainrun.train(*words)
    rows = done.metrics
    return {
        "state": done.status["state"],
        "seconds": round(time.perf_counter() - start, 2),
        "training_seconds": done.status.get("seconds"),
        "samples_per_second": done.status.get("samples_per_second"),
        "tokens_per_second": done.status.get("tokens_per_second"),
        "mfu": done.status.get("mfu"),
        "step_ms": step_ms([row["step_seconds"] for row in rows if row["kind"] == "train"]),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if torch.cuda.is_available() else None,
        "val": [row.get("val/loss") for row in rows if row["kind"] == "eval"][-8:],
        "notes": [row["text"][:300] for row in rows if row["kind"] == "note"][:6],
        "ledger": [row["seconds"] for row in rows if row["kind"] == "ledger"][-1:],
    }


def step_ms(seconds: list[float]) -> float | None:
    """The milliseconds of a step, from means between log points; the first two hold what happens once."""
    return round(1e3 * statistics.median(seconds[2:]), 3) if len(seconds) > 2 else None


def gpt_by_hand(compiled: bool) -> dict[str, Any]:
    """The steps of "gpt plain" in a loop that only trains: fused AdamW, autocast, a wait every ten steps."""
    import torch
    from torch.nn.functional import cross_entropy

    from trainrun.model.gpt import Gpt

    kind, batch = torch.device(DEVICE).type, 32
    model = Gpt(vocab_size=50304, context=1024, layers=12, width=768, heads=12).to(DEVICE)
    network = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(256, (280, batch, 1025)).to(DEVICE)
    seconds, losses, start = [], [], time.perf_counter()
    for step in range(60):
        with torch.autocast(kind, torch.bfloat16):
            logits = network(tokens[step, :, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 10 == 9:
            torch.stack(losses).mean().item()
            now = time.perf_counter()
            seconds.append((now - start) / 10)
            start = now
    return {"step_ms": step_ms(seconds), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3)}


def auto_chunks_beside_one_piece() -> dict[str, Any]:
    """`task.loss_chunks=auto` on logits that fit, in turns with one piece: at most 1.02 times as long."""
    import torch

    from trainrun.assemble.start_choices import set_output_memory_limit
    from trainrun.comparison.paired import StoppingRules, build_turn, compare_in_turns
    from trainrun.model.gpt import Gpt
    from trainrun.parallel.single import Single
    from trainrun.runtime.machine import wait_for_device
    from trainrun.task.language_modeling import LanguageModeling

    device = torch.device(DEVICE)
    sizes = (50304, 1024, 768) if device.type == "cuda" else (512, 16, 48)
    vocabulary, context, width = sizes
    model = Gpt(vocab_size=vocabulary, context=context, layers=1, width=width, heads=12).to(device)
    tokens = torch.randint(vocabulary, (2, 32, context), device=device)
    chosen: dict[str, str] = {}

    def turn(chunks: Any) -> Callable[[], float]:
        task = LanguageModeling(loss_chunks=chunks)
        set_output_memory_limit(task, model, Single(device), chosen)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = task.step(model, (tokens[0], tokens[1])).loss_sum
            loss.backward()
            wait_for_device(device)

        return build_turn(step)

    comparison = compare_in_turns(
        turn(1), {"auto": turn("auto")}, StoppingRules(first_rounds=12, most_pairs=12)
    )
    ratio = comparison.ratio("auto").inverse()
    return {"auto_over_one_piece": ratio.value, "low": ratio.low, "high": ratio.high, **chosen}


def machine_facts() -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info()
    names = {"torch": torch.__version__, "cuda": torch.version.cuda, "name": torch.cuda.get_device_name()}
    return names | {"free_gb": free / 1e9, "total_gb": total / 1e9, "cpus": os.cpu_count()}


NEAR_WORDS = (
    *GPU, *GPT, "data.batch_size=32", "precision=auto", "trainer.max_steps=4000", "trainer.max_time=60",
)  # fmt: skip


def near_the_limit() -> dict[str, Any]:
    """Bfloat16 fits, float32 does not: the run must go on."""
    import torch

    torch.cuda.set_per_process_memory_fraction(20e9 / torch.cuda.mem_get_info()[1])
    return one_run(*NEAR_WORDS)


SNIPPETS: dict[str, tuple[str, int, Callable[[], dict[str, Any]]]] = {
    "facts": ("smoke", 90, machine_facts),
    "auto near the limit": ("bugs", 150, near_the_limit),
    "gpt by hand": ("speed", 90, lambda: gpt_by_hand(compiled=False)),
    "gpt by hand compiled": ("speed", 120, lambda: gpt_by_hand(compiled=True)),
    "auto chunks": ("speed", 90, auto_chunks_beside_one_piece),
    "large checkpoints": ("last", 180, lambda: one_run(*GPU[:-1], *LARGE)),
}

TRAINRUN = ("-m", "trainrun")
PYTEST = ("-m", "pytest", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "-q")
# words of Python, from the root of the repository or, of the command, from a folder that is thrown away
COMMANDS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "tests": ("smoke", 370, (*PYTEST, "-n", "4", "-m", "gpu and not slow", "--maxfail=30", "tests")),
    "slow tests": ("start", 400, (*PYTEST, "-m", "gpu and slow", "tests")),
    "diagnose gpt": ("start", 150, (*TRAINRUN, "diagnose", "--budget", "60", *GPU, *GPT, *MIXED)),
    "autotune cnn": ("start", 180, (*TRAINRUN, "autotune", "--budget", "60", *GPU, *CNN)),
    "memory checker": ("last", 300, (*TRAINRUN, *GPU, *MLP, *GRAPHS, "trainer.max_steps=20")),
}


def composed_words() -> dict[str, tuple[str, ...]]:
    """The words of a run of every case that has some."""
    found = {name: (*GPU, *words) for name, (_, _, words) in RUNS.items()}
    found |= {"near": NEAR_WORDS, "large": (*GPU[:-1], *LARGE)}
    for name, (_, _, words) in COMMANDS.items():
        if words[:2] == TRAINRUN:
            found[name] = tuple(word for word in words if "=" in word)
    return found


def check() -> int:
    """How many cases have words that this version does not know."""
    from trainrun.config.compose import compose_run

    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        for name, words in composed_words().items():
            try:
                compose_run(list(words))
            except Exception as error:
                faults += 1
                print(f"{name}: {error}")
        os.chdir(before)
    print(f"{len(composed_words())} cases with words, {faults} faults")
    return faults


def cases(wanted: list[str]) -> list[tuple[str, str, int]]:
    """Name, phase and seconds of what is asked for, phase by phase."""
    tables = [(name, *each[:2]) for table in (SNIPPETS, RUNS, COMMANDS) for name, each in table.items()]
    chosen = [case for case in tables if not wanted or case[0] in wanted or case[1] in wanted]
    return sorted(chosen, key=lambda case: PHASES.index(case[1]))


def command_of(name: str) -> list[str]:
    if name not in COMMANDS:
        return [sys.executable, str(SELF), "--one", name]
    checker = [shutil.which("compute-sanitizer") or "compute-sanitizer", "--tool", "memcheck"]
    return [*(checker if name == "memory checker" else []), sys.executable, *COMMANDS[name][2]]


def run_case(name: str, phase: str, seconds: int) -> tuple[dict[str, Any], str]:
    """A row for the results, and all that was printed."""
    start = time.perf_counter()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        place = ROOT if name in COMMANDS and "pytest" in COMMANDS[name][2] else folder
        try:
            done = subprocess.run(
                command_of(name), cwd=place, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, text = 124, (error.stdout or b"").decode(errors="replace")
        except FileNotFoundError as error:
            code, text = 127, str(error)
    found = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
    row = {"case": name, "phase": phase, "rc": code, "wall": round(time.perf_counter() - start, 1)}
    return row | (json.loads(found[-1]) if found else {"end": text[-600:]}), text


def main(words: list[str]) -> int:
    if words == ["--check"]:
        return int(check() > 0)
    if words[:1] == ["--one"]:
        name = words[1]
        found = SNIPPETS[name][2]() if name in SNIPPETS else one_run(*GPU, *RUNS[name][2])
        print("RESULT " + json.dumps(found, default=str))
        return 0
    known = {*PHASES, *(name for name, _, _ in cases([]))}
    if wrong := [word for word in words if word not in known]:
        sys.exit(f"{wrong[0]}: no such phase or case; there are {', '.join(sorted(known))}")
    out = Path(os.environ.get("OUT", "."))
    with (out / "results.jsonl").open("a") as results, (out / "log.txt").open("a") as log:
        for case in cases(words):
            row, text = run_case(*case)
            results.write(json.dumps(row) + "\n")
            log.write(f"=== {row['case']} rc {row['rc']}\n{text[-6000:]}\n")
            results.flush()
            log.flush()
            print(json.dumps(row)[:400], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
