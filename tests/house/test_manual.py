"""README and manual: short, linked, in step with the settings, and shown by `trainrun help` without torch."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainrun.cli.main import main
from trainrun.cli.manual_pages import FOLDER, find_topic_text, format_link_name, load_topics, split_sections
from trainrun.errors import ConfigError

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(FOLDER.glob("*.md"))]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200
    assert len(load_topics()) > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        if re.match(r"[a-z]+://", target):
            continue
        other = page.parent / place if place else page
        if not other.is_file() or (
            anchor and anchor not in split_sections(other.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_the_project_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"(?<![\w/.])(?:scripts|tests|trainrun)/[\w/.-]*\w", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_leads_to_every_topic() -> None:
    linked = set(re.findall(r"\(trainrun/manual/(\w+)\.md\)", README.read_text(encoding="utf-8")))
    assert linked == set(load_topics())


def test_the_site_has_every_topic() -> None:
    pages = re.findall(r": (\w+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(pages) == sorted([*load_topics(), "index"])


def test_the_tables_of_settings_are_those_of_the_config() -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "manual_settings.py"))["settings_text"]()
    assert load_topics()["settings"] == text, "write it again: python scripts/manual_settings.py"


def test_a_heading_is_named_once() -> None:
    """`trainrun help HEADING` and `trainrun help TOPIC` show one thing each."""
    names = [
        *load_topics(),
        *(
            name
            for topic, text in load_topics().items()
            if topic != "settings"
            for name in split_sections(text)
        ),
    ]
    assert sorted(names) == sorted(set(names))


def test_help_prints_the_topics_one_topic_or_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in load_topics())
    assert find_topic_text("data").startswith("# ")
    assert find_topic_text("Signals and exit codes").startswith("## Signals")
    assert "](" not in "".join(find_topic_text(name) for name in load_topics())
    assert find_topic_text("trainer.max_steps").startswith("trainer.max_steps=")
    assert find_topic_text("autotune").startswith("## Autotune")
    assert find_topic_text("trainer").startswith("trainer.max_epochs=")
    assert main(["--help"]) == 0
    assert "trainrun help [TOPIC]" in capsys.readouterr().out


def test_a_word_that_is_no_topic_is_looked_for_in_the_manual() -> None:
    assert find_topic_text("lora").startswith("## Transforms of the model")
    assert "GAN" in find_topic_text("gan")
    assert "trainrun help several-devices" in find_topic_text("ddp")
    command, _, sections_of_it = find_topic_text("resume").partition("\n\n")
    assert command.startswith("trainrun resume: ")
    assert "resume" in sections_of_it


def test_a_mistyped_topic_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"help trianing: no such topic. Did you mean training\?"):
        find_topic_text("trianing")


def test_slugs_are_those_of_links() -> None:
    assert format_link_name("What it does, and why") == "what-it-does-and-why"
    assert split_sections("# A\n\n## One\nx\n## Two\ny\n") == {"one": "## One\nx\n", "two": "## Two\ny\n"}


def test_links_of_a_published_readme_are_absolute() -> None:
    url = "https://example.org/team/trainrun"
    hook = runpy.run_path(str(ROOT / "scripts" / "release_metadata.py"))
    text = hook["published_readme"](README.read_text(encoding="utf-8"), url)
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    for mark, target in targets:
        kind, path = "raw" if mark else "blob", target.partition("#")[0].removeprefix(url)
        assert target.startswith(f"{url}/{kind}/main/")
        assert (ROOT / path.removeprefix(f"/{kind}/main/")).is_file()
    elsewhere = "[a](https://other.org) [b](#here) ![c](d.png)"
    assert hook["published_readme"](elsewhere, url) == elsewhere.replace("d.png", f"{url}/raw/main/d.png")


def test_a_release_has_the_addresses_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = runpy.run_path(str(ROOT / "scripts" / "release_metadata.py"))["ReleaseMetadata"](str(ROOT), {})
    for url in ("https://example.org/team/trainrun", ""):
        monkeypatch.setenv("TRAINRUN_URL", url)
        metadata: dict[str, Any] = {}
        hook.update(metadata)
        assert ("Documentation" in metadata["urls"]) == bool(url)
        assert f"]({url + '/raw/main/' if url else ''}trainrun/manual/pictures" in metadata["readme"]["text"]


def test_pictures_load_nothing_from_elsewhere_and_have_a_text() -> None:
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            assert len(words) > 10, f"{page.name}: {target} has no text"
            picture = (page.parent / target).read_bytes()
            assert re.search(rb"(?:src|href|url\()\s*=?\s*[\"']?https?:", picture) is None


def test_the_first_page_of_the_site_is_the_readme_with_links_that_hold_there() -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "site_home.py"))["home_page"]()
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [target for target in targets if not (FOLDER / target).is_file()] == []


@pytest.mark.process
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "learning rate" in (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
