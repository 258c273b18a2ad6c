"""Which settings are secrets, by their names, and texts without their values."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
ALWAYS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
# what a key or a token of data is called
OF_DATA = {
    "key": {"sort", "image", "images", "label", "labels", "input", "inputs", "target", "text", "data", "dict",
            "feature", "index", "group", "id", "field", "column", "query", "cache", "map", "batch", "output", "sample"},
    "token": {"pad", "padding", "eos", "bos", "unk", "unknown", "mask", "sep", "cls", "end", "start", "stop", "per",
              "next", "special", "separator", "image", "first", "last", "class", "target", "word"},
}  # fmt: skip
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
SETTING = re.compile(r"""([\w.\-\[\]]*\w)=('[^'\n]*'|"[^"\n]*"|[^\s'"]\S*)""")
LINE = re.compile(r"^(\s*(?:- )?)([\w.\-]+): (\S.*)$", re.MULTILINE)


def is_secret(key: str) -> bool:
    """`api_key`, `hf_token`, `db.password`; not `image_key`, `pad_token`, `max_tokens`, `tokenizer`, `key`."""
    name = key.rpartition(".")[2].rstrip("]0123456789[")
    words = [word.lower() for word in WORD.findall(name)]
    if not words:
        return False
    *before, last = words
    if ALWAYS.intersection(words):
        return True
    if last == "key":
        return bool(before) and before[-1] not in OF_DATA["key"]
    return last == "token" and not OF_DATA["token"].intersection(before)


def hides(key: str, value: Any) -> bool:
    """Whether a value is a secret: a text or number that is no reference to the environment."""
    if value is None or isinstance(value, bool) or value == "" or not isinstance(value, str | int | float):
        return False
    return is_secret(key) and not str(value).startswith("${oc.env:")


def masked_word(word: str) -> str:
    """One word of a command line."""
    key, equals, value = word.partition("=")
    return f"{key}={HIDDEN}" if equals and hides(key, value) else word


def masked(text: str) -> str:
    """Values of `key=value` in a text, where the key is a secret's."""
    return SETTING.sub(lambda found: f"{found[1]}={HIDDEN}" if hides(found[1], found[2]) else found[0], text)


def masked_lines(text: str) -> str:
    """The same of YAML."""
    plain = ("null", "true", "false", "''", '""')
    return LINE.sub(
        lambda found: (
            f"{found[1]}{found[2]}: {HIDDEN}"
            if hides(found[2], found[3]) and found[3] not in plain
            else found[0]
        ),
        text,
    )
