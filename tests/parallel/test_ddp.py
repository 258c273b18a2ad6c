"""Two and three real ranks under gloo against one process, and what they tell each other."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from torch import nn

from trainrun.errors import ConfigError, PluginError
from trainrun.folder.run_folder import RunDir, read_json
from trainrun.parallel.ddp import Ddp, check_parameters, missing_gradient_error
from trainrun.parallel.group import Group
from trainrun.parallel.launch import RankFailed, launch_ranks

pytestmark = pytest.mark.process

# per step, rank and micro-batch: how many samples; the third window is shorter than the others
SIZES = {
    2: [[[3, 1, 4], [2, 2, 5]], [[1, 1, 1], [6, 2, 3]], [[4], [1]], [[2, 3, 2], [5, 1, 1]]],
    3: [[[3, 1], [2, 2], [1, 6]], [[1, 1], [6, 2], [2, 2]], [[4], [1], [3]], [[2, 3], [5, 1], [4, 4]]],
}

SCRIPT = Path(__file__).with_name("ddp_ranks.py")


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    return x, torch.randn(count, 2, dtype=torch.float64, generator=generator)


def one_process(world_size: int) -> dict[str, torch.Tensor]:
    """The same steps on the joined samples of all ranks, one batch a step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    first = 0
    for step in SIZES[world_size]:
        count = sum(sum(sizes) for sizes in step)
        x, y = samples(1000)
        x, y = x[first : first + count], y[first : first + count]
        first += count
        ((model(x) - y).square().sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank of `ddp_ranks.py` saw; one start of the ranks for all tests of this file."""
    world_size = request.param
    run = RunDir(tmp_path_factory.mktemp("ddp"))
    env = dict(
        os.environ,
        PYTHONPATH=str(SCRIPT.parents[2]),
        OMP_NUM_THREADS="1",
        PYTHONWARNINGS="error::FutureWarning",
    )
    sizes = json.dumps(SIZES[world_size])
    code = launch_ranks(
        lambda attempt: [sys.executable, str(SCRIPT), str(run.root), sizes],
        world_size, run, grace_seconds=5, alone_seconds=60, env=env,
    )  # fmt: skip
    assert code == 0
    return [read_json(run.root / f"seen{rank}.json") for rank in range(world_size)]


@pytest.mark.parametrize("weights", ["weights", "weights_of_static_graph"])
def test_uneven_micro_batches_equal_one_process(results: list[dict[str, Any]], weights: str) -> None:
    wanted = one_process(len(results))
    for seen in results:
        assert seen[weights].keys() == wanted.keys()
        for name, value in seen[weights].items():
            torch.testing.assert_close(
                torch.tensor(value, dtype=torch.float64), wanted[name], rtol=0, atol=1e-12
            )


def test_gradients_are_exchanged_in_the_last_micro_batch_only(results: list[dict[str, Any]]) -> None:
    assert len({json.dumps(seen["gradient_after_first"]) for seen in results}) == len(results)
    assert len({json.dumps(seen["gradient_after_last"]) for seen in results}) == 1


def test_ranks_agree_on_items_and_requests(results: list[dict[str, Any]]) -> None:
    world_size = len(results)
    mean = sum(10 + 3 * rank for rank in range(world_size)) / world_size
    for seen in results:
        assert seen["agreed"] == [[mean, 0, 0, False], [mean, 2, 1, False], [0.0, 0, 3, False]]


def test_sums_and_values_of_all_ranks(results: list[dict[str, Any]]) -> None:
    world_size = len(results)
    total = 0.0
    for rank in range(world_size):
        total += 0.1 * (rank + 1)
    for seen in results:
        assert seen["sums"] == [total, float(sum(range(world_size))), float(world_size * 2**40)]
        assert seen["sums_of_nothing"] == []
        assert seen["ranks_here"] == world_size
        assert seen["gathered"] == [{"rank": rank, "words": ["a"] * rank} for rank in range(world_size)]
        assert seen["times"]["seconds"]["data"] == [rank + 1.0 for rank in range(world_size)]
        assert seen["times"]["seconds"]["forward"] == [0.0] * world_size


def test_buffers_follow_rank_0_after_every_step(results: list[dict[str, Any]]) -> None:
    first = results[0]["buffers"]
    assert first["own_batch_mean"] != results[1]["buffers"]["own_batch_mean"]
    for seen in results:
        assert seen["buffers"]["num_batches_tracked"] == 2
        for name in ("at_start", "running_mean", "running_var"):
            assert seen["buffers"][name] == first[name]


def test_a_new_wrap_goes_on_with_the_same_bits(results: list[dict[str, Any]]) -> None:
    for seen in results:
        assert seen["stopped_and_resumed"] == seen["never_stopped"]


def test_wrapping_draws_no_random_number_and_leaves_no_gradient(results: list[dict[str, Any]]) -> None:
    assert all(seen["random_state_kept"] and seen["no_gradient_after_wrap"] for seen in results)


def test_unused_parameters_name_the_key(results: list[dict[str, Any]]) -> None:
    for seen in results:
        assert seen["unused"][0] == "PluginError"
        assert "parallel.find_unused_parameters=true" in seen["unused"][1]
        assert "unused.weight, unused.bias" in seen["unused"][1]
        assert seen["unused"][2] == 0  # before a step is taken from gradients that were not exchanged
        assert seen["unused_allowed"] is True


def test_sparse_gradients_are_exchanged(results: list[dict[str, Any]]) -> None:
    rows = [number for number, row in enumerate(results[0]["sparse"]) if any(row)]
    assert rows == list(range(1, 2 + len(results)))
    assert all(seen["sparse"] == results[0]["sparse"] for seen in results)


def test_parameters_that_are_unfrozen_later_are_trained_alike_on_all_ranks(
    results: list[dict[str, Any]],
) -> None:
    torch.manual_seed(11)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        model[1].requires_grad_(number >= 1)
        model[0].requires_grad_(number >= 2)
        inputs = torch.stack([torch.full((2,), 1.0 + rank) for rank in range(len(results))])
        (model(inputs).square().sum() / len(results)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for seen in results:
            for found, expected in zip(seen[f"thawed after {number}"], model.parameters(), strict=True):
                torch.testing.assert_close(torch.tensor(found), expected.detach())


def test_a_part_of_the_model_is_not_called(results: list[dict[str, Any]]) -> None:
    assert all("object has no attribute 'used'" in seen["part"] for seen in results)
    assert all("calls of the whole model, model(...)" in seen["part"] for seen in results)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)


class Graph(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("model", [nn.Identity(), Fixed(), Graph(), nn.LazyLinear(3)])
def test_models_without_gradients_are_refused(model: nn.Module) -> None:
    with refused(PluginError):
        check_parameters(model)


def test_a_model_that_mostly_stands_still_is_not_sent_to_find_unused_parameters() -> None:
    """As with reentrant checkpoints, whose blocks get no gradients where their input needs none."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    model[3](torch.ones(1, 2)).sum().backward()
    text = str(missing_gradient_error(model))
    assert "6 of 8" in text
    assert "0.weight" in text
    assert "use_reentrant=False" in text
    assert "find_unused_parameters" not in text


def test_synchronised_batchnorm_needs_cuda() -> None:
    group = Group(torch.device("cpu"), 0, 2, host=None, local_world_size=2)  # type: ignore[arg-type]
    with refused(ConfigError, "parallel.sync_batchnorm"):
        Ddp(group, sync_batchnorm=True)


def test_a_step_has_one_exchange_of_gradients_and_one_of_counts(results: list[dict[str, Any]]) -> None:
    for seen in results:
        assert sorted(count for count in seen["exchanges"].values() if count) == [1, 1]


def test_gradients_are_exchanged_in_bf16(results: list[dict[str, Any]]) -> None:
    mean = 3.0 + (len(results) - 1) / 2
    for seen in results:
        (gradient,) = torch.tensor(seen["compressed"])
        assert torch.equal(gradient, gradient.bfloat16().float())
        assert gradient.tolist() == pytest.approx([1.0, mean], rel=0.01)
        assert seen["compressed"] == results[0]["compressed"]


LOSES_A_RANK = """
    import os, signal
    from trainrun.config.schema import ParallelConfig
    import torch
    from torch import nn
    from trainrun.errors import LostContact
    from trainrun.parallel.worker import run_as_rank

    def work(parallel, flag):
        wrapped = parallel.wrap(nn.Linear(2, 2))
        try:
            for step in range(100):
                if parallel.rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                with parallel.sync_gradients(last=True):
                    wrapped(torch.ones(1, 2)).sum().backward()
        except LostContact:
            (run.root / "noticed").touch()
        parallel.agree(1, 0, 0)
        return 0

    options = ParallelConfig(mode="ddp", accelerator="cpu", timeout_seconds=600.0)
    sys.exit(run_as_rank(run, options, work))
"""


def test_survivors_say_that_they_lost_contact(
    script: Callable[[str], list[str]],
    run_dir: RunDir,
    rank_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainrun.parallel.launch.SETTLE_SECONDS", 60.0)
    command = script(LOSES_A_RANK)
    with pytest.raises(RankFailed, match=r"rank 1 was killed by SIGKILL \(out of memory\?\)"):
        launch_ranks(lambda attempt: command, 2, run_dir, grace_seconds=5, alone_seconds=60, env=rank_env)
    assert (run_dir.root / "noticed").exists()  # in the exchange of gradients, and then in that of numbers
    survivor = read_json(run_dir.rank_error(0))
    assert survivor["kind"] == "echo"
    assert survivor["message"].startswith("lost contact with the other ranks (")
    assert survivor["exit_code"] == 1


SLEEPS = """
    import json, os, time
    from trainrun.config.schema import ParallelConfig
    import torch
    from torch import nn
    from trainrun.parallel.worker import run_as_rank

    def work(parallel, flag):
        wrapped = parallel.wrap(nn.Linear(2, 2))
        for step in range(3):
            parallel.agree(1, 0, 0)
            if parallel.rank == 1 and step == 2:
                {absent}
            with parallel.sync_gradients(last=True):
                wrapped(torch.ones(1, 2)).sum().backward()
        return 0

    options = ParallelConfig(mode="ddp", accelerator="cpu", timeout_seconds=2.0)
    sys.exit(run_as_rank(run, options, work))
"""


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("time.sleep(600)", r"rank 1 did not enter exchange \d+ \(\w+\), in which rank 0 waited"),
        (
            "parallel.sum_over_ranks([1.0])",
            r"rank [01] did not enter exchange \d+ \(all_\w+\), in which rank",
        ),
        (
            "os.kill(os.getpid(), 9)",
            r"rank 1 was killed by SIGKILL .*; rank 1 did not enter exchange \d+ \(\w+\), in which rank 0 waited",
        ),
    ],
    ids=["it sleeps", "it is in another branch", "it died"],
)
def test_the_rank_that_did_not_enter_an_exchange_is_named(
    absent: str, named: str, script: Callable[[str], list[str]], run_dir: RunDir, rank_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("trainrun.parallel.launch.SETTLE_SECONDS", 1.0)
    command = script(SLEEPS.format(absent=absent))
    with pytest.raises(RankFailed) as caught:
        launch_ranks(lambda attempt: command, 2, run_dir, grace_seconds=5, alone_seconds=60, env=rank_env)
    assert re.search(named, str(caught.value)), str(caught.value)
