"""The VAE of sequences: what its decoder sees, padding, dropped words; its bound; text and Parquet in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import trainrun as package
from trainrun.cli.main import main
from trainrun.data.augment.draws import Draws
from trainrun.data.augment.noise import WordDropout
from trainrun.errors import DataError, PluginError, TrainrunError
from trainrun.model.sequence_vae import SequenceVae
from trainrun.task.vae import Vae

LENGTHS = torch.tensor([3, 5, 1, 6])


def network() -> SequenceVae:
    torch.manual_seed(0)
    return SequenceVae(11, latent_dim=4, width=8).double().eval()


def batch_of(padding: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (4, 6), generator=generator)
    mask = torch.arange(6) < LENGTHS[:, None]
    noise = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    return {"inputs": tokens.masked_fill(~mask, padding), "attention_mask": mask, "noise": noise}


def test_a_token_is_predicted_from_the_code_and_the_tokens_before_it() -> None:
    model, batch = network(), batch_of()
    tokens, code = batch["inputs"][:1], batch["noise"][:1]
    whole = model._decode(tokens, code, None)
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 11
    found = model._decode(changed, code, None)
    assert torch.equal(found[:, :4], whole[:, :4])
    assert not torch.equal(found[:, 4:], whole[:, 4:])
    hidden = torch.zeros(1, 9, dtype=torch.bool)
    hidden[0, 3] = True
    assert torch.equal(model._decode(changed, code, hidden), model._decode(tokens, code, hidden))
    assert not torch.equal(model._decode(tokens, 2 * code, None), whole)


def test_the_bound_is_that_of_each_sequence_alone_whatever_pads_it() -> None:
    model, task = network(), Vae(0.5)
    out = task.step(model, batch_of())
    torch.testing.assert_close(Vae(0.5).step(model, batch_of(padding=7)).loss_sum, out.loss_sum)
    wanted = 0.0
    for row, length in enumerate(LENGTHS.tolist()):
        one, noise = batch_of()["inputs"][row : row + 1, :length], batch_of()["noise"][row : row + 1]
        logits, mean, log_var = model(one, noise=noise)
        normal = torch.distributions.Normal(mean, (0.5 * log_var).exp())
        divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum()
        wanted = wanted + cross_entropy(logits[0], one[0], reduction="sum") + 0.5 * divergence
    torch.testing.assert_close(out.loss_sum, wanted)
    total, tokens = out.sums["nats_per_token"]  # type: ignore[misc]
    assert int(tokens) == int(LENGTHS.sum())
    torch.testing.assert_close(total, out.sums["reconstruction"])
    assert task.count(batch_of()) == 4
    assert task.predict(model, batch_of())["prediction"].shape == (4, 4)


def test_the_last_target_of_a_text_belongs_to_the_sequence() -> None:
    model, tokens = network(), torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    target = torch.tensor([[2, 3, 4, 9], [6, 8, -100, -100]])
    text = {"inputs": tokens, "target": target, "attention_mask": mask}
    longer = torch.tensor([[1, 2, 3, 4, 9], [5, 6, 8, 0, 0]])
    longer_mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    plain = {"inputs": longer, "attention_mask": longer_mask}
    torch.testing.assert_close(Vae().step(model, text).loss_sum, Vae().step(model, plain).loss_sum)
    labelled = plain | {"target": torch.tensor([3, 4])}
    torch.testing.assert_close(Vae().step(model, labelled).loss_sum, Vae().step(model, plain).loss_sum)


def test_which_words_are_dropped_depends_on_sample_and_place_alone() -> None:
    def dropped(indices: list[int], length: int) -> Tensor:
        tokens = torch.zeros(len(indices), length, dtype=torch.int64)
        found = WordDropout(0.4)({"inputs": tokens}, Draws(1, 0, torch.tensor(indices)))["word_dropout"]
        assert found.shape == (len(indices), length + 1)
        return found  # type: ignore[no-any-return]

    whole = dropped(list(range(200)), 30)
    assert float(whole.double().mean()) == pytest.approx(0.4, abs=0.02)
    assert torch.equal(dropped([7, 3], 12), whole[[7, 3]][:, :13])
    assert WordDropout(0.4).random
    assert not WordDropout().random
    with refused(DataError):
        WordDropout(0.1)((torch.zeros(2, 3), torch.zeros(2)), Draws(1, 0, torch.arange(2)))


class Given(nn.Module):
    def __init__(self, *output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.output


def test_what_is_no_sequence_or_no_bound_of_one_is_refused() -> None:
    x, code = torch.tensor([[1, 2, 3]]), torch.zeros(1, 4)
    with refused(PluginError, "task.likelihood"):
        Vae().step(Given(torch.zeros(1, 3), code, code), x)
    with refused(DataError):
        Vae().step(Given(torch.zeros(1, 3, 2), code, code), x)
    with refused(DataError, "task.likelihood"):
        Vae(likelihood="categorical").step(Given(code), torch.zeros(2, 3))
    Vae(likelihood="gaussian").step(Given(torch.zeros(1, 3), code, code), x)


SMALL = ("model=sequence_vae", "task=vae", "model.width=16", "model.latent_dim=4", "monitor.plots=false",
         "monitor.progress_bar=false", "monitor.hardware=false", "trainer.num_threads=1", "data.padding=bucket",
         "data.augment.word_dropout.rate=0.3")  # fmt: skip


@pytest.fixture
def verses(workdir: Path) -> tuple[str, ...]:
    words = ["and", "the", "light", "was", "good", "for", "all", "that", "is", "made", "upon", "earth"]
    lines = [" ".join(words[(i * j) % 12] for j in range(2, 3 + i % 7)) for i in range(160)]
    (workdir / "verses.txt").write_text("\n".join(lines) + "\n")
    return ("data=text", "data.path=verses.txt", "data.train.kind=lines", "data.train.cache_dir=kept", *SMALL)


def weights(folder: str | Path) -> Tensor:
    model = package.load_model(folder, which="last")
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.train
def test_lines_of_a_text_resume_and_micro_batches(verses: tuple[str, ...]) -> None:
    assert main([*verses, "trainer.max_steps=9", "output_dir=whole", "monitor=vae", *SMALL[4:7],
                 "hook.vae.update_every_n_steps=3"]) == 0  # fmt: skip
    for steps in (7, 9):
        words = ["resume", "part"] if steps == 9 else [*verses, "output_dir=part"]
        assert main([*words, f"trainer.max_steps={steps}"]) == 0
    assert torch.equal(weights("whole"), weights("part"))
    run = package.load_run("whole")
    look = [row for row in run.metrics if row["kind"] == "vae"][-1]
    assert look["tokens"] > 5
    assert {"gain", "mutual_information", "active_units"} <= look.keys()
    notes = [row["text"] for row in run.metrics if row["kind"] == "note"]
    assert any(text.startswith("vae: beta 1 (equals") and "tokens" in text for text in notes)
    (row,) = [row for row in run.metrics if row["kind"] == "eval"][-1:]
    assert row["val/loss"] == pytest.approx(row["val/kl"] + row["val/reconstruction"])
    assert 0 < row["val/nats_per_token"] < 7


@pytest.mark.process
def test_ranks_and_micro_batches_of_sequences_equal_one_big_batch(verses: tuple[str, ...]) -> None:
    words = [*verses, "precision=64", "trainer.max_steps=6", "optimizer=sgd", "optimizer.lr=1e-3",
             "data.padding=longest"]  # fmt: skip
    words.remove("data.padding=bucket")
    whole = weights(package.train(*words, "data.batch_size=64").folder)
    parts = package.train(*words, "data.batch_size=32", "trainer.accumulate_grad_batches=2").folder
    ranks = package.train(*words, "data.batch_size=32", "parallel=ddp", "parallel.devices=2").folder
    torch.testing.assert_close(weights(parts), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights(ranks), whole, rtol=0, atol=1e-12)


@pytest.mark.train
def test_sequences_of_a_parquet_file(workdir: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [[(i * j) % 9 for j in range(2 + i % 5)] for i in range(120)]
    parquet.write_table(pyarrow.table({"tokens": rows}), "table.parquet")
    words = (
        "data=parquet",
        "data.path=table.parquet",
        "data.train.inputs=[tokens]",
        "data.train.target=none",
        *SMALL,
    )
    run = package.train(*words, "model.vocab_size=9", "trainer.max_steps=4", "monitor=vae", *SMALL[4:7])
    assert run.status["step"] == 4
    with refused(TrainrunError, "model.vocab_size"):
        package.train(*words, "trainer.max_steps=4")


def test_what_it_writes_of_a_code_is_what_the_forward_finds_likeliest() -> None:
    torch.manual_seed(0)
    model = SequenceVae(vocab_size=11, latent_dim=4, width=16).double().eval()
    code = 3 * torch.randn(5, 4, dtype=torch.float64)
    written = model.write(code, 9)
    again = model._decode(written, code, None).argmax(2)
    assert len({tuple(row.tolist()) for row in written}) > 1
    assert torch.equal(written, again)
