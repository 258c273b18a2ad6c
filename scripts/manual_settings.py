"""Writes `trainrun/manual/settings.md`: every setting with its default, and the rules that join settings."""

from __future__ import annotations

import re
from pathlib import Path

from trainrun.config.help_text import iterate_setting_rows
from trainrun.config.rules import GPU_RULES, RULES, STEP_RULES, Rule

TARGET = Path(__file__).resolve().parents[1] / "trainrun" / "manual" / "settings.md"
HEAD = """\
# Every setting, with its default and what is allowed

This page lists every setting of a run, and the settings that cannot be combined. The settings of an option
(`model.width`, `optimizer.lr`) are listed by `trainrun --help model=mlp`. `trainrun help SETTING` prints one row:

    trainrun help trainer.num_threads

```output
trainer.num_threads=auto                        number of threads of one operation on a CPU (1 or more, or auto)
```

`python scripts/manual_settings.py` writes this page. To change a text, change it where the setting is defined.
"""


def settings_text() -> str:
    """The whole file: one table a section."""
    tables: dict[str, list[str]] = {}
    for name, default, meaning in iterate_setting_rows():
        section = name.rpartition(".")[0] or "the run itself"
        shown = meaning.replace("|", "\\|")
        tables.setdefault(section, []).append(f"| `{name}` | `{default}` | {shown} |")
    tables_of_settings = [HEAD]
    head = ["| setting | default | meaning |", "| --- | --- | --- |"]
    tables_of_settings += ["\n".join([f"## {name}", "", *head, *rows, ""]) for name, rows in tables.items()]
    return "\n".join([*tables_of_settings, rules_text()])


def rules_text() -> str:
    """Return the tables of the rules. A value of the config in a text becomes three dots."""
    head = ["| setting | why it is refused | what to do |", "| --- | --- | --- |"]
    parts = [
        "## Settings that cannot be combined",
        "",
        "A config that breaks a rule is refused before anything starts.",
        "",
    ]
    parts += [*head, *map(rule_row, RULES), ""]
    parts += [
        "A step of one graph (`trainer.compile.scope=step`, `trainer.cuda_graphs=true`) cannot be combined with:",
        "",
    ]
    parts += [*head, *map(rule_row, STEP_RULES), ""]
    parts += ["Without a GPU these settings are refused:", "", *head, *map(rule_row, GPU_RULES), ""]
    return "\n".join(parts)


def rule_row(rule: Rule) -> str:
    """Return the row of a rule in the manual's table."""
    names = {"{mix}": "data.mix", "{asked}": "data.sampling or data.mix"}
    setting, why, instead = rule.setting, rule.why, rule.instead
    for name, words in names.items():
        setting, why, instead = (text.replace(name, words) for text in (setting, why, instead))
    setting = re.sub(r"=\{.*\}", "", setting)
    why, instead = (re.sub(r"\{.*?\}", "...", text) for text in (why, instead))
    return f"| `{setting}` | {why} | {instead} |"


if __name__ == "__main__":
    TARGET.write_text(settings_text(), encoding="utf-8")
