"""When `trainer.compile=auto` compiles, and what is refused beside `step`."""

from __future__ import annotations

import pytest
import torch
from approved import refused

from trainrun.assemble.model_and_transforms import choose_compile_scope
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError
from trainrun.transform.compile import gpu_compiler_problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("words", "weights", "steps", "device", "scope", "said"),
    [
        ([], 9_610, 100_000, CPU, "step", "100,000 steps x 0.1 ms = 10.0 s saved > 6.5 s"),
        ([], 9_610, 10_000, CPU, "off", "= 1.0 s saved <= 6.5 s"),
        ([], 10_000_000, 10**6, CPU, "off", "tiny steps only"),
        (["precision=16"], 9_610, 10**6, CPU, "off", "precision=16-mixed"),
        ([], 10_000_000, 10**5, CUDA, "model", "> 30 s"),
        ([], 10_000_000, 100, CUDA, "off", "<= 30 s"),
        ([], 9_610, 10**6, CUDA, "off", "a small network on a GPU"),
        ([], 9_610, None, CPU, "off", "is not known"),
    ],
)
def test_auto_compiles_where_it_is_paid_back(
    words: list[str], weights: int, steps: int | None, device: torch.device, scope: str, said: str
) -> None:
    chosen, note = choose_compile_scope(compose_run(words).config, weights, steps, device)
    assert chosen == scope
    assert said in note


def test_auto_is_off_where_the_compiler_lacks_something() -> None:
    problem = gpu_compiler_problem(
        (9, 0), find=lambda name: "/usr/bin/cc", include="/nowhere", module="torch"
    )
    given = compose_run([]).config, 10_000_000, 10**5, CUDA
    chosen, note = choose_compile_scope(*given, problem)
    assert chosen == "off"
    assert "it would pay, but torch.compile on a GPU needs Python's headers" in note


@pytest.mark.parametrize(
    ("typed", "scope"),
    [("compile=step", "step"), ("trainer.compile=true", "model"), ("trainer.compile.enabled=true", "model"),
     ("trainer.compile.enabled=false", "off"), ("trainer.compile=off", "off"),
     ("trainer.compile.scope=regional", "regional"), ("compile=auto", "auto")],
)  # fmt: skip
def test_one_word_chooses_the_scope(typed: str, scope: str) -> None:
    assert compose_run([typed]).config.trainer.compile.scope == scope


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("parallel=ddp", "parallel=ddp"),
        ("precision=16", "precision=16-mixed"),
        ("loop._target_=my.loop", "loop"),
        ("trainer.compile.dynamic=true", "trainer.compile.dynamic"),
        ("trainer.compile.mode=reduce-overhead", "trainer.compile.mode"),
        ("data.padding=token_budget", "data.padding=bucket"),
    ],
)
def test_illegal_pairs_are_refused_with_the_way_out(word: str, key: str) -> None:
    with refused(ConfigError, "trainer.compile", key):
        compose_run(["trainer.compile=step", word])


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("parallel=ddp", "parallel=ddp"),
        ("parallel.accelerator=cpu", "parallel.accelerator=cpu"),
        ("trainer.compile=model", "trainer.compile.mode=reduce-overhead"),
    ],
)
def test_cuda_graphs_are_refused_where_there_can_be_none(word: str, key: str) -> None:
    with refused(ConfigError, "trainer.cuda_graphs", key):
        compose_run(["trainer.cuda_graphs=true", word])
