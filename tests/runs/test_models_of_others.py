"""Models of transformers and timm without an adapter: trained, resumed, evaluated, predicted, cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from quiet_runs import QUIET, train, weights

from trainrun.cli.main import main

pytestmark = pytest.mark.process
SETS = '''
import torch

class Sentences(torch.utils.data.Dataset):
    copies = False  # labels as scripts of transformers have them: the tokens themselves

    def __init__(self, count, seed=0):
        draws = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (count,), generator=draws).tolist()
        self.rows = [torch.randint(1, 50, (length,), generator=draws) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.rows[index]
        return {
            "input_ids": ids, "token_type_ids": (ids > 25).long(), "attention_mask": torch.ones_like(ids),
            "labels": ids if self.copies else int(ids.float().mean() > 25),
        }

class Lines(Sentences):
    copies = True
'''  # fmt: skip


def model(name: str, **arguments: object) -> list[str]:
    kind, _, config = name.partition("/")
    return [
        f"model._target_=transformers.{kind}", f"model.config._target_=transformers.{config}",
        *(f"model.config.{key}={value}" for key, value in arguments.items()),
    ]  # fmt: skip


def data(name: str) -> list[str]:
    return [
        f"data.train._target_=their_sets.{name}", "data.train.count=60", f"data.val._target_=their_sets.{name}",
        "data.val.count=20", "data.val.seed=1",
    ]  # fmt: skip


BERT = [
    *model("BertForSequenceClassification/BertConfig", vocab_size=50, hidden_size=16, num_hidden_layers=1,
           num_attention_heads=2, intermediate_size=16),
    *data("Sentences"),
]  # fmt: skip
GPT = [
    *model("GPT2LMHeadModel/GPT2Config", vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16),
    *data("Lines"),
]  # fmt: skip
VIT = [
    "model._target_=timm.create_model", "model.model_name=vit_tiny_patch16_224", "model.img_size=8",
    "model.patch_size=4", "model.in_chans=1", "model.num_classes=10", "model.embed_dim=16", "model.depth=1",
    "model.num_heads=2",
]  # fmt: skip
SHIFTED = ["task=language_modeling", "task.shift_labels=true"]
NO_DROPOUT = {
    "bert": ["model.config.hidden_dropout_prob=0.0", "model.config.attention_probs_dropout_prob=0.0"],
    "gpt2": [f"model.config.{name}_pdrop=0.0" for name in ("resid", "embd", "attn")],
}
CASES = {
    "bert": ("transformers", BERT, ["task=classification"]),
    "bert with its own loss": ("transformers", BERT, ["task=model_loss"]),
    "gpt2": ("transformers", GPT, SHIFTED),
    "gpt2 with its own loss": ("transformers", GPT, ["task=model_loss"]),
    "vit": ("timm", VIT, []),
}


@pytest.fixture
def sets(workdir: Path) -> Path:
    (workdir / "their_sets.py").write_text(SETS)
    sys.modules.pop("their_sets", None)
    return workdir


@pytest.mark.parametrize("name", CASES)
def test_it_trains_resumes_evaluates_and_predicts(sets: Path, name: str) -> None:
    package, model, task = CASES[name]
    pytest.importorskip(package)
    words = [*model, *task, "data.batch_size=16", *QUIET]
    whole = train("whole", 6, *words)
    train("part", 3, *words)
    rest = train("rest", 6, *words, "ckpt_path=part")
    assert all(torch.equal(value, weights(rest)[name]) for name, value in weights(whole).items())
    assert main(["evaluate", "whole", "--which", "last"]) == 0
    found = json.loads((sets / "whole" / "evaluation-val.json").read_text())
    seen = [json.loads(line) for line in (sets / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert found["val/loss"] == pytest.approx(
        [row["val/loss"] for row in seen if row["kind"] == "eval"][-1], rel=1e-5
    )
    assert main(["predict", "whole"]) == 0
    rows = (sets / "whole" / "predictions-val.csv").read_text().splitlines()
    assert len(rows) == 1 + (20 if package == "transformers" else 359)


@pytest.mark.parametrize("name", ["bert", "gpt2 with its own loss", "vit"])
def test_micro_batches_and_ranks_are_one_batch(sets: Path, name: str) -> None:
    package, model, task = CASES[name]
    pytest.importorskip(package)
    words = [*model, *task, *NO_DROPOUT.get(name.split()[0], [])]
    words += ["precision=64", "optimizer=sgd", "optimizer.lr=0.1", *QUIET]
    one = weights(train("one", 3, *words, "data.batch_size=16"))
    cut = weights(train("cut", 3, *words, "data.batch_size=4", "trainer.accumulate_grad_batches=4"))
    two = weights(train("two", 3, *words, "data.batch_size=8", "parallel.devices=2"))
    for key, value in one.items():
        torch.testing.assert_close(cut[key], value, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(two[key], value, rtol=1e-7, atol=1e-10)


def test_the_own_loss_of_a_model_is_the_task_of_the_same_loss(sets: Path) -> None:
    pytest.importorskip("transformers")
    for left, right, model in ((SHIFTED, ["task=model_loss"], GPT), ([], ["task=model_loss"], BERT)):
        one, two = (
            train(str(len(words)) + model[0][-3:], 3, *model, *words, *QUIET) for words in (left, right)
        )
        for name, value in weights(one).items():
            torch.testing.assert_close(weights(two)[name], value)


def test_labels_that_are_the_tokens_train_no_copy(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    masked = [
        word.replace("BertForSequenceClassification", "BertForMaskedLM").replace("Sentences", "Lines")
        for word in BERT
    ]
    for words, said in (
        ([*GPT, "task=language_modeling"], "use task.shift_labels=true"),
        (
            [*masked, "task=model_loss"],
            "labels are the tokens of the inputs, and BertForMaskedLM does not shift them",
        ),
    ):
        assert main([*words, *QUIET, "trainer.max_steps=1"]) != 0
        assert said in capsys.readouterr().err
