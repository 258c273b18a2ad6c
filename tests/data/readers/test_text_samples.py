import gzip
import os
import pickle

import numpy as np
import pytest
import torch
from approved import refused
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from trainrun.data.pipeline import open_batches
from trainrun.data.readers.mapped_files import map_array
from trainrun.data.readers.text.text import Text, TextSamples, load
from trainrun.data.readers.text.token_file import TokenFile
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

VERSES = "In the beginning\nGod created\n\nthe heaven\nand the earth.\n"


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator([VERSES] * 5, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    found.enable_truncation(4)
    found.enable_padding(length=50)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    found.save(str(path))
    return str(path)


def whole(path, cache, **options):
    return load(str(path), val_fraction=0.0, cache_dir=cache, **options)["train"]


def joined(data) -> bytes:
    """All tokens that a data set of blocks holds, each once."""
    samples = [data[i] for i in range(len(data))]
    return bytes(torch.cat([samples[0][0][:1], *(target for _, target in samples)]).tolist())


# --- blocks --------------------------------------------------------------------------------------


def test_blocks_cover_the_text_and_predict_each_token_once(tmp_path, cache):
    content = bytes(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))
    (tmp_path / "a.txt").write_bytes(content)
    data = whole(tmp_path / "a.txt", cache, block_size=10)
    assert len(data) == 99
    assert joined(data) == content[:991]
    inputs, target = data[3]
    assert (inputs.dtype, inputs.shape) == (torch.int64, (10,))
    assert torch.equal(inputs[1:], target[:-1])
    assert (data.num_classes, data.bytes_per_token, data.num_tokens) == (256, 1.0, 990)
    assert data.lengths.tolist() == [10] * 99
    assert data.describe(3) == f"{tmp_path / 'a.txt'}, byte 30"
    assert not os.path.exists(cache), "the file itself is mapped"
    with pytest.raises(IndexError):
        data[99]


def test_validation_is_the_end_of_the_text(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    train, val = (
        load(str(tmp_path / "a.txt"), block_size=4, val_fraction=0.25, cache_dir=cache)[split]
        for split in ("train", "val")
    )
    assert joined(train) == bytes(range(73))
    assert joined(val) == bytes(range(75, 100))[:25]
    assert train.fingerprint() != val.fingerprint()
    (tmp_path / "b.txt").write_bytes(bytes(range(200, 220)))
    val = load(str(tmp_path / "a.txt"), block_size=4, val_path=str(tmp_path / "b.txt"), cache_dir=cache)[
        "val"
    ]
    assert joined(val) == bytes(range(200, 217))


@pytest.mark.parametrize("fault", ["bytes", "tokens"])
def test_many_samples_at_once_are_those_one_by_one(tmp_path, cache, fault, tokenizer):
    (tmp_path / "a.txt").write_text(VERSES * 20)
    data = whole(tmp_path / "a.txt", cache, block_size=7, tokenizer=None if fault == "bytes" else tokenizer)
    for one, many in zip([data[i] for i in (5, 0, 5)], data.__getitems__([5, 0, 5]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    assert data.__getitems__([]) == []


def test_files_packed_files_and_a_limit(tmp_path, cache):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"second" * 300_000))
    (folder / "a.md").write_bytes(b"first\n")
    (folder / "c.bin").write_bytes(b"no text")
    data = whole(folder, cache, block_size=1)
    assert len(data) == 6 + 1_800_000 - 1
    assert bytes(int(data[i][0]) for i in range(12)) == b"first\nsecond"
    assert data.describe(6) == f"{folder / 'b.txt.gz'}, byte 0"
    assert joined(whole(folder, cache, block_size=1, max_bytes=9)) == b"first\nsec"
    assert joined(whole(folder / "a.md", cache, block_size=1, max_bytes=3)) == b"fir"


def test_the_cache_is_made_once_and_follows_its_source(tmp_path, cache):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"abcdef"))
    first = whole(path, cache, block_size=2)
    (made,) = os.listdir(cache)
    stamp = os.stat(os.path.join(cache, made, "tokens.npy")).st_mtime_ns
    assert joined(whole(path, cache, block_size=1)) == b"abcdef"
    assert os.listdir(cache) == [made]
    assert os.stat(os.path.join(cache, made, "tokens.npy")).st_mtime_ns == stamp
    path.write_bytes(gzip.compress(b"uvwxyz!"))
    second = whole(path, cache, block_size=2)
    assert joined(second) == b"uvwxyz!"
    assert first.fingerprint() != second.fingerprint()
    assert len(os.listdir(cache)) == 2
    for name in os.listdir(cache):
        os.truncate(os.path.join(cache, name, "tokens.npy"), 130)
    assert joined(whole(path, cache, block_size=2)) == b"uvwxyz!"


# --- lines and documents -------------------------------------------------------------------------


def test_lines_keep_their_end_and_empty_ones_are_passed_over(tmp_path, cache):
    (tmp_path / "a.txt").write_text(VERSES + "no end")
    data = whole(tmp_path / "a.txt", cache, kind="lines")
    texts = [
        bytes([*inputs.tolist(), int(target[-1])]).decode() for inputs, target in (data[i] for i in range(5))
    ]
    assert texts == ["In the beginning\n", "God created\n", "the heaven\n", "and the earth.\n", "no end"]
    assert len(data) == 5
    assert data.lengths.tolist() == [len(data[i][0]) for i in range(5)] == [16, 11, 10, 14, 5]
    assert data.describe(2) == f"{tmp_path / 'a.txt'}, line 4"
    at_once = data.__getitems__([1, 2])
    assert [len(inputs) for inputs, _ in at_once] == [11, 10]


def test_lines_of_several_files_are_counted_in_each(tmp_path, cache):
    (tmp_path / "a.txt").write_text("one\ntwo\nlast")
    (tmp_path / "b.txt").write_text("\nthree\n")
    data = whole(tmp_path, cache, kind="lines")
    assert [data.describe(i) for i in range(4)] == [
        f"{tmp_path / 'a.txt'}, line 1",
        f"{tmp_path / 'a.txt'}, line 2",
        f"{tmp_path / 'a.txt'}, line 3",
        f"{tmp_path / 'b.txt'}, line 2",
    ]
    assert bytes(data[2][0].tolist()) == b"las"
    train, val = (
        load(str(tmp_path), kind="lines", val_fraction=0.25, cache_dir=cache)[split]
        for split in ("train", "val")
    )
    assert (len(train), len(val), bytes(val[0][0].tolist())) == (3, 1, b"three")


def test_documents_are_files(tmp_path, cache):
    for name, text in (("a.txt", "first"), ("b.txt", ""), ("c.txt", "third\nfile")):
        (tmp_path / name).write_text(text)
    data = whole(tmp_path, cache, kind="documents")
    assert data.lengths.tolist() == [4, 9]
    assert data.describe(1) == str(tmp_path / "c.txt")


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blocks", "lines", "documents"])
def test_tokens_are_those_of_the_tokenizer(tmp_path, cache, tokenizer, kind):
    text = VERSES + "form\x0cfeed grün"
    (tmp_path / "a.txt").write_text(text)
    data = whole(tmp_path / "a.txt", cache, kind=kind, block_size=1, tokenizer=tokenizer)
    plain = Tokenizer.from_file(tokenizer)
    plain.no_truncation()
    plain.no_padding()
    assert data.num_classes == plain.get_vocab_size() > 256
    if kind == "lines":
        assert len(data) == 5
        assert [*data[4][0].tolist(), int(data[4][1][-1])] == plain.encode("form\x0cfeed grün").ids
    else:
        tokens = plain.encode(text).ids
        samples = [data[i] for i in range(len(data))]
        assert [*samples[0][0].tolist()[:1], *(t for _, target in samples for t in target.tolist())] == tokens
        assert data.bytes_per_token == len(text.encode()) / len(tokens)
    assert os.listdir(cache)


def test_faults_of_tokenizer_and_text(tmp_path, cache, tokenizer, monkeypatch):
    import sys

    (tmp_path / "a.txt").write_bytes(b"good line\nbad \xff line\n")
    with refused(DataError, "a.txt"):
        whole(tmp_path / "a.txt", cache, tokenizer=tokenizer)
    assert os.listdir(cache) == []
    with refused(DataError, "data.train.tokenizer", "none.json"):
        whole(tmp_path / "a.txt", cache, tokenizer=str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with refused(DataError):
        whole(tmp_path / "a.txt", cache, tokenizer=str(tmp_path / "bad.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(DataError):
        whole(tmp_path / "a.txt", cache, tokenizer=tokenizer)


# --- the stream, and mistakes --------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_in_any_process(tmp_path, cache, num_workers):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 4)
    data = whole(tmp_path / "a.txt", cache, block_size=16)
    options = StreamOptions("data.train", True, 8, 0, num_workers=num_workers, engine="workers")
    batches, _ = open_batches(data, options)
    for batch in batches.epoch(0):
        inputs, target = batch.data
        assert inputs.shape[1:] == (16,)
        assert torch.equal((inputs + 1) % 256, target)


class OneByOne:
    """The samples alone: nothing says that they lie one after the other in a file."""

    thread_safe = True

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def plus_one(sample):
    inputs, target = sample
    return torch.add(inputs, 1), target


CHANGES = {
    "nothing": {},
    "cut": {"max_sequence_length": 5},
    "cut at the left": {"max_sequence_length": 5, "truncate": "left"},
    "split": {"max_sequence_length": 5, "truncate": "split"},
    "padded": {"max_sequence_length": 5, "pad_multiple": 4},
    "bucket": {"padding": "bucket"},
    "packed": {"max_sequence_length": 40, "padding": "pack"},
    "transform": {"transform": plus_one},
    "collate": {"collate_fn": torch.utils.data.default_collate},
    "evaluation": {"training": False, "may_grow": True},
}


def second_half(folder, dtype):
    """Blocks of 16 of any tokens that the type holds and a tokenizer may give."""
    largest = min(np.iinfo(dtype).max, 10**6)
    values = np.random.default_rng(1).integers(0, largest, 2000, dtype, endpoint=True)
    values[1500:1502] = 0, largest
    np.save(folder / "tokens.npy", values)
    end, begins = np.array([2000]), 1000 + 16 * np.arange(62)
    tokens = TokenFile(map_array(folder / "tokens.npy"), 2000, largest + 1, end, end[:0])
    return TextSamples(tokens, Text((folder / "tokens",), "blocks", None, None), begins, begins + 17)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [("auto", "uint8"), ("threads", "uint8"), ("workers", "uint8"), ("auto", "uint16"), ("auto", "int32")],
)
def test_blocks_gathered_from_the_file_are_what_reading_them_gives(tmp_path, dtype, engine, changes):
    data = second_half(tmp_path, dtype)
    assert max(int(data[i][0].max()) for i in range(len(data))) == min(np.iinfo(dtype).max, 10**6)
    number = {"threads": {"num_threads": 2}, "workers": {"num_workers": 0}}.get(engine, {})
    options = StreamOptions(**{"key": "data.train", "training": True, "batch_size": 7, "seed": 3} | changes | number,
                            engine=engine)  # fmt: skip
    gathered, _ = open_batches(data, options)
    read, _ = open_batches(OneByOne(data), options)
    for epoch in (0, 1):
        pairs = list(zip(gathered.epoch(epoch), read.epoch(epoch), strict=True))
        assert len(pairs) > 1
        for ours, theirs in pairs:
            assert (ours.real, ours.last) == (theirs.real, theirs.last)
            assert torch.equal(torch.as_tensor(ours.indices), torch.as_tensor(theirs.indices))
            assert type(ours.data) is type(theirs.data)
            both = [
                found.items() if isinstance(found, dict) else enumerate(found)
                for found in (ours.data, theirs.data)
            ]
            for (name, one), (other_name, other) in zip(*both, strict=True):
                assert name == other_name
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
    for stream in (gathered, read):
        stream.close()


def test_a_file_that_shrank_is_named_where_the_rows_are_opened_again(tmp_path, cache):
    (tmp_path / "a.txt").write_text(VERSES * 20)
    sent = pickle.dumps(whole(tmp_path / "a.txt", cache, block_size=16).find_row_columns())
    (tmp_path / "a.txt").write_text(VERSES)
    with refused(DataError, "a.txt"):
        pickle.loads(sent)


@pytest.mark.parametrize("name", [None, "tokenizer"])
def test_blocks_alone_are_gathered_and_stay_in_the_file(tmp_path, cache, name, request):
    name = name and request.getfixturevalue(name)
    (tmp_path / "a.txt").write_text(VERSES * 20)
    blocks = whole(tmp_path / "a.txt", cache, tokenizer=name, block_size=16)
    batches, line = open_batches(blocks, StreamOptions("data.train", True, 8, 0))
    assert "mapped files, read in the page cache" in line
    batches.close()
    columns = pickle.loads(pickle.dumps(blocks.find_row_columns()))
    assert all(np.shares_memory(mine, blocks._map_tokens()) for mine in blocks.find_row_columns().values)
    assert all(torch.equal(mine, own) for mine, own in zip(columns[3], blocks[3], strict=True))
    for kind in ("lines", "documents"):
        assert (
            whole(tmp_path / "a.txt", cache, kind=kind, tokenizer=name, block_size=16).find_row_columns()
            is None
        )


def test_too_few_tokens_are_refused(tmp_path, cache):
    (tmp_path / "a.txt").write_text(VERSES)
    with refused(DataError, "a.txt"):
        load(str(tmp_path / "a.txt"), cache_dir=cache, block_size=100)["train"]


def test_damaged_and_missing_texts_are_named(tmp_path, cache):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"abc" * 1000)[:-9])
    with refused(DataError, "a.txt.gz"):
        whole(tmp_path / "a.txt.gz", cache)
    with refused(DataError):
        whole(tmp_path / "b.txt", cache)
    (tmp_path / "c.txt").write_bytes(b"x" * 50)
    data = whole(tmp_path / "c.txt", cache, block_size=4)
    (tmp_path / "c.txt").write_bytes(b"x")
    with refused(DataError, "c.txt"):
        data[0]
    (tmp_path / "file").write_text("")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"abc"))
    with refused(DataError, "data.train.cache_dir"):
        whole(tmp_path / "d.txt.gz", str(tmp_path / "file"))
