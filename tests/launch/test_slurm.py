"""`launch=slurm` writes a script that Slurm can run, and submits it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.launch.launch_options import LaunchOptions, build_job_words, read_options
from trainrun.launch.slurm import format_script


def fake_program(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def test_options_of_the_command_line() -> None:
    words = [
        "launch=slurm",
        "launch.nodes=2",
        "launch.gpus=8",
        "launch.time=1-00:00:00",
        "launch.partition=main",
    ]
    flags = {"qos": "high", "mem": "64G", "exclusive": True}
    assert read_options([*words, "launch.sbatch={qos: high, mem: 64G, exclusive: true}"]) == LaunchOptions(
        2, 8, "1-00:00:00", "main", flags
    )
    assert read_options(["launch=local"]) is None
    assert read_options(["launch=slurm", "launch.time=UNLIMITED"]) == LaunchOptions(time="UNLIMITED")


@pytest.mark.parametrize(
    "word",
    [
        "launch=slrm",
        "launch.nodes=0",
        "launch.gpus=all",
        "launch.sbatch=qos",
        "launch.node=2",
        "launch.time=",
        "launch.time=soon",
        "launch.image=a",
        "launch.array=0",
        "launch.array=²",
        "launch.time=1:²",
        "launch.sbatch={a: [}",
    ],
)
def test_a_wrong_option_is_refused(word: str) -> None:
    words = [word] if word == "launch=slrm" else ["launch=slurm", word]
    with pytest.raises(ConfigError) as caught:
        read_options(words)
    assert word.partition("=")[0] in str(caught.value)


def test_a_job_has_one_task_a_machine_with_a_rank_for_each_gpu(tmp_path: Path) -> None:
    words = ["optimizer.lr=1e-3", "output_dir=elsewhere"]
    assert build_job_words(LaunchOptions(nodes=2, gpus=8), words, tmp_path) == [
        "optimizer.lr=1e-3", "parallel=ddp", "parallel.devices=8", f"output_dir={tmp_path}"
    ]  # fmt: skip
    assert build_job_words(LaunchOptions(), words, tmp_path) == [
        "optimizer.lr=1e-3",
        f"output_dir={tmp_path}",
    ]
    script = format_script(LaunchOptions(2, 8, sbatch={"requeue": False, "qos": "a b"}), "n", tmp_path, words)
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8",
            "#SBATCH --signal=USR2@300", "#SBATCH --qos='a b'"} <= set(lines)  # fmt: skip
    assert not any("--requeue" in line or "--time" in line for line in lines)


@pytest.mark.parametrize(
    ("time", "warning"),
    [
        ("0:02:00", 60),
        ("2", 60),
        ("1:30", 45),
        ("1:00:00", 300),
        ("1-00", 300),
        (None, 300),
        ("0", 300),
        ("UNLIMITED", 300),
    ],
)
def test_a_job_is_warned_in_the_second_half_of_its_time_at_the_earliest(
    time: str | None, warning: int, tmp_path: Path
) -> None:
    assert f"#SBATCH --signal=USR2@{warning}\n" in format_script(LaunchOptions(time=time), "n", tmp_path, [])


@pytest.mark.parametrize(("code", "requeues"), [(75, True), (0, False), (1, False)])
def test_a_stopped_run_is_queued_again(
    code: int, requeues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_program(tmp_path, "srun", f"exit {code}")
    fake_program(tmp_path, "scontrol", f'echo "$*" > {tmp_path}/scontrol.txt')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    script = tmp_path / "slurm.sh"
    script.write_text(format_script(LaunchOptions(), "n", tmp_path, ["output_dir=run"]))
    assert subprocess.run(["bash", str(script)], check=False).returncode == code
    note = tmp_path / "scontrol.txt"
    assert note.exists() == requeues
    assert not requeues or note.read_text() == "requeue 17\n"


def test_the_command_submits_the_script_of_the_run(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_program(workdir, "sbatch", f'cp "$2" {workdir}/submitted.sh; echo "4711;cluster"')
    monkeypatch.setenv("PATH", str(workdir), prepend=":")
    assert main(["launch=slurm", "launch.nodes=2", "optimizer.lr=0.1", "output_dir=run"]) == 0
    printed = capsys.readouterr().out
    assert "job 4711" in printed
    assert "trainrun watch run" in printed
    (command,) = [line for line in Path("submitted.sh").read_text().splitlines() if line.startswith("srun ")]
    assert shlex.split(command)[-3:] == ["optimizer.lr=0.1", "parallel=ddp", f"output_dir={workdir / 'run'}"]
    assert [path.name for path in Path("run").iterdir()] == ["slurm.sh"]
    assert main(["launch=slurm", "output_dir=run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    script = workdir / "run" / "slurm.sh"
    assert result == {"job": "4711", "script": str(script), "folder": str(script.parent)}
    assert "--json" not in script.read_text()


def test_a_sweep_is_submitted_as_an_array_of_workers(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_program(workdir, "sbatch", f'cp "$2" {workdir}/submitted.sh; echo 4711')
    monkeypatch.setenv("PATH", str(workdir), prepend=":")
    words = ["--multirun", "sweep=random", "sweep.trials=8", "optimizer.lr=interval(0.1,1)"]
    assert main([*words, "launch=slurm", "launch.array=4", "launch.gpus=2", "output_dir=sweep"]) == 0
    assert "trainrun watch sweep" in capsys.readouterr().out
    lines = Path("submitted.sh").read_text().splitlines()
    output = f"#SBATCH --output={workdir / 'sweep' / 'slurm-%a.log'}"
    assert {"#SBATCH --array=0-3", "#SBATCH --gpus-per-node=2", output} <= set(lines)
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert shlex.split(command)[4:] == [*words, f"output_dir={workdir / 'sweep'}"]
    assert [path.name for path in Path("sweep").iterdir()] == ["slurm.sh"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--multirun", "launch=slurm", "launch.nodes=2", "optimizer.lr=1,2"], "launch.nodes=2"),
        (["--multirun", "launch=ray", "optimizer.lr=1,2"], "launch=ray"),
        (["--multirun", "launch=slurm", "optimizer.lr=-1,2"], "optimizer.lr=-1"),
        (["launch=slurm", "launch.array=2"], "launch.array=2"),
    ],
)
def test_an_array_is_of_a_sweep_and_a_sweep_of_single_machines(
    words: list[str], key: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "output_dir=a"]) == 2
    assert key in capsys.readouterr().err
    assert not Path("a").exists()


def test_without_slurm_and_with_a_mistake_nothing_is_submitted(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["launch=slurm", "optimizer.lr=-1", "output_dir=run"]) == 2
    assert not Path("run").exists()
    assert main(["launch=slurm", "output_dir=run"]) == 2
    assert Path("run/slurm.sh").exists()
    assert "sbatch" in capsys.readouterr().err
