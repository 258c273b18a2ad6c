"""What is printed: paths, names, reasons and values may be anybody's, so nothing in them can steer a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import IO, Any

# Control characters but tab and new line, and what changes the direction of a text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: object, encoding: str = "utf-8") -> str:
    """The text with its control characters spelled out, as `\\x1b`; what cannot be encoded too; secrets masked."""
    shown = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], masked(str(text)))
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def say(text: object = "", file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """As `print`, for a text that holds what others wrote. file: None is standard output."""
    out = file or sys.stdout
    print(plain(text, getattr(out, "encoding", None) or "utf-8"), file=out, end=end, flush=flush)


def redraw(text: str = "") -> None:
    """Put a text in place of the last line of the terminal."""
    print(f"\r\033[K{plain(text)}", end="", flush=True)


def complain(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """`sys.excepthook`: the traceback of what nobody caught."""
    import traceback

    say("".join(traceback.format_exception(error)), file=sys.stderr, end="")


HIDDEN = "***"
ALWAYS = {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey",
          "authorization"}  # fmt: skip
# what a key or a token of data is called
OF_DATA = {
    "key": {"sort", "image", "images", "label", "labels", "input", "inputs", "target", "text", "data", "dict",
            "feature", "index", "group", "id", "field", "column", "query", "cache", "map", "batch", "output", "sample"},
    "token": {"pad", "padding", "eos", "bos", "unk", "unknown", "mask", "sep", "cls", "end", "start", "stop", "per",
              "next", "special", "separator", "image", "first", "last", "class", "target", "word"},
}  # fmt: skip
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
SETTING = re.compile(r"""([\w.\-\[\]]*\w)=('[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|\{[^}\n]*\}|[^\s'"]\S*)""")
PAIR = re.compile(  # in a dict, as it is typed or as Python shows it
    r"""([{,]\s*(['"]?)([\w.\-]+)\2\s*:\s*)('[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|[^\s,'"{}\[\]][^,{}\[\]\n]*)"""
)
LINE = re.compile(r"(\s*(?:- )*)([\w.\-]+):(?: (\S.*))?$")
PLAIN = ("null", "None", "true", "True", "false", "False", "''", '""')


def is_secret(key: str) -> bool:
    """`api_key`, `hf_token`, `db.password`, `api_key.0`; not `image_key`, `pad_token`, `max_tokens`, `key`."""
    names = [WORD.findall(name) for name in re.split(r"[.\[\]]+", key) if not re.fullmatch(r"-?\d*", name)]
    parts = [[word.lower() for word in name] for name in names if name]
    if not parts:
        return False
    if any(ALWAYS.intersection(words) for words in parts):
        return True
    *before, last = parts[-1]
    if last == "key":
        return bool(before) and before[-1] not in OF_DATA["key"]
    return last == "token" and not OF_DATA["token"].intersection(before)


def hides(key: str, value: Any) -> bool:
    """Whether a value is a secret: a text or number that is no reference to the environment."""
    if value is None or isinstance(value, bool) or value == "" or not isinstance(value, str | int | float):
        return False
    return is_secret(key) and not str(value).lstrip("'\"").startswith("${oc.env:")


def masked_word(word: str) -> str:
    """One word of a command line."""
    key, equals, value = word.partition("=")
    return f"{key}={HIDDEN}" if equals and hides(key, value) else masked_pairs(word)


def masked_words(words: Iterable[str]) -> list[str]:
    return [masked_word(word) for word in words]


def masked(text: str) -> str:
    """Values of `key=value` and of `{key: value}` in a text, where the key is a secret's."""
    return masked_pairs(
        SETTING.sub(lambda found: f"{found[1]}={HIDDEN}" if hides(found[1], found[2]) else found[0], text)
    )


def masked_pairs(text: str) -> str:
    return PAIR.sub(
        lambda found: (
            f"{found[1]}{HIDDEN}" if hides(found[3], found[4]) and found[4] not in PLAIN else found[0]
        ),
        text,
    )


def masked_lines(text: str) -> str:
    """The same of YAML; what lies below a secret's key is left out."""
    shown, below = [], -1
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        is_item = indent == below and line.lstrip().startswith("- ")
        if below >= 0 and (not line.strip() or indent > below or is_item):
            continue
        found = LINE.match(line)
        hidden = found and found[3] not in PLAIN and hides(found[2], found[3] or "below")
        below = len(found[1]) if found and hidden else -1
        shown.append(f"{found[1]}{found[2]}: {HIDDEN}" if found and hidden else line)
    return "".join(f"{line}\n" for line in shown)
