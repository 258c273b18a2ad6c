"""Plant known mistakes, one at a time, and see that the tests of their rooms notice each of them.

    python scripts/mutants.py                    every mistake of the table
    python scripts/mutants.py padding int8       those whose name has one of these words

Each mistake is planted in a temporary copy of the repository, where the named tests then run. The exit code is 1 if a
mistake survives: a test is missing. To add one: a row in `MUTANTS`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
COPIED: Final = ("trainrun", "conf", "tests", "scripts", "pyproject.toml", "README.md")
TESTS_FAILED: Final = 1  # pytest's exit code


class Mutant(NamedTuple):
    """A mistake: `old`, which the room (a folder or a file) has once, becomes `new`. tests: at least one then fails."""

    name: str
    room: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS: Final = (
    Mutant(
        "a batch over all ranks is divided by the ranks of one machine",
        "trainrun/assemble",
        "return replace_values(config, {ACCUMULATION: wanted // batch_of_ranks})",
        "return replace_values(config, {ACCUMULATION: wanted // config.data.batch_size})",
        ("tests/assemble/test_run_plan.py",),
    ),
    Mutant(
        "a length that is not a whole number of epochs is rounded down",
        "trainrun/assemble",
        "return math.ceil(amount * lengths.steps_per_epoch - 1e-9)",
        "return math.floor(amount * lengths.steps_per_epoch)",
        ("tests/assemble/test_run_plan.py", "tests/training/test_durations.py"),
    ),
    Mutant(
        "a resumed run chooses the pieces of its logits anew",
        "trainrun/assemble",
        'names = ("precision", "logits_bytes", ',
        'names = ("precision", ',
        ("tests/assemble/test_limit_outputs.py::test_resumed_run_takes_the_same_pieces",),
    ),
    Mutant(
        "momentum has no memory in the forecast",
        "trainrun/autotune",
        "    numbers = 1 if isinstance(optimizer, SGD) else 2  # at most, for each weight\n",
        "    numbers = 1\n",
        ("tests/autotune/test_forecast.py",),
    ),
    Mutant(
        "the memory of a step is that of a small batch",
        "trainrun/autotune",
        "return gradients, sum(saved.values()) * count // min(ROWS, count), state",
        "return gradients, sum(saved.values()), state",
        ("tests/autotune/test_forecast.py",),
    ),
    Mutant(
        "autotune does not try data.cache=memory",
        "trainrun/benchmark",
        "else (CACHE, WORKERS_BY_RULE)",
        "else (WORKERS_BY_RULE,)",
        ("tests/benchmark/test_tuner.py::test_slow_items_are_thirteen_times_faster_from_memory",),
    ),
    Mutant(
        "autotune uses what changes the training without being asked to",
        "trainrun/benchmark",
        "faster = [trial for trial in trials if trial.is_faster and self.is_allowed(trial.remedy)]",
        "faster = [trial for trial in trials if trial.is_faster]",
        (
            "tests/benchmark/test_tuner.py::test_remedy_that_changes_the_training_is_measured_but_used_only_if_allowed",
        ),
    ),
    Mutant(
        "diagnose takes the interval of saves for steps",
        "trainrun/benchmark",
        "saves_a_step += step_seconds / seconds",
        "saves_a_step += 1 / seconds",
        (
            "tests/benchmark/test_diagnosis.py::test_cost_of_checkpoints_is_that_of_one_over_the_steps_between_two",
        ),
    ),
    Mutant(
        "the claim of autotune has an interval of 50 %",
        "trainrun/benchmark",
        "SURE: Final = 0.99",
        "SURE: Final = 0.50",
        ("tests/benchmark/test_tuner.py::test_claim_holds_the_truth_however_much_processes_differ",),
    ),
    Mutant(
        "the test of learning rates gives every group the same one",
        "trainrun/benchmark",
        "set_lr(group, peak * rate / self._peaks[0])",
        "set_lr(group, rate)",
        ("tests/benchmark/test_finders.py::test_groups_keep_their_proportions_in_every_step",),
    ),
    Mutant(
        "a checkpoint has the hash of its first piece",
        "trainrun/checkpoint",
        "                content.update(piece)\n                size += ",
        "                content.update(piece) if not size else None\n                size += ",
        ("tests/checkpoint/test_files.py",),
    ),
    Mutant(
        "a checkpoint is not on the disk when its folder is renamed",
        "trainrun/checkpoint",
        "            os.fsync(file.fileno())\n",
        "            pass\n",
        ("tests/checkpoint/test_files.py", "tests/checkpoint/test_faults.py"),
    ),
    Mutant(
        "the worst checkpoint is kept as the best",
        "trainrun/checkpoint",
        'self._sign = -1.0 if mode == "max" else 1.0',
        'self._sign = 1.0 if mode == "max" else -1.0',
        ("tests/checkpoint/test_keep.py",),
    ),
    Mutant(
        "clear removes no cache",
        "trainrun/cli",
        "removed = [cache for cache in caches if cache.remove()]",
        "removed = [cache for cache in caches if cache.is_in_use()]",
        ("tests/data/cache", "tests/cli"),
    ),
    Mutant(
        "several values of a sweep are one path",
        "trainrun/config",
        'if "," in _BRACES.sub("", value) and all(parts)',
        'if "," not in _BRACES.sub("", value) and all(parts)',
        ("tests/config/test_path_words.py",),
    ),
    Mutant(
        "a continued conversion writes the first samples into the files that are missing",
        "trainrun/convert",
        "ranges = [range(shard.begin, shard.end) for shard in missing]",
        "ranges = [range(0, shard.end - shard.begin) for shard in missing]",
        ("tests/convert/test_stops.py",),
    ),
    Mutant(
        "a converted array has a row too few",
        "trainrun/convert",
        "                    begin += len(rows)\n",
        "                    begin += 1\n",
        ("tests/convert",),
    ),
    Mutant(
        "a filler batch counts",
        "trainrun/data",
        "return begin, min(begin + self.batch_size, size), real",
        "return begin, min(begin + self.batch_size, size), True",
        ("tests/data/test_order.py",),
    ),
    Mutant(
        "an epoch has the order of the epoch before",
        "trainrun/data",
        "return epoch if self.training else 0",
        "return 0",
        ("tests/data/test_order.py",),
    ),
    Mutant(
        "an epoch over many samples repeats some of them",
        "trainrun/data",
        "        while len(outside):\n",
        "        if len(outside):\n",
        ("tests/data/test_permutation.py",),
    ),
    Mutant(
        "ranks lose a sample of a batch that does not come out even",
        "trainrun/data",
        "    return begin, begin + base + (rank < extra)\n",
        "    return begin, begin + base\n",
        ("tests/data/test_order.py",),
    ),
    Mutant(
        "embeddings of a resumed command are of other samples",
        "trainrun/embedding",
        "iter(self._stream.epoch(0, number)), number",
        "iter(self._stream.epoch(0, 0)), number",
        ("tests/embedding",),
    ),
    Mutant(
        "samples are embedded from another place of their batch",
        "trainrun/embedding",
        "place = index % self._size",
        "place = (index + 1) % self._size",
        ("tests/embedding",),
    ),
    Mutant(
        "an export has no augmentations of an evaluation",
        "trainrun/export",
        "        for key, change, _ in self.changes:\n"
        "            first = change((first,), self.draws.derive(key))[0]\n",
        "",
        ("tests/export/test_export.py",),
    ),
    Mutant(
        "an exported network scales nothing",
        "trainrun/export",
        "            first = self.scale(first).to(self.dtype)\n",
        "            first = first.to(self.dtype)\n",
        ("tests/export/test_export.py",),
    ),
    Mutant(
        "a key that others can read is used",
        "trainrun/folder",
        "facts.st_mode & 0o077",
        "facts.st_mode & 0o000",
        ("tests/runs/test_seal.py",),
    ),
    Mutant(
        "a link out of a run folder is not sealed",
        "trainrun/folder",
        "                if not Path(target).is_relative_to(root.resolve()):\n",
        "                if Path(target).is_relative_to(root.resolve()):\n",
        ("tests/runs/test_seal.py",),
    ),
    Mutant(
        "histograms are of the gradients of another step",
        "trainrun/hook",
        "(run.monitors.step + 1) % self._every == 0",
        "run.monitors.step % self._every == 0",
        ("tests/hook/test_histograms.py::test_gradients_are_those_of_the_step_of_their_row",),
    ),
    Mutant(
        "unfrozen weights come one step late",
        "trainrun/hook",
        "self._frozen.set(run.model, self._after is None or done < self._after)",
        "self._frozen.set(run.model, self._after is None or done <= self._after)",
        ("tests/transform/test_lora_and_freeze.py", "tests/hook"),
    ),
    Mutant(
        "an upper limit of a setting is not checked",
        "trainrun/limits.py",
        "            or (self.at_most is not None and value > self.at_most)\n",
        "",
        ("tests/config/test_schema.py", "tests/config/test_compose.py", "tests/config/test_arguments.py"),
    ),
    Mutant(
        "a VAE draws with the variance as deviation",
        "trainrun/model",
        "mean + (0.5 * log_var).exp() * noise",
        "mean + log_var.exp() * noise",
        ("tests/model/test_networks.py",),
    ),
    Mutant(
        "plain attention sees the next token",
        "trainrun/model",
        ".triu_(1)\n",
        ".triu_(2)\n",
        ("tests/model/test_sequences.py",),
    ),
    Mutant(
        "a damaged last line is a row",
        "trainrun/monitor",
        "    except ValueError:\n        return\n    yield last\n",
        '    except ValueError:\n        yield ("", {})\n        return\n    yield last\n',
        ("tests/monitor", "tests/runs/test_damaged_folder.py"),
    ),
    Mutant(
        "a resume keeps the validation that it makes again",
        "trainrun/monitor",
        "last = step if validated else step - 1",
        "last = step",
        ("tests/monitor", "tests/runs/test_resume.py"),
    ),
    Mutant(
        "the first weights stay in the average",
        "trainrun/optimizer",
        "self._average_weights(newest=(1 - self._decay) / (1 - self._decay**num_looks))",
        "self._average_weights(newest=1 - self._decay)",
        ("tests/optimizer/test_ema.py",),
    ),
    Mutant(
        "the head has the rate of the last block",
        "trainrun/optimizer",
        "depth = latest if latest < num_layers else num_layers + 1",
        "depth = latest",
        ("tests/optimizer/test_groups.py",),
    ),
    Mutant(
        "Slurm gives each rank the number of its node",
        "trainrun/parallel",
        'env["RANK"] = env["SLURM_PROCID"]',
        'env["RANK"] = env["SLURM_LOCALID"]',
        ("tests/parallel/test_external.py",),
    ),
    Mutant(
        "more ranks than GPUs are started",
        "trainrun/parallel",
        "if 0 < num_gpus < devices:",
        "if num_gpus < 0 < devices:",
        ("tests/parallel/test_devices.py",),
    ),
    Mutant(
        "a curve is averaged over values that came later",
        "trainrun/plots",
        "sums[age:] += share * values[:last]",
        "sums[:last] += share * values[age:]",
        ("tests/plots/test_series.py",),
    ),
    Mutant(
        "a value that is not finite is part of an average",
        "trainrun/plots",
        "totals[age:] += share * finite[:last]",
        "totals[age:] += share",
        ("tests/plots/test_series.py",),
    ),
    Mutant(
        "a gradient that is not finite is applied",
        "trainrun/precision",
        "return math.fsum(reduce_any(flag).item() for flag in flags.values()) != 0",
        "return math.fsum(reduce_any(flag).item() for flag in flags.values()) > 1",
        ("tests/precision/test_loss_scaling.py", "tests/precision/test_guarded.py"),
    ),
    Mutant(
        "norms of several types are added up",
        "trainrun/precision",
        "norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))",
        "norm: Tensor = torch.stack(norms).sum()",
        ("tests/precision/test_gradients.py",),
    ),
    Mutant(
        "SIGTERM is taken for Ctrl-C",
        "trainrun/runtime",
        "            self.request = STOP_AGAIN\n",
        "            self.request = STOP_INTERRUPTED\n",
        ("tests/runtime/test_signals.py",),
    ),
    Mutant(
        "a signal that is ignored is caught",
        "trainrun/runtime",
        "caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]",
        "caught = list(STOP_SIGNALS)",
        ("tests/runtime/test_signals.py",),
    ),
    Mutant(
        "a full context drops one token alone",
        "trainrun/sampling",
        "start = seen = len(tokens) - max(1, context // 2)",
        "start = seen = len(tokens) - context",
        ("tests/sampling/test_next_tokens.py",),
    ),
    Mutant(
        "a temperature of 0 draws",
        "trainrun/sampling",
        "    if options.temperature == 0:\n        return int(logits.argmax())\n",
        "    if options.temperature == 0:\n        return int(logits.argmin())\n",
        ("tests/sampling/test_next_tokens.py",),
    ),
    Mutant(
        "cosine falls to its end in half of the steps",
        "trainrun/scheduler",
        "math.cos(math.pi * _compute_progress(step, total_steps))",
        "math.cos(2 * math.pi * _compute_progress(step, total_steps))",
        ("tests/scheduler/test_schedule.py",),
    ),
    Mutant(
        "the first update of a warmup has no learning rate",
        "trainrun/scheduler",
        "factor = start + (1 - start) * (self._count + 1) / self.warmup_steps",
        "factor = start + (1 - start) * self._count / self.warmup_steps",
        ("tests/scheduler/test_schedule.py",),
    ),
    Mutant(
        "pruned networks are cut where outputs are added",
        "trainrun/smaller",
        "        root.writers += added.writers\n",
        "",
        ("tests/smaller/test_smaller.py",),
    ),
    Mutant(
        "quantize and prune print microseconds as milliseconds",
        "trainrun/smaller",
        "1e3 / speed",
        "1e6 / speed",
        ("tests/smaller/test_smaller.py::test_table_shows_milliseconds_a_sample_and_samples_a_second",),
    ),
    Mutant(
        "one graph for a task that keeps state",
        "trainrun/step",
        "    if informed or saves_whole_state(task):\n",
        "    if informed:\n",
        ("tests/runs/test_task_state.py", "tests/step/test_whole_step.py"),
    ),
    Mutant(
        "padding_fraction returns the useful part",
        "trainrun/summary",
        "return 1 - useful / max(positions, 1)",
        "return useful / max(positions, 1)",
        ("tests/runs/test_throughput_limits.py::test_the_share_of_padding_is_counted",),
    ),
    Mutant(
        "the backward of an LSTM is not counted",
        "trainrun/summary",
        "return 2 * _recurrent_flops(inputs, weight_in, weight_back)",
        "return 0",
        ("tests/runs/test_flops.py",),
    ),
    Mutant(
        "the best job of a sweep stands last",
        "trainrun/sweep",
        "value = (result.value or 0.0) * result.sign",
        "value = (result.value or 0.0) * -result.sign",
        ("tests/sweep",),
    ),
    Mutant(
        "the interval of a mean is that of a sum",
        "trainrun/sweep",
        "return half_interval([value - mean for value in values]) / len(values)",
        "return half_interval([value - mean for value in values])",
        ("tests/sweep",),
    ),
    Mutant(
        "balanced classes weigh by their number",
        "trainrun/task",
        "return [sum(counts) / (len(counts) * count) for count in counts]",
        "return [len(counts) * count / sum(counts) for count in counts]",
        ("tests/task",),
    ),
    Mutant(
        "cyclical annealing rises over whole cycles",
        "trainrun/task",
        "return self.beta * min(1.0, (place - math.floor(place)) / self._ratio)",
        "return self.beta * min(1.0, place - math.floor(place))",
        ("tests/task/test_vae.py",),
    ),
    Mutant(
        "logits are made in pieces while they fit",
        "trainrun/task",
        "if limit_bytes is None or needed_bytes <= limit_bytes:",
        "if limit_bytes is None or 2 * needed_bytes <= limit_bytes:",
        ("tests/task/test_chunked_loss.py::test_step_takes_one_piece_up_to_the_limit",),
    ),
    Mutant(
        "a comparison ends at the first look that seems clear",
        "trainrun/comparison",
        "EARLY: Final = 0.99",
        "EARLY: Final = 0.50",
        (
            "tests/comparison/test_coverage.py::test_no_candidate_is_taken_more_often_than_allowed_where_none_is_faster",
        ),
    ),
    Mutant(
        "an interval has the normal distribution's width",
        "trainrun/comparison",
        "half = student_quantile(confidence, count - 1) * stdev",
        "half = student_quantile(confidence, 100_000) * stdev",
        ("tests/comparison/test_coverage.py::test_interval_over_processes_covers_what_it_claims",),
    ),
    Mutant(
        "turns of all processes count as processes",
        "trainrun/comparison",
        "logs = [median(math.log(second / first) for first, second in pairs) for pairs in groups]",
        "logs = [math.log(second / first) for pairs in groups for first, second in pairs]",
        ("tests/comparison/test_coverage.py::test_interval_over_processes_covers_what_it_claims",),
    ),
    Mutant(
        "MLflow gets seconds as milliseconds",
        "trainrun/trackers",
        "at = int(1000 * seconds)",
        "at = int(seconds)",
        ("tests/trackers/test_services.py::test_mlflow_gets_times_in_milliseconds",),
    ),
    Mutant(
        "the rate of a validation row is a curve of training",
        "trainrun/trackers",
        'if kind == "eval" and name.startswith("train/"):',
        'if kind == "test" and name.startswith("train/"):',
        ("tests/trackers",),
    ),
    Mutant(
        "a batch without items of its own moves the weights",
        "trainrun/training",
        "precision.backward(loss, batch.real / (agreed.items or counting.expected))",
        "precision.backward(loss, 1 / (agreed.items or counting.expected))",
        ("tests/training/test_counting.py::test_batch_of_another_rank_adds_nothing_to_the_gradient",),
    ),
    Mutant(
        "a distance in steps is passed one step late",
        "trainrun/training",
        "return after // self.amount > before // self.amount",
        "return after // self.amount > before // self.amount + 1",
        ("tests/training/test_durations.py", "tests/training/test_triggers.py"),
    ),
    Mutant(
        "a run ends one epoch late",
        "trainrun/training",
        "return state.epoch >= self.amount\n",
        "return state.epoch > self.amount\n",
        ("tests/training/test_durations.py::test_run_without_known_epoch_length_ends_after_its_epochs",),
    ),
    Mutant(
        "a validation counts the items of its last batch alone",
        "trainrun/training",
        "items = items + batch.count_items(task)",
        "items = batch.count_items(task)",
        ("tests/data/test_limited_evaluation.py", "tests/runs/test_exactness.py", "tests/training"),
    ),
    Mutant(
        "losses with a late count are divided by the items of one rank",
        "trainrun/training",
        "mean = total / self._parallel.world_size",
        "mean = total",
        ("tests/training/test_counting.py", "tests/runs/test_exactness.py"),
    ),
    Mutant(
        "LoRA ignores its rank",
        "trainrun/transform",
        "self.scale, self.dropout = alpha / rank, dropout",
        "self.scale, self.dropout = alpha, dropout",
        ("tests/transform/test_lora_and_freeze.py",),
    ),
    Mutant(
        "a frozen batch norm goes on counting",
        "trainrun/transform",
        "                layer.train = partial(keep_mode, layer)  # type: ignore[method-assign]\n",
        "",
        ("tests/transform/test_lora_and_freeze.py",),
    ),
    Mutant(
        "a merged LoRA layer has its correction twice",
        "trainrun/transform",
        "weight.copy_(weight.to(wide) + self.scale *",
        "weight.copy_(weight.to(wide) + 2 * self.scale *",
        ("tests/transform/test_lora_and_freeze.py",),
    ),
    Mutant(
        "int8 weights have 31 levels to each side",
        "trainrun/transform",
        "LARGEST = 127",
        "LARGEST = 31",
        ("tests/smaller/test_smaller.py::test_weights_use_all_levels_of_a_byte",),
    ),
    Mutant(
        "a difference that is no number passes",
        "trainrun/verify",
        'worst = max(worst, difference if difference == difference else float("inf"))',
        "worst = max(worst, difference)",
        ("tests/verify/test_certificates.py::test_trees_and_tensors_are_compared_bit_by_bit",),
    ),
    Mutant(
        "two trees with other names are the same",
        "trainrun/verify",
        "        names = [*left, *(name for name in right if name not in left)]\n",
        "        names = [name for name in left if name in right]\n",
        ("tests/verify/test_certificates.py::test_trees_and_tensors_are_compared_bit_by_bit",),
    ),
    Mutant(
        "a thinned curve loses its newest point",
        "trainrun/live",
        "del points[-3::-2]  # the newest stays",
        "del points[-1::-2]",
        ("tests/watch",),
    ),
    Mutant(
        "the seconds left follow all of the run",
        "trainrun/live",
        "by_steps: float = (total - last) * (now - began) / (last - first)",
        "by_steps: float = total * (now - began) / (last - first)",
        ("tests/watch",),
    ),
)


def copy_repository(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def find_file(mutant: Mutant, folder: Path) -> Path:
    """Return the file of the room that has the text to be replaced. Raise RuntimeError unless there is it once."""
    room = folder / mutant.room
    files = sorted(room.rglob("*.py")) if room.is_dir() else [room]
    counts = {file: file.read_text(encoding="utf-8").count(mutant.old) for file in files}
    if sum(counts.values()) != 1:
        raise RuntimeError(f"{mutant.name}: {mutant.room} has {sum(counts.values())} times: {mutant.old}")
    return max(counts, key=lambda file: counts[file])


def survives(mutant: Mutant, folder: Path) -> bool:
    """Plant a mistake in the copy, run its tests, and take it out again.

    Raises RuntimeError if the mistake cannot be planted, or if the tests cannot run.
    """
    path = find_file(mutant, folder)
    text = path.read_text(encoding="utf-8")
    write_module(path, text.replace(mutant.old, mutant.new))
    try:
        done = run_tests(mutant.tests, folder)
    finally:
        write_module(path, text)
    if done.returncode not in (0, TESTS_FAILED):
        raise RuntimeError(
            f"{mutant.name}: its tests do not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0


def write_module(path: Path, text: str) -> None:
    """Write a module, and remove its compiled form, which Python takes for current if time and size are the same."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(tests: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of the names of the mistakes to plant; all without")
    wanted = parser.parse_args().words
    chosen = [one for one in MUTANTS if not wanted or any(word in one.name for word in wanted)]
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_repository(folder)
        for mutant in chosen:
            survived = survives(mutant, folder)
            survivors += survived
            print(f"{'SURVIVES' if survived else 'killed':<9} {mutant.name} ({mutant.room})", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mistakes were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
