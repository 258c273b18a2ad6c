"""What the built package says of itself: the README, and the addresses of the project where it is published.

A package index shows the README without the files beside it. So a release is built with the address of the repository,
`TRAINRUN_URL=https://... python -m build`, and every relative link and picture becomes absolute. Others leave them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
ADDRESSES = {"Homepage": "", "Documentation": "/blob/main/trainrun/manual/first_run.md",
             "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}  # fmt: skip


def published_readme(text: str, url: str) -> str:
    """Return the README with absolute links: pictures as files, all others as pages of the repository."""

    def absolute(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        return f"{mark}[{words}]({url}/{'raw' if mark else 'blob'}/main/{path})"

    return LINK.sub(absolute, text)


class ReleaseMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        url = os.environ.get("TRAINRUN_URL", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": published_readme(text, url) if url else text,
        }
        metadata["urls"] = {name: url + path for name, path in ADDRESSES.items()} if url else {}
