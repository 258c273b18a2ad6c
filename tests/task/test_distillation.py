"""The loss of a student, against its formula, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import ConfigError
from trainrun.task.distillation import Distillation, Teacher, collect_outputs, measure_distance


class Net(nn.Module):
    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(6, width), nn.ReLU(inplace=True), nn.Linear(width, 4), nn.Dropout()
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Counting(Net):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, Y = some(5, 6), torch.tensor([0, 3, 1, 1, 2])


def student(**words: Any) -> tuple[Distillation, Net, Teacher]:
    task, teacher = Distillation(**words), Teacher(Net(8, 1), None, list(words.get("hidden", {}).values()))
    task.set_teacher(teacher, None)
    return task, Net(8, 2).eval(), teacher


def test_its_weights_alone_mark_a_teacher() -> None:
    networks = (Net(8, 1), Counting(8, 1), Counting(8, 2))
    one, same, other = (Teacher(net, None, ()).hash_weights() for net in networks)
    assert one == same != other


def test_the_loss_is_hintons_and_that_of_hidden_states() -> None:
    task, model, teacher = student(
        temperature=2.0, alpha=0.6, hidden={"layers.0": "layers.0"}, hidden_weight=3.0
    )
    out = task.step(model, (X, Y))
    theirs, ours = teacher.network(X), model(X)
    p, q = (theirs / 2).softmax(1), (ours / 2).softmax(1)
    soft = 4 * (p * (p.log() - q.log())).sum()
    near = (
        (model.layers[0](X) - teacher.network.layers[0](X)).square().mean(1).sum()
    )  # ahead of the ReLU in place
    hard = cross_entropy(ours, Y, reduction="sum")
    torch.testing.assert_close(out.loss_sum, 0.6 * soft + 0.4 * hard + 3 * near)
    torch.testing.assert_close(out.sums["hidden"], near.detach())
    out.loss_sum.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not any(weight.requires_grad for weight in teacher.network.parameters())
    assert task.count((X, Y)) == 5


def test_an_evaluation_is_that_of_the_student_alone() -> None:
    task, model, _ = student()
    with torch.no_grad():
        out = task.step(model, (X, Y))
    torch.testing.assert_close(out.loss_sum, cross_entropy(model(X), Y, reduction="sum").detach())
    Distillation().predict(model, (X, Y))  # and without a teacher


def test_kept_answers_are_those_of_the_teacher_and_ignored_places_count_nothing() -> None:
    task, model, teacher = student(hidden={"layers.2": "layers.2"})
    asked = task.step(model, (X, Y)).loss_sum
    order = torch.tensor([4, 0, 2, 1, 3])
    answers = {
        name: torch.empty_like(rows).index_copy_(0, order, rows) for name, rows in teacher((X, Y)).items()
    }
    task.set_teacher(teacher, answers)
    assert task.teacher is None
    kept = task.step(model, {"input": X, "target": Y, "index": order}).loss_sum
    torch.testing.assert_close(kept, asked, rtol=0, atol=0)
    dense, logits = Distillation(alpha=1.0), some(2, 4, 3)
    target = torch.tensor([[0, 1, -100], [-100, 2, 3]])
    soft, _ = dense.terms(logits, {}, {"": some(2, 4, 3).flip(0)}, target)
    for place in ((0, 2), (1, 0)):
        logits[place[0], :, place[1]] += some(4)
    torch.testing.assert_close(dense.terms(logits, {}, {"": some(2, 4, 3).flip(0)}, target)[0], soft)


def test_maps_of_other_channels_are_compared_by_where_they_are_active() -> None:
    left, right = some(3, 2, 4, 4), some(3, 5, 4, 4)
    maps = [(one.square().mean(1)).flatten(1) for one in (left, right)]
    maps = [one / one.norm(dim=1, keepdim=True) for one in maps]
    torch.testing.assert_close(measure_distance(left, right, "k"), (maps[0] - maps[1]).square().sum(1))
    with refused(ConfigError, "task.hidden"):
        measure_distance(some(3, 2), some(3, 5), "task.hidden={a: b}")


def test_a_teacher_computes_in_its_own_precision_and_leaves_the_student_alone() -> None:
    network = Net(8, 1)
    with torch.autocast("cpu", torch.bfloat16):
        full, half = Teacher(network, None, [])((X, Y))[""], Teacher(network, torch.bfloat16, [])((X, Y))[""]
    torch.testing.assert_close(full, network.eval()(X), rtol=0, atol=0)
    assert 0 < float((half - full).abs().max()) < 0.05
    with collect_outputs(network, ["layers.1"]) as seen:
        network(X)
    assert set(seen) == {"layers.1"}
    assert not network.layers[1]._forward_hooks


def test_a_run_goes_on_with_its_own_teacher_alone() -> None:
    task, _, _ = student()
    state = task.state_dict()
    task.load_state_dict(state)
    task.set_teacher(Teacher(Net(8, 3), None, []), None)
    with refused(ConfigError, "task.teacher"):
        task.load_state_dict(state)
    Distillation().load_state_dict(state)  # to evaluate needs no teacher
    assert Distillation(class_dim=-1).unit == "tokens"  # of a language model
    assert not hasattr(Distillation(), "unit")
