"""`trainrun help [TOPIC]`: print pages of the manual in `trainrun/manual/*.md`. Nothing here imports torch."""

from __future__ import annotations

import re
from pathlib import Path

from trainrun.cli.long_text import print_long_text
from trainrun.cli.main import COMMANDS
from trainrun.cli.run_arguments import Parser
from trainrun.config.argv import find_conf_dir, find_user_conf_dirs, list_groups
from trainrun.config.help_text import build_help_text
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.output import report_result

MOST_SECTIONS, MOST_NAMES = 2, 8  # that are printed, or named
FIRST = ("first_run", "from_lightning")  # pages that a newcomer reads first
FOLDER = Path(__file__).resolve().parents[1] / "manual"


def main(argv: list[str]) -> int:
    """Print a topic or section of the manual, or the help of a setting; without an argument, the list of topics."""
    parser = Parser(
        prog="trainrun help", allow_abbrev=False,
        description="Prints a topic of the manual, or one section of it. Without a topic it lists them.",
    )  # fmt: skip
    parser.add_argument(
        "topic", metavar="TOPIC", nargs="*", help="a topic, a section, a command or a setting"
    )
    text = find_topic_text(" ".join(parser.parse_args(argv).topic))
    print_long_text(text)
    report_result(text=text)
    return EXIT_DONE


def load_topics() -> dict[str, str]:
    """Return the text of each manual page by name, the pages for newcomers first."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    return {name: pages[name] for name in sorted(pages, key=lambda name: (name not in FIRST, name))}


def format_link_name(heading: str) -> str:
    """Return the link name of a heading: `Signals and exit codes` becomes `signals-and-exit-codes`."""
    return re.sub(r"[^\w-]", "", heading.strip().lower().replace(" ", "-"))


def split_sections(text: str) -> dict[str, str]:
    """Return the sections of a page (`## ` headings) by their link names."""
    parts = re.split(r"^## (?=.)", text, flags=re.MULTILINE)[1:]
    return {format_link_name(part.partition("\n")[0]): f"## {part}" for part in parts}


def find_topic_text(topic: str) -> str:
    """Return the text of a topic. Raise ConfigError with the most similar topic if there is none."""
    pages = load_topics()
    if not topic:
        return "\n".join(
            [
                *_format_overview(pages),
                "",
                "trainrun help TOPIC prints one; trainrun --help lists the settings.",
            ]
        )
    wanted = format_link_name(topic)
    if wanted in pages:
        return _format_page(pages[wanted])
    matches = {
        name: part
        for page, text in pages.items()
        if page != "settings"
        for name, part in split_sections(text).items()
    }
    if wanted in matches and wanted not in list_groups([find_conf_dir()]):
        return _format_page(matches[wanted])
    try:  # a group, a section of settings, one setting or a command
        help_of_topic = build_help_text(
            [topic], COMMANDS, [*find_user_conf_dirs([], Path.cwd()), find_conf_dir()]
        )
        mentions = _find_mentions(topic, pages) if topic in COMMANDS else ""
        return f"{help_of_topic}\n\n{mentions}" if mentions else help_of_topic
    except ConfigError:
        if help_of_topic := _find_mentions(topic, pages):
            return help_of_topic
        near = suggest_closest_name(wanted, [*pages, *matches, *COMMANDS])
        raise ConfigError(f"help {topic}: no such topic.{near} Topics: {', '.join(pages)}") from None


def _find_mentions(topic: str, known: dict[str, str]) -> str:
    """Return the sections that mention a topic in the heading, else in the text, most mentions first.

    If there are many sections, return only their names.
    """
    word = re.compile(rf"\b{re.escape(topic)}", re.IGNORECASE)
    pages = [text for page, text in known.items() if page != "settings"]
    parts = {name: part for text in pages for name, part in split_sections(text).items() if word.search(part)}
    headed = {name: part for name, part in parts.items() if word.search(part.partition("\n")[0])}
    matches = headed or parts
    names = sorted(matches, key=lambda name: -len(word.findall(matches[name])))
    if len(matches) <= MOST_SECTIONS:
        return "\n\n".join(_format_page(matches[name]) for name in names)
    lines = [f"{topic} is in these sections:"]
    for name in names[:MOST_NAMES]:
        line = next(line for line in matches[name].splitlines() if word.search(line))
        lines.append(f"  trainrun help {name:<28} {_format_page(line).strip(' #|')}")
    return "\n".join(lines)


def _format_overview(known: dict[str, str]) -> list[str]:
    lines = ["The manual:"]
    for name, text in known.items():
        lines.append(f"  {name:<14} {text.partition(chr(10))[0].lstrip('# ')}")
    return lines


def _format_page(text: str) -> str:
    """Return a page for the screen, without images. A link `[data](data.md)` becomes `data (trainrun help data)`."""
    text = re.sub(r"^!\[.*\n\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]+)\]\(([\w-]+)\.md(?:#[\w-]+)?\)", r"\1 (trainrun help \2)", text)
    text = re.sub(r"\[([^\]]+)\]\(#[\w-]+\)", r"\1", text)
    return text.rstrip()
