"""`trainrun launch=slurm ...`: write a job script into the run folder and submit it.

What: one Slurm task per machine, which starts the ranks of its machine. Slurm sends SIGUSR2 300 s before the time
    limit; the run saves and exits with code 75, and the script queues the job again. The same settings in the same
    folder continue from the newest checkpoint. When: a cluster with Slurm and a folder that all machines share. When
    not: a sweep; submit each of its jobs. Source: https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainrun.config.validate import nearest
from trainrun.errors import ConfigError, LaunchError
from trainrun.folder.run_folder import write_text
from trainrun.output import path_to_paste, say

WARNING_SECONDS = 300  # from the signal to the time limit
SCRIPT, LOG = "slurm.sh", "slurm.log"


NO_LIMIT = ("0", "unlimited", "infinite")


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a Slurm job. nodes: machines. gpus: per machine, one rank each. sbatch: further flags by their long
    names.
    """

    nodes: int = 1
    gpus: int | None = None
    time: str | None = None
    partition: str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)


def read_options(words: Sequence[str]) -> SlurmOptions | None:
    """Return the options in settings such as `launch.nodes=2`; None for launch=local. Raise ConfigError."""
    values: dict[str, Any] = {}
    faults = []
    kind = "local"
    for word in words:
        key, _, text = word.partition("=")
        name = key.partition(".")[2]
        if key == "launch":
            kind = text
        elif name in ("nodes", "gpus") and text.isdigit() and int(text) > 0:
            values[name] = int(text)
        elif name in ("nodes", "gpus"):
            faults.append(f"{word}: must be a whole number, 1 or more")
        elif name in ("time", "partition") and text:
            values[name] = text
        elif name == "sbatch" and isinstance(flags := yaml.safe_load(text.replace("=", ": ")), dict):
            values[name] = flags
        elif name == "sbatch":
            faults.append(f"{word}: must be flags of sbatch, as launch.sbatch={{qos: high, mem: 64G}}")
        else:
            fields = [f"launch.{field}" for field in SlurmOptions.__dataclass_fields__]
            faults.append(f"{word}: no such setting of a launch.{nearest(key, fields)}")
    time = values.get("time", "0")
    if time.lower() not in NO_LIMIT and limit_seconds(time) is None:
        faults.append(f"launch.time={time}: must be as Slurm has it: 90 (minutes), 1:30:00 or 2-12:00:00")
    if kind not in ("local", "slurm"):
        faults.append(f"launch={kind}: must be local or slurm")
    elif kind == "local" and values:
        faults.append(f"{words[0]}: is a setting of a cluster; add launch=slurm")
    if faults:
        raise ConfigError(*faults)
    return SlurmOptions(**values) if kind == "slurm" else None


def limit_seconds(text: str) -> int | None:
    """Return the seconds of a Slurm time limit; None if the text is not one.

    Formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
        days-hours:minutes:seconds.
    """
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = ([0, *numbers, 0] if len(numbers) == 1 else [0, *numbers])[-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def format_script(options: SlurmOptions, name: str, folder: Path, words: Sequence[str]) -> str:
    """Return the job script. words: the settings of the run, with its folder."""
    limit = limit_seconds(options.time or "")
    warning = min(WARNING_SECONDS, limit // 2) if limit else WARNING_SECONDS  # a short job trains too
    flags = {
        "job-name": name,
        "chdir": Path.cwd(),
        "output": folder / LOG,
        "open-mode": "append",
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus,
        "time": options.time,
        "partition": options.partition,
        "signal": f"USR2@{warning}",
        "requeue": True,
    } | options.sbatch
    lines = [
        f"#SBATCH --{flag}" if value is True else f"#SBATCH --{flag}={shlex.quote(str(value))}"
        for flag, value in flags.items()
        if value is not None and value is not False
    ]
    command = shlex.join([sys.executable, "-m", "trainrun", *words])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Submit it again by: sbatch {shlex.quote(str(folder / SCRIPT))}",
            *lines,
            "",
            '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            f"srun {command}",
            "code=$?",
            "if [ $code = 75 ]; then  # stopped and saved: go on later",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
            "",
        ]
    )


def words_of_job(options: SlurmOptions, words: Sequence[str], folder: Path) -> list[str]:
    """Return the settings of the run, with its folder and the number of ranks per machine."""
    keys = {word.partition("=")[0] for word in words}
    added = []
    if "parallel" not in keys and (options.nodes > 1 or (options.gpus or 1) > 1):
        added.append("parallel=ddp")
    if options.gpus is not None and "parallel.devices" not in keys:
        added.append(f"parallel.devices={options.gpus}")
    kept = [word for word in words if word.partition("=")[0] not in ("output_dir", "hydra.run.dir")]
    return [*kept, *added, f"output_dir={folder}"]


def submit(options: SlurmOptions, name: str, folder: Path, words: Sequence[str]) -> None:
    """Write the script into the run folder, submit it, and print the job number.

    Raise ConfigError without Slurm, LaunchError if Slurm refuses the job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / SCRIPT
    write_text(script, format_script(options, name, folder, words_of_job(options, words, folder)))
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"launch=slurm: there is no sbatch on this machine; the script is written: {script}"
        )
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(f"launch=slurm: sbatch refused {script}: {done.stderr.strip()}")
    say(f"job {done.stdout.strip().partition(';')[0]} is submitted: {path_to_paste(script)}")
    say(f"follow it with: trainrun watch {path_to_paste(folder)}")
