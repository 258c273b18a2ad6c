"""A hook of mkdocs: the README is the first page of the site, with links that hold there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANUAL = "trainrun/manual/"


def home_page() -> str:
    """Return the README with paths as they are from the folder of the manual."""
    return (ROOT / "README.md").read_text(encoding="utf-8").replace(f"]({MANUAL}", "](")


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the files of the site (https://www.mkdocs.org/dev-guide/plugins/#on_files)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=home_page()))
    return files
