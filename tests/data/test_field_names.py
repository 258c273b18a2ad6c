"""One list of names says what inputs and targets are, wherever a dict is read."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from approved import refused

from trainrun.data.augment.draws import Draws
from trainrun.data.augment.flip import RandomFlip
from trainrun.data.augment.images import get_images, get_target, replace_images, replace_target
from trainrun.data.augment.mix import CutMix, MixUp
from trainrun.data.look import describe_first_input
from trainrun.data.readers.targets import choose_target
from trainrun.data.sequences.collate import PadCollate
from trainrun.data.tensor_dataset import find_columns
from trainrun.errors import DataError
from trainrun.interfaces import IGNORED, INPUT_KEYS, TARGET_KEYS
from trainrun.task.batches import split_inputs_and_target

IMAGES = torch.rand(4, 3, 6, 6)
LABELS = torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize("key", INPUT_KEYS)
def test_images_are_augmented_under_every_name_that_a_task_reads(key: str) -> None:
    batch = {"other": LABELS, key: IMAGES, "labels": LABELS}
    assert get_images(batch) is IMAGES is split_inputs_and_target(batch)[0]
    found = replace_images(batch, IMAGES + 1)
    assert torch.equal(found[key], IMAGES + 1)
    assert list(found) == list(batch)
    flipped = RandomFlip()(batch, Draws(0, 0, torch.arange(4)))
    assert flipped[key].shape == IMAGES.shape


@pytest.mark.parametrize("key", TARGET_KEYS)
@pytest.mark.parametrize("mix", [MixUp(1.0, 3), CutMix(1.0, 3)])
def test_what_is_mixed_is_what_the_loss_reads(key: str, mix: Any) -> None:
    batch = {"pixel_values": IMAGES, key: LABELS}
    mixed = mix(batch, Draws(0, 0, torch.arange(4)))
    assert split_inputs_and_target(mixed)[1].shape == (4, 3)
    assert get_target(batch) is LABELS


@pytest.mark.parametrize(("first", "second"), list(permutations(TARGET_KEYS, 2)))
def test_of_two_targets_everybody_reads_the_same(first: str, second: str) -> None:
    batch = {"x": IMAGES, first: LABELS, second: LABELS + 1}
    read = split_inputs_and_target(batch)[1]
    columns = find_columns(batch, "data.train")
    assert columns is not None
    assert columns.target() is not None
    assert torch.equal(torch.as_tensor(columns.target()), read)
    assert replace_target(batch, read)[first if read is batch[first] else second] is read
    with refused(DataError, first, second):
        MixUp(1.0, 3)(batch, Draws(0, 0, torch.arange(4)))


def test_images_beside_tokens_are_found_by_their_shape() -> None:
    batch = {"input_ids": LABELS[:, None], "pixel_values": IMAGES}
    assert get_images(batch) is IMAGES
    assert torch.equal(replace_images(batch, IMAGES * 2)["pixel_values"], IMAGES * 2)


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_padding_tables_and_the_first_input_know_every_target(key: str) -> None:
    samples = [{"input_ids": torch.arange(n), key: torch.arange(n)} for n in (3, 1)]
    assert PadCollate()(samples)[key][1].tolist() == [0, IGNORED, IGNORED]
    assert choose_target(None, ["age", key, "id"]) == (key,)
    assert describe_first_input({key: 1, "pixel_values": IMAGES[0]}).shape == tuple(IMAGES[0].shape)
