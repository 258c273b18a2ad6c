"""Where the members of a tar file lie, found by going once from header to header; nothing is unpacked.

Formats: POSIX ustar and pax, GNU long names (https://www.gnu.org/software/tar/manual/html_node/Standard.html).
Links, devices and folders are passed over. A name is only ever a name: no file is opened or made by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512
WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
MAX_NAME_BYTES = 2**20  # of a pax header or GNU long name
REGULAR, PAX, PAX_FOR_ALL, LONG_NAME, LONG_LINK, SPARSE = (b"0", b"\0", b"7"), b"x", b"g", b"L", b"K", b"S"
COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
}  # fmt: skip
Read = Callable[[int, int], bytes]  # place, size


class Member(NamedTuple):
    """A regular file. begin: of its first header. place, size: of its content, in bytes."""

    name: str
    begin: int
    place: int
    size: int


def members(read: Read, size: int, start: int = 0) -> Iterator[Member]:
    """The regular files of a tar file of `size` bytes, in their order. ValueError: damaged or cut short."""
    place, begin = start, start
    long_name, long_size = None, None
    while place < size:
        if size - place < BLOCK:
            raise ValueError(
                f"cut short: {size - place} bytes are left at byte {place}, a header has {BLOCK}"
            )
        header = read(place, BLOCK)
        if header.count(0) == BLOCK:  # the end; a second such block follows
            return
        _check(header, place)
        kind, length = header[156:157], _number(header[124:136], place)
        content_bytes = 0 if kind in WITHOUT_CONTENT else length
        if kind in REGULAR and long_size is not None:
            content_bytes = long_size
        end = place + BLOCK + content_bytes
        if end > size:
            raise ValueError(f"cut short: the member at byte {place} ends at byte {end}, the file at {size}")
        if kind in (PAX, LONG_NAME):
            if length > MAX_NAME_BYTES:
                raise ValueError(
                    f"a name of {length} bytes at byte {place}; at most {MAX_NAME_BYTES} are read"
                )
            content = read(place + BLOCK, length)
            if kind == LONG_NAME:
                long_name = _text(content.rstrip(b"\0"))
            else:
                name, long_size = _pax(content, place)
                long_name = name or long_name
        elif kind == SPARSE:
            raise ValueError(f"a sparse member at byte {place}; pack the files anew without --sparse")
        elif kind not in (PAX_FOR_ALL, LONG_LINK):
            if kind in REGULAR:
                yield Member(long_name or _name(header), begin, place + BLOCK, content_bytes)
            long_name, long_size = None, None
            begin = end + -end % BLOCK
        place = end + -end % BLOCK
    raise ValueError("cut short: the block of zeros at its end is missing")


def _check(header: bytes, place: int) -> None:
    stated = header[148:156].strip(b" \0")
    plain = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if stated.isdigit() and len(stated) < 8 and set(stated) <= set(b"01234567") and int(stated, 8) == plain:
        return
    packed = next(
        (name for magic, name in COMPRESSED.items() if place == 0 and header.startswith(magic)), None
    )
    if packed is not None:
        raise ValueError(
            f"packed with {packed}, so its members cannot be found one by one; unpack it once, as with "
            "`gunzip shard.tar.gz`, and name the .tar file"
        )
    raise ValueError(f"not a tar file, or damaged: the checksum of the header at byte {place} is wrong")


def _number(field: bytes, place: int) -> int:
    """Octal digits, or with the highest bit set a number of 95 bits."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40 or value >= 2**63:
            raise ValueError(f"a negative or impossible size at byte {place}")
        return value
    digits = field.strip(b" \0")
    if not set(digits) <= set(b"01234567"):
        raise ValueError(f"an impossible size {digits!r} at byte {place}")
    return int(digits or b"0", 8)


def _pax(content: bytes, place: int) -> tuple[str | None, int | None]:
    """Name and size in a pax header, whose records are `length key=value\\n`."""
    name, size, position = None, None, 0
    while position < len(content):
        word = content[position : position + 20].partition(b" ")[0]
        length = int(word) if word.isdigit() and len(word) < 10 else 0
        record = content[position + len(word) + 1 : position + length]
        if not len(word) + 4 <= length <= len(content) - position or not record.endswith(b"\n"):
            raise ValueError(f"a damaged pax header at byte {place}")
        key, _, value = record[:-1].partition(b"=")
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError(f"an impossible size {value[:30]!r} in the pax header at byte {place}")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise ValueError(f"a sparse member at byte {place}; pack the files anew without --sparse")
        position += length
    return name, size


def _name(header: bytes) -> str:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    posix = header[257:263] == b"ustar\0"  # GNU's own format keeps times where the prefix would be
    return _text(prefix + b"/" + name if posix and prefix else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
