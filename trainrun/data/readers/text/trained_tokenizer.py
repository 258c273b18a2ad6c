"""`data.train.tokenizer=bpe:4096`: byte-level BPE, trained once on the training part of a text.

When: text of one's own, of one language or kind. A vocabulary of 1,000 to 8,000 is enough for some megabytes.
When not: a pretrained model, which has its own tokenizer.
How: the text is divided by bytes, between characters (lines, documents), in the same way as the samples. So
validation and test text is never read. The same text and size give the same file. `bpe:4096@FILE` uses an existing
file.
Source: Sennrich et al. 2016 (arXiv:1508.07909); bytes as the first tokens: GPT-2.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.text.text_files import iterate_chunks
from trainrun.data.readers.text.tokenizer import LINE, decode_text_block
from trainrun.errors import DataError

VERSION = 1
LEAST = 257  # every byte, and one pair
SPEC = re.compile(r"bpe:(\d{1,7})(?:@(.+))?\Z", re.DOTALL)


def is_trained(tokenizer: Any) -> bool:
    return isinstance(tokenizer, str) and tokenizer.startswith("bpe:")


def open_trained_file(
    spec: str, files: tuple[Path, ...], kind: str, max_bytes: int | None, held: float, cache: Path
) -> str:
    """Return the path of the tokenizer file; train the tokenizer if the file does not exist.

    held: the share of the text that is held out. Raise DataError if the spec is wrong, the package is
    missing, or the cache cannot be written.
    """
    match = SPEC.match(spec)
    if match is None or int(match[1]) < LEAST:
        raise DataError(
            f"data.train.tokenizer={spec}: must be bpe:SIZE, with {LEAST} tokens or more, as bpe:4096"
        )
    if match[2]:
        return match[2]
    key = repr((VERSION, int(match[1]), kind, max_bytes, held, fingerprint_files(files)))
    place = cache / f"bpe-{match[1]}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if not place.is_file():
        text = _train(int(match[1]), _iterate_training_lines(files, kind, max_bytes, held))
        making = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            making.write_text(text, encoding="utf-8")
            making.replace(place)
        except OSError as error:
            raise DataError(
                f"data.train.cache_dir: cannot write {cache} ({error.strerror}); name another"
            ) from error
    return str(place)


def _train(size: int, lines: Iterator[str]) -> str:
    package = import_extra("tokenizers", "text data.train.tokenizer=bpe:...", "text")
    level = package.pre_tokenizers.ByteLevel
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return str(tokenizer.to_str())


def _iterate_training_lines(
    files: tuple[Path, ...], kind: str, max_bytes: int | None, held: float
) -> Iterator[str]:
    end = find_training_end(files, kind, max_bytes, held)
    for number, content, is_training in divide_chunks(iterate_chunks(files, max_bytes), end, kind):
        if not is_training:
            return
        yield from LINE.findall(decode_text_block(content, True, files[number]))


def find_training_end(files: tuple[Path, ...], kind: str, max_bytes: int | None, held: float) -> int:
    """Return about how many bytes belong to the training part; for documents, the bytes of whole files."""
    sizes: dict[int, int] = {}
    for number, content in iterate_chunks(files, max_bytes):
        sizes[number] = sizes.get(number, 0) + len(content)
    if kind == "documents":
        return sum(list(sizes.values())[: len(sizes) - round(held * len(sizes))])
    return sum(sizes.values()) - round(held * sum(sizes.values()))


def divide_chunks(
    chunks: Iterable[tuple[int, bytes]], end: int | None, kind: str
) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (file number, bytes, whether they belong to the training part).

    The chunk in which the training part ends is divided after a line. Without a line end it is divided between two
    characters.
    """
    seen = 0
    for number, content in chunks:
        left = len(content) if end is None else end - seen
        cut = max(0, min(left, len(content)))
        if 0 < cut < len(content):
            line = content.rfind(b"\n", 0, cut) + 1
            while not line and cut > 0 and content[cut] & 0xC0 == 0x80:
                cut -= 1
            cut = line or (cut if kind == "blocks" else 0)
        if cut or (left > 0 and not content):
            yield number, content[:cut], True
        if cut < len(content) or left <= 0:
            yield number, content[cut:], False
        seen = seen + len(content) if left >= len(content) else (end or 0)
