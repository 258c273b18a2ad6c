"""`trainrun launch=slurm ...`: write a job script into the run folder and submit it.

What: one Slurm task per machine, which starts the ranks of its machine. Slurm sends SIGUSR2 300 s before the time
    limit; the run saves and exits with code 75, and the script queues the job again. The same settings in the same
    folder continue from the newest checkpoint. A sweep is a job array: each of its jobs joins the sweep and takes
    trials that no other one has. When: a cluster with Slurm and a folder that all machines share. When not: a sweep
    whose trials need several machines. Source: https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainrun.errors import ConfigError, LaunchError
from trainrun.folder.run_folder import write_text
from trainrun.launch.launch_options import LaunchOptions, parse_time_limit
from trainrun.output import format_path_to_paste, report_result, say

WARNING_SECONDS = 300  # from the signal to the time limit
SCRIPT, LOG, ARRAY_LOG = "slurm.sh", "slurm.log", "slurm-%a.log"  # %a: the number of a job in its array


def format_script(options: LaunchOptions, name: str, folder: Path, words: Sequence[str]) -> str:
    """Return the job script. words: the settings of the run or the sweep, with its folder."""
    limit = parse_time_limit(options.time or "")
    warning = min(WARNING_SECONDS, limit // 2) if limit else WARNING_SECONDS  # a short job trains too
    flags = {
        "job-name": name,
        "chdir": Path.cwd(),
        "array": None if options.array is None else f"0-{options.array - 1}",
        "output": folder / (LOG if options.array is None else ARRAY_LOG),
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


def submit_job(options: LaunchOptions, name: str, folder: Path, words: Sequence[str]) -> None:
    """Write the script into the folder of the run or the sweep, submit it, and print the job number.

    words: the settings, with the folder. Raise ConfigError without Slurm, LaunchError if Slurm refuses the job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / SCRIPT
    write_text(script, format_script(options, name, folder, words))
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"launch=slurm: there is no sbatch on this machine; the script is written: {script}"
        )
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(f"launch=slurm: sbatch refused {script}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    say(f"job {job} is submitted: {format_path_to_paste(script)}")
    say(f"follow it with: trainrun watch {format_path_to_paste(folder)}")
    report_result(job=job, script=str(script), folder=folder)
