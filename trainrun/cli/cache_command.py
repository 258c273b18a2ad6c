"""`trainrun cache`: list the caches on disks. `trainrun cache clear`: remove the caches that no run uses."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from trainrun.cli.run_arguments import Parser
from trainrun.data.cache.room import (
    LIMIT,
    DiskCache,
    list_cache_folders,
    list_caches,
    read_limit,
    remove_unfinished_folders,
)
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.output import format_count, format_quantity, report_result, say


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="trainrun cache", allow_abbrev=False,
        description="Lists the caches of data.cache=disk:..., tables and texts: size, last use, path, source. If they "
        f"exceed {LIMIT} gigabytes (default: a tenth of the disk), the least recently used are removed.",
    )  # fmt: skip
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "clear"),
        default="list",
        help="clear: remove all caches that are not in use",
    )
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="only caches in this folder; may be repeated"
    )
    words = parser.parse_args(argv)
    for folder in words.folder:
        if not folder.is_dir():
            raise ConfigError(f"cache --folder={folder}: no such folder")
    folders = [folder.expanduser() for folder in words.folder] or list_cache_folders()
    caches = list_caches(folders)
    if words.action == "clear":
        remove_caches(caches, folders)
    else:
        print_caches(caches)
    return EXIT_DONE


def print_caches(caches: list[DiskCache]) -> None:
    for cache in reversed(caches):
        used = (
            "in use now" if cache.is_in_use() else f"used {datetime.fromtimestamp(cache.used):%Y-%m-%d %H:%M}"
        )
        say(f"{format_quantity(cache.num_bytes):>7}B  {used:21}  {cache.path}  {cache.source}")
    total = sum(cache.num_bytes for cache in caches)
    rows = [
        {"path": cache.path, "source": cache.source, "bytes": cache.num_bytes, "used": cache.used}
        for cache in caches
    ]
    report_result(caches=rows, bytes=total)
    summary = f"{format_count(len(caches), 'cache')}, {format_quantity(total)}B"
    if caches:
        summary += f" of at most {format_quantity(read_limit(caches[0].path.parent))}B on a disk ({LIMIT})"
    say(summary)


def remove_caches(caches: list[DiskCache], folders: list[Path]) -> None:
    removed = [cache for cache in caches if cache.remove()]
    for folder in folders:
        remove_unfinished_folders(folder)
    freed, left = sum(cache.num_bytes for cache in removed), len(caches) - len(removed)
    report_result(removed=[cache.path for cache in removed], bytes=freed, num_in_use=left)
    in_use = f"; {format_count(left, 'cache')} in use stay" if left else ""
    say(f"removed {format_count(len(removed), 'cache')}, {format_quantity(freed)}B{in_use}")
