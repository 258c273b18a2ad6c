"""Switches of the whole process: what they do, and that a run leaves them as they were."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

import trainrun as package
from trainrun.assemble.backends import OF_TORCH, restore_backends, set_backends
from trainrun.config.compose import compose_run
from trainrun.config.schema import RunConfig
from trainrun.parallel.single import Single

SHORT = ("trainer.max_steps=2", "monitor.plots=false", "trainer.num_threads=1")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restore_backends():
        yield


def switched(*words: str) -> RunConfig:
    config = compose_run(["model=mlp", *words]).config
    set_backends(config, Single(torch.device("cpu")))
    return config


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
        with restore_backends():
            warnings.warn(f"{OF_TORCH} but not enabled. Consider setting ...", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(one.message) for one in heard] == ["another"]
