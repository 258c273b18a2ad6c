"""README and manual: short, linked, in step with the settings, and shown by `trainrun help` without torch."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from trainrun.cli.main import main
from trainrun.cli.manual_pages import FOLDER, manual_text, sections, slug, topics
from trainrun.errors import ConfigError

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(FOLDER.glob("*.md"))]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200
    assert len(topics()) > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        if re.match(r"[a-z]+://", target):
            continue
        other = page.parent / place if place else page
        if not other.is_file() or (anchor and anchor not in sections(other.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_the_project_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"(?<![\w/.])(?:scripts|tests|trainrun)/[\w/.-]*\w", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_leads_to_every_topic() -> None:
    linked = set(re.findall(r"\(trainrun/manual/(\w+)\.md\)", README.read_text(encoding="utf-8")))
    assert linked == set(topics())


def test_the_site_has_every_topic() -> None:
    pages = re.findall(r": (\w+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(pages) == sorted(topics())


def test_the_tables_of_settings_are_those_of_the_config() -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "manual_settings.py"))["settings_text"]()
    assert topics()["settings"] == text, "write it again: python scripts/manual_settings.py"


def test_a_heading_is_named_once() -> None:
    """`trainrun help HEADING` and `trainrun help TOPIC` show one thing each."""
    names = [
        *topics(),
        *(name for topic, text in topics().items() if topic != "settings" for name in sections(text)),
    ]
    assert sorted(names) == sorted(set(names))


def test_help_prints_the_topics_one_topic_or_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in topics())
    assert manual_text("data").startswith("# ")
    assert manual_text("Signals and exit codes").startswith("## Signals")
    assert "](" not in "".join(manual_text(name) for name in topics())
    assert manual_text("trainer.max_steps").startswith("trainer.max_steps=")
    assert manual_text("autotune").startswith("## Autotune")
    assert manual_text("trainer").startswith("trainer.max_epochs=")
    assert main(["--help"]) == 0
    assert "trainrun help [TOPIC]" in capsys.readouterr().out


def test_a_word_that_is_no_topic_is_looked_for_in_the_manual() -> None:
    assert manual_text("lora").startswith("## Transforms of the model")
    assert "GAN" in manual_text("gan")
    assert "trainrun help several-devices" in manual_text("ddp")
    command, _, sections_of_it = manual_text("resume").partition("\n\n")
    assert command.startswith("trainrun resume: ")
    assert "resume" in sections_of_it


def test_a_mistyped_topic_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"help trianing: no such topic. Did you mean training\?"):
        manual_text("trianing")


def test_slugs_are_those_of_links() -> None:
    assert slug("What it does, and why") == "what-it-does-and-why"
    assert sections("# A\n\n## One\nx\n## Two\ny\n") == {"one": "## One\nx\n", "two": "## Two\ny\n"}
