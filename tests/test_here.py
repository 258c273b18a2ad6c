"""A module of the working directory wins over one of the same name elsewhere, for the target alone."""

from __future__ import annotations

import multiprocessing
import pickle
import sched
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainrun.here
from trainrun.errors import PluginError
from trainrun.instantiate import build_node, check_node_arguments, import_target, is_shadowed_module
from trainrun.user_code import is_built_in

NET = """
class Net:
    def __init__(self, width=1):
        self.width = width

    def __call__(self):
        return type(self).__module__, self.width
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, which comes last, as for the command `trainrun`."""
    elsewhere = tmp_path / "site"
    elsewhere.mkdir()
    (elsewhere / "here_common.py").write_text("class Net:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(elsewhere), *sys.path, str(tmp_path)])
    monkeypatch.setattr(trainrun.here, "__path__", [str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("trainrun.here.", "here_"))]:
        del sys.modules[name]


def call(made: Any, queue: Any) -> None:
    queue.put(made())


@pytest.mark.parametrize("name", ["sched", "types", "queue", "here_common"])
def test_the_working_directory_wins(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(NET)
    before = sys.modules.get(name)
    node = {"_target_": f"{name}.Net", "width": 3}
    assert check_node_arguments(node, "model") == []
    assert build_node(node, "model")() == (f"trainrun.here.{name}", 3)
    assert sys.modules.get(name) is before  # the library's own imports go on as they were
    assert hasattr(sched, "scheduler")


def test_a_task_whose_module_is_shadowed_is_not_built_in(folder: Path) -> None:
    (folder / "here_common.py").write_text(NET)
    node = {"_target_": "here_common.Net"}
    assert not is_built_in(build_node(node, "task"))
    assert is_built_in(build_node({"_target_": "trainrun.task.vae.Vae"}, "task"))


def test_one_that_was_imported_already_wins_no_more(folder: Path) -> None:
    import here_common

    assert "__call__" not in vars(here_common.Net)
    (folder / "here_common").mkdir()
    (folder / "here_common" / "__init__.py").write_text("from .part import Net\n")
    (folder / "here_common" / "part.py").write_text(NET)
    for target in ("here_common.Net", "here_common.part.Net"):
        assert build_node({"_target_": target}, "model")() == ("trainrun.here.here_common.part", 1)


@pytest.mark.process
def test_pickled_and_in_another_process(folder: Path) -> None:
    (folder / "sched.py").write_text(NET)
    made = build_node({"_target_": "sched.Net", "width": 4}, "data.train")
    assert pickle.loads(pickle.dumps(made)).width == 4
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=call, args=(made, queue))
    process.start()
    assert queue.get(timeout=120) == ("trainrun.here.sched", 4)
    process.join()


def test_what_stays_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that nothing hides, folders of data, torch itself, and Python's safe path."""
    (folder / "here_alone.py").write_text(NET)
    assert build_node({"_target_": "here_alone.Net"}, "model")() == ("here_alone", 1)
    (folder / "here_common").mkdir()  # of data, no package
    (folder / "torch.py").write_text("")
    assert not is_shadowed_module("here_common")
    assert not is_shadowed_module("torch")
    (folder / "sched.py").write_text(NET)
    assert is_shadowed_module("sched")
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    assert not is_shadowed_module("sched")


def test_the_file_is_named_where_it_lacks_the_name(folder: Path) -> None:
    (folder / "sched.py").write_text(NET)
    with pytest.raises(PluginError) as caught:
        import_target("sched.Nett", "model")
    assert f"sched ({folder}/sched.py) has no Nett; did you mean Net?" in str(caught.value)


def test_a_program_that_stands_elsewhere_finds_a_module_of_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "net_elsewhere.py").write_text(NET)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    assert import_target("net_elsewhere.Net", "model._target_").__name__ == "Net"
