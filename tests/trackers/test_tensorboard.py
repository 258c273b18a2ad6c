"""The TensorBoard tracker in real runs: its event file is read back, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from things import rows_of

from trainrun.cli.main import main
from trainrun.trackers.sender import iterate_scalars
from trainrun.trackers.tensorboard import TensorBoard

pytestmark = pytest.mark.process

WORDS = [
    "monitor.tracker=tensorboard", "monitor.log_every_n_steps=2", "monitor.histograms_every_n_steps=4",
    "monitor.progress_bar=false", "trainer.num_threads=1", "output_dir=run",
]  # fmt: skip


def curves_of(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_the_event_file_has_the_rows_of_the_run_and_goes_on_after_a_resume(workdir: Path) -> None:
    assert main([*WORDS, "trainer.max_steps=6"]) == 0
    assert main(["resume", "run", "trainer.max_steps=10"]) == 0
    found = curves_of(workdir / "run" / "tensorboard")
    for name in ("train/loss", "lr"):
        told = {row["step"]: row[name] for row in rows_of(workdir / "run", "train")}
        assert {event.step: event.value for event in found.Scalars(name)} == pytest.approx(told, rel=1e-6)
    assert [event.step for event in found.Scalars("train/loss")] == [2, 4, 6, 8, 10]
    assert found.Scalars("val/acc")[-1].value == pytest.approx(
        rows_of(workdir / "run", "eval")[-1]["val/acc"]
    )
    assert {"hardware/memory_bytes", "phases/forward", "samples_per_second"} <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Histograms("gradients/layers.1.weight")] == [4, 8]
    assert found.Histograms("weights/layers.1.weight")[-1].histogram_value.num == 64 * 256
    assert "plots/loss" in found.Tags()["images"]
    (config, *_) = found.Tensors("config/text_summary")
    assert b'"batch_size": 32' in config.tensor_proto.string_val[0]


def test_a_life_before_the_first_checkpoint_and_rows_that_are_sent_again_leave_nothing_double(
    workdir: Path,
) -> None:
    run = {"name": "run", "run_id": "1", "folder": str(workdir), "config": {}}
    for last in (6, 4, 4):
        board = TensorBoard()
        board.open(run, 0)
        for step in range(last):
            board.scalars({"loss": 1.0}, step, 1.0)
        board.finish()
    assert [event.step for event in curves_of(workdir / "tensorboard").Scalars("loss")] == [0, 1, 2, 3]


def test_runs_that_share_a_place_have_a_folder_each(workdir: Path) -> None:
    for number, start in (("1", 0), ("2", 0), ("1", 3)):
        board = TensorBoard(str(workdir / "boards"))
        board.open({"name": "run", "run_id": number, "folder": str(workdir), "config": {}}, start)
        for step in range(start + 1, start + 6):
            board.scalars({"loss": float(number)}, step, 1.0)
        board.finish()
    for number, last in (("1", 8), ("2", 5)):
        found = curves_of(workdir / "boards" / f"run-{number}").Scalars("loss")
        assert [(event.step, event.value) for event in found] == [
            (step, float(number)) for step in range(1, last + 1)
        ]


def test_what_is_no_number_is_no_curve() -> None:
    assert list(iterate_scalars({"kind": "end", "step": 1, "time": 0.0, "summary": {"value": 1.0}})) == []
    assert dict(iterate_scalars({"kind": "eval", "step": 1, "time": 0.0, "val/loss": 2.0})) == {
        "val/loss": 2.0
    }
