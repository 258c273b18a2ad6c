"""Build HTML from text. Everything that comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from trainrun.plots.chart import chart_style_and_script

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --quiet: #666; --back: #fff; --line: #e4e4e4; --box: #f6f6f6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --quiet: #a0a0a0; --back: #16181c; --line: #383c44; --box: #22252b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1150px;
       margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 1.8em; }
table { border-collapse: collapse; }
td, th { padding: .25em .9em .25em 0; text-align: left; vertical-align: top;
       border-bottom: 1px solid var(--line); } th { color: var(--quiet); font-weight: 600; min-width: 7em; }
.wide { overflow-x: auto; } .wide td, .wide th { overflow-wrap: normal; white-space: nowrap; min-width: 0; }
.wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: var(--back); }
.beside { display: flex; flex-wrap: wrap; column-gap: 3em; } .beside > div { flex: 1 1 20em; }
pre { background: var(--box); padding: .8em; white-space: pre-wrap; font-size: 13px; } .quiet { color: var(--quiet); }
.banner { background: var(--box); border-left: 4px solid #0072b2; padding: .5em .9em; white-space: pre-wrap; }
.banner.bad { border-left-color: #c0392b; }
figure { margin: 0; } figcaption { margin-bottom: .3em; }
.matrix td { text-align: right; padding: .2em .5em; } .matrix .cell { min-width: 1.6em;
       background: color-mix(in srgb, #0072b2 calc(85% * var(--share)), transparent); }
.matrix .miss { background: color-mix(in srgb, #d55e00 calc(20% + 65% * var(--share)), transparent); }
.matrix span { display: block; width: max-content; max-width: 14em; white-space: normal; }
.wide .matrix .up { vertical-align: bottom;
       min-width: 0; } .up span { writing-mode: vertical-rl; transform: rotate(180deg); max-height: 14em; width: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, calc(7em * var(--wide))), 1fr));
       gap: .8em; margin-bottom: 1em; }
.tiles img { width: 100%; box-sizing: border-box; image-rendering: pixelated; border: 1px solid var(--line); }
.tiles .wrong img { border: 3px solid #d55e00; } .tiles figcaption { font-size: 13px; line-height: 1.3; }
.tiles div { display: flex; font-size: 13px; } .tiles span { flex: 1; text-align: center; }
.wrong figcaption { font-weight: 600; }
@media (max-width: 600px) { .wide { font-size: 13px; } .wide td, .wide th { padding-right: .5em; }
       .wide th:first-child, .wide td:first-child { white-space: normal; min-width: 5em; max-width: 9em;
       overflow-wrap: anywhere; } }
.time-bar { display: flex; height: 1.6em; } .time-legend { list-style: none; padding: 0; columns: 15em; }
.time-legend span { display: inline-block; width: .9em; height: .9em; margin-right: .5em; }
"""


def html_page(title: str, parts: Iterable[str], refresh: float | None = None) -> str:
    """Return an HTML page that needs no other file. Charts add their style and script.

    refresh: seconds after which the page reloads itself, unless the pointer is on a chart.
    """
    reload = "" if refresh is None else f' data-reload="{refresh:g}"'
    inside = [part for part in parts if part]
    style = STYLE
    if any('class="charts"' in part for part in inside):
        chart_style, script = chart_style_and_script()
        style += chart_style
        inside.append(f"<script>\n{script}</script>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body{reload}>\n" + "\n".join(inside) + "\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def section_html(title: str, part: str) -> str:
    """Return HTML under a heading; "" if the HTML is empty."""
    return f"{heading(title)}\n{part}" if part else ""


def paragraph(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def banner(state: str, message: str, bad: bool = False) -> str:
    """Return a box with the state of a run and its final message."""
    text = f": {message}" if message else ""
    return f'<p class="banner{" bad" * bad}"><strong>{escape(state)}</strong>{escape(text)}</p>'


def names_and_values_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values; "" without rows."""
    if not rows:
        return ""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n" for name, value in rows)
    return f"{heading(title)}\n<table>\n{body}</table>"


def columns_html(parts: Iterable[str]) -> str:
    """Return several pieces of HTML that stand side by side if the window is wide enough."""
    return '<div class="beside">' + "".join(f"<div>{part}</div>\n" for part in parts if part) + "</div>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], links: Sequence[str] = ()) -> str:
    """Return a table with a head. links: the target of each row's first cell; "" for none."""
    body = ""
    for i, row in enumerate(rows):
        cells = [f"<td>{escape(text)}</td>" for text in row]
        if links and links[i]:
            cells[0] = f'<td><a href="{escape(quote(links[i]), quote=True)}">{escape(row[0])}</a></td>'
        body += f"<tr>{''.join(cells)}</tr>\n"
    named = "".join(f"<th>{escape(text)}</th>" for text in head)
    return f'<div class="wide"><table>\n<tr>{named}</tr>\n{body}</table></div>'


def bullet_list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"{heading(title)}\n<ul>\n" + "".join(f"<li>{escape(line)}</li>\n" for line in lines) + "</ul>"


def text_samples_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return text samples, the newest first; "" without any."""
    if not rows:
        return ""
    body = "".join(
        f"<tr><th>step {escape(str(row.get('step', '')))}</th>{_text_sample_cell(row)}</tr>\n"
        for row in reversed(rows)
    )
    return f"{heading('Samples')}\n<table>\n{body}</table>"


def _text_sample_cell(row: Mapping[str, Any]) -> str:
    """Return a table cell with a prompt and its continuation, or an original above its reconstruction."""
    first, between, second = ("original", "<br>", "rebuilt") if "original" in row else ("prompt", "", "text")
    before, after = (escape(str(row.get(name, ""))) for name in (first, second))
    return f'<td class="text"><b>{before}</b>{between}{after}</td>'


def preformatted_text(title: str, text: str) -> str:
    """Return preformatted text under a heading; "" without text."""
    return f"{heading(title)}\n<pre>{escape(text)}</pre>" if text else ""


def collapsible_text(title: str, text: str) -> str:
    """Return text that the reader opens by a click; "" without text."""
    if not text:
        return ""
    return f"<details>\n<summary>{escape(title)}</summary>\n<pre>{escape(text)}</pre>\n</details>"
