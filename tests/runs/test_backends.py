"""Switches of the whole process: what they do, and that a run leaves them as they were."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

import trainrun as package
from trainrun.assemble.backends import OF_TORCH, SMALLEST, flushes_denormal, kept_backends, set_backends
from trainrun.config.compose import compose_run
from trainrun.config.schema import RunConfig
from trainrun.parallel.single import Single
from trainrun.runs.exceptional.go_on import resume_run

SHORT = ("trainer.max_steps=2", "monitor.plots=false", "trainer.num_threads=1")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with kept_backends():
        yield


def switched(*words: str) -> RunConfig:
    config = compose_run(["model=mlp", *words]).config
    set_backends(config, Single(torch.device("cpu")))
    return config


def test_small_numbers_stay_unless_they_are_flushed():
    switched()
    assert not flushes_denormal()
    switched("trainer.flush_denormal=true")
    assert flushes_denormal()
    assert float(torch.tensor(SMALLEST) * 1.0) == 0.0


def state() -> list[object]:
    backends = torch.backends
    parts = (getattr(backends.mkldnn, "matmul", None), backends.cuda.matmul)  # the former since torch 2.9
    names = [getattr(part, "fp32_precision", None) for part in parts]
    return [*names, torch.get_float32_matmul_precision(), flushes_denormal(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled()]  # fmt: skip


@pytest.mark.usefixtures("said_threads")
@pytest.mark.parametrize("words", [(), ("precision.matmul=medium", "trainer.flush_denormal=true")])
def test_a_run_leaves_the_process_as_it_was(words: tuple[str, ...], workdir: object):
    torch.set_num_threads(2)
    before = state()
    package.train(*SHORT, *words)
    assert state() == before


def test_a_process_that_speaks_the_newer_words_can_train(workdir: object):
    """Torch refuses to read its older setting where the newer one was made."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch before 2.9")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    package.train(*SHORT)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_flushed_runs_resume_bit_for_bit(workdir: object):
    words = ("trainer.flush_denormal=true", "seed=3", "trainer.num_threads=1", "monitor.plots=false")
    whole = package.train(*words, "trainer.max_steps=60")
    half = package.train(*words, "trainer.max_steps=30")
    assert resume_run(half.files, ["trainer.max_steps=60"], []) == 0
    pairs = zip(whole.load_model("last").parameters(), half.load_model("last").parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_run_on_a_gpu_leaves_the_next_one_free_to_be_deterministic(monkeypatch: pytest.MonkeyPatch):
    """Torch looks once in the life of a process, at its first product on a GPU."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    notes = set_backends(compose_run(["model=mlp"]).config, Single(torch.device("cuda")))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert any("precision.matmul=high lets this GPU" in note for note in notes)


@pytest.mark.process  # the compiler's, on some versions
def test_what_torch_advises_in_its_own_words_is_not_shown():
    from torch._inductor import compile_fx

    assert OF_TORCH in inspect.getsource(compile_fx._warn_tf32_disabled)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with kept_backends():
            warnings.warn(f"{OF_TORCH} but not enabled. Consider setting ...", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(one.message) for one in heard] == ["another"]
