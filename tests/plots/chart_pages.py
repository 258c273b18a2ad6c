"""The charts that a page holds, as its script reads them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class _Figures(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.charts: list[dict[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if (text := dict(attrs).get("data-chart")) is not None:
            self.charts.append(json.loads(text))


def charts_in(page: str) -> list[dict[str, Any]]:
    """Return the data of every chart of a page, in order."""
    parser = _Figures()
    parser.feed(page)
    return parser.charts
