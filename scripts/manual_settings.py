"""Writes `trainrun/manual/settings.md`: every setting with its default, from the fields of `RunConfig`."""

from __future__ import annotations

from pathlib import Path

from trainrun.config.help_text import setting_rows

TARGET = Path(__file__).resolve().parents[1] / "trainrun" / "manual" / "settings.md"
HEAD = """\
# Every setting, with its default and what is allowed

Made by `python scripts/manual_settings.py`; change a setting where it is defined, not here. The settings that an option
brings along (`model.width`, `optimizer.lr`) are listed by `trainrun --help model=mlp`.
"""


def settings_text() -> str:
    """The whole file: one table a section."""
    tables: dict[str, list[str]] = {}
    for name, default, meaning in setting_rows():
        section = name.rpartition(".")[0] or "the run itself"
        shown = meaning.replace("|", "\\|")
        tables.setdefault(section, []).append(f"| `{name}` | `{default}` | {shown} |")
    head = ["| setting | default | meaning |", "| --- | --- | --- |"]
    return "\n".join(
        [HEAD, *("\n".join([f"## {name}", "", *head, *rows, ""]) for name, rows in tables.items())]
    )


if __name__ == "__main__":
    TARGET.write_text(settings_text(), encoding="utf-8")
