"""Every import arrow of the package runs downhill: from a floor to a lower one, and never in a circle.

What is imported under `TYPE_CHECKING` names the type of an argument and builds nothing: it may point
uphill, but two files never name each other's types. A group room names no sibling's types either.
"""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainrun"

# A name that ends with a slash is a room (a folder); a file of a room may have a floor of its own.
# The files of one room may import each other.
FLOORS = {
    12: ["smaller/"],
    11: ["race/", "sampling/sample_command", "export/", "embedding/", "watch/watch_command", "watch/ls_command",
         "convert/convert_command", "benchmark/diagnose_command", "benchmark/autotune_command",
         "verify/verify_command", "prediction/predict_command"],
    10.5: ["starter/"],
    10: ["cli/", "runs/api"],
    9.5: ["sweep/run_sweep", "sweep/places/thread_trial"],
    9: ["benchmark/", "verify/", "convert/", "watch/", "launch/", "prediction/"],
    8: ["runs/", "sweep/"],
    7: ["summary/", "live/"],
    6: ["assemble/"],
    5: ["training/", "autotune/", "step/", "distillation/", "sampling/", "training/recovery/restore"],
    4: ["training/components", "plots/"],
    3: ["mirror/", "training/trained_parameters", "training/triggers", "training/task_calls",
        "training/checks/unsaved_state", "training/checks/task_pictures", "training/recovery/",
        "training/without_trace", "config/"],
    2: ["data/", "task/", "precision/", "parallel/", "monitor/", "checkpoint/", "hook/", "vae_health/", "trackers/"],
    1: ["seeding", "sums", "instantiate", "here", "train_state",
        "config/schema", "config/aliases",
        "runtime/", "timing/", "comparison/", "optimizer/", "scheduler/", "transform/"],
    0.5: ["model/", "folder/", "runtime/memory_layout"],
    0: ["errors", "user_code", "plugin_faults", "limits", "output", "interfaces", "timing/phases",
        "runtime/foreach_copy", "patterns", "tensors"],
}  # fmt: skip
MOST_INSIDE_FUNCTIONS = 60
ONE_ROOM = {"__main__": "cli"}  # part of it
TOP = "__init__"  # the public names, imported when they are asked for: nothing inside imports it

FLOOR_OF = {name.rstrip("/"): floor for floor, names in FLOORS.items() for name in names}
GROUP_ROOMS = {name.partition("/")[0] for names in FLOORS.values() for name in names if "/" in name}


class Arrow(NamedTuple):
    source: str
    target: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"trainrun/{self.source.replace('.', '/')}.py:{self.line} imports trainrun.{self.target}"


def module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    first = module.partition(".")[0]
    return ONE_ROOM.get(first, first)


def floor_of(module: str) -> int:
    """The floor of the longest name in the table that is the module, or a folder around it."""
    name = "/".join([room_of(module), *module.split(".")[1:]])
    while name not in FLOOR_OF and "/" in name:
        name = name.rpartition("/")[0]
    return FLOOR_OF.get(name, -1)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_in(node: ast.AST, typing_only: bool = False):
    """Every import statement below a node, also inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, typing_only
        elif is_type_checking(child):
            for part in child.body:
                yield from imports_in(ast.Module([part], []), True)
            for part in child.orelse:
                yield from imports_in(ast.Module([part], []), typing_only)
        else:
            yield from imports_in(child, typing_only)


@cache
def arrows_of(package: Path) -> list[Arrow]:
    modules = {module_of(path, package): path for path in package.rglob("*.py")}
    arrows = []
    for source, path in modules.items():
        for node, typing_only in imports_in(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, (
                    f"{path}:{node.lineno}: import from the defining module, by its full name"
                )
                base = node.module or ""
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                base, names = "", [alias.name for alias in node.names]
            for name in names:
                if name.partition(".")[0] != "trainrun":
                    continue
                inner = name.removeprefix("trainrun").lstrip(".")
                found = inner if inner in modules else base.removeprefix("trainrun").lstrip(".")
                arrows.append(Arrow(source, found or TOP, node.lineno, typing_only))
    return arrows


def faults_of(arrows: list[Arrow]) -> list[str]:
    faults = []
    for arrow in arrows:
        source, target = room_of(arrow.source), room_of(arrow.target)
        if source in (target, TOP):
            continue
        if target == TOP:
            faults.append(f"{arrow}: import from the defining module")
            continue
        floors = floor_of(arrow.source), floor_of(arrow.target)
        if floors[0] == floors[1] and {source, target} <= GROUP_ROOMS:
            faults.append(f"{arrow}: a group room never imports a sibling; take it as an argument")
        elif floors[0] < floors[1] and not arrow.typing_only:
            faults.append(f"{arrow}: uphill, from floor {floors[0]} to floor {floors[1]}")
        elif floors[0] == floors[1] and {source, target} & GROUP_ROOMS and not arrow.typing_only:
            faults.append(f"{arrow}: sideways between a group room and a file of its floor")
    return faults


def circle_in(arrows: list[Arrow], with_types: bool = False) -> list[str]:
    """The modules of one import circle, the first again at the end; empty where there is none.

    with_types: names of types count too, so that no file can be understood only after itself.
    """
    graph: dict[str, set[str]] = {}
    for arrow in arrows:
        if (with_types or not arrow.typing_only) and arrow.source != TOP and arrow.source != arrow.target:
            graph.setdefault(arrow.source, set()).add(arrow.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_file_has_a_floor():
    modules = {module_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")} - {TOP}
    missing = sorted(module for module in modules if floor_of(module) < 0)
    assert not missing, f"give it a floor in {Path(__file__).name}: {', '.join(missing)}"
    there = {
        "/".join(module.split(".")[: depth + 1])
        for module in modules
        for depth in range(module.count(".") + 1)
    }
    gone = sorted(FLOOR_OF.keys() - there)
    assert not gone, f"no longer there, take it out of {Path(__file__).name}: {', '.join(gone)}"
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == GROUP_ROOMS


def test_imports_run_downhill():
    faults = faults_of(arrows_of(PACKAGE))
    assert not faults, "\n" + "\n".join(faults)


def test_no_import_runs_in_a_circle():
    circle = circle_in(arrows_of(PACKAGE))
    assert not circle, " -> ".join(circle)


def test_no_files_name_each_others_types():
    circle = circle_in(arrows_of(PACKAGE), with_types=True)
    assert not circle, " -> ".join(circle)


def test_no_two_rooms_import_each_other():
    """Not even the types: whoever reads a room reads the rooms below it, and none of those above."""
    edges = {(room_of(arrow.source), room_of(arrow.target)) for arrow in arrows_of(PACKAGE)}
    rooms = {(one, other) for one, other in edges if {one, other} <= GROUP_ROOMS}
    assert {(one, other) for one, other in rooms if one < other and (other, one) in rooms} == set()


def imports_inside_functions(package: Path) -> set[str]:
    """File and line of each import of the package inside a function."""
    return {
        f"{path.relative_to(package)}:{inner.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("trainrun")
    }


def test_imports_inside_functions_are_few():
    found = imports_inside_functions(PACKAGE)
    assert len(found) <= MOST_INSIDE_FUNCTIONS, (
        "import it at the top, but for satellites and optional packages"
    )
    assert any(line.startswith("cli/train_command.py") for line in found)  # some were seen


def test_the_lawn_imports_nothing_of_trainrun_but_the_types_and_errors_of_its_arguments():
    lawn = ("model", "transform", "patterns", "tensors")
    faults = [
        str(arrow)
        for arrow in arrows_of(PACKAGE)
        if room_of(arrow.source) in lawn and room_of(arrow.target) not in (*lawn, "limits", "errors")
    ]
    assert not faults, "\n" + "\n".join(faults)


def write_package(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_walk_sees_each_kind_of_fault(tmp_path: Path):
    typing_only = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trainrun.runs.run import run\n"
    )
    package = write_package(
        tmp_path,
        errors="import trainrun.training.loop\n",
        training__in__loop="def f():\n    from trainrun.training import components, state\n"
        "    import trainrun.interfaces\n",
        training__in__components=typing_only + "else:\n    from trainrun.cli.main import main\n",
        training__in__state="",
        interfaces="from trainrun.errors import E\n",
        cli__in__main="from trainrun import load_run\nfrom trainrun.cli.resume_command import main\n",
        runs__in__run="",
        cli__in__resume_command="from trainrun.cli.main import tell\n",
        data__in__sampler="from trainrun.task.losses import mse\nfrom trainrun.config.validate import check\n",
        task__in__losses="",
        config__in__validate="",
        __init__="from trainrun.runs.run import run\n",
    )
    arrows = arrows_of(package)
    assert sorted(faults_of(arrows)) == [
        "trainrun/cli/main.py:1 imports trainrun.__init__: import from the defining module",
        "trainrun/data/sampler.py:1 imports trainrun.task.losses: a group room never imports a sibling; "
        "take it as an argument",
        "trainrun/data/sampler.py:2 imports trainrun.config.validate: uphill, from floor 2 to floor 3",
        "trainrun/errors.py:1 imports trainrun.training.loop: uphill, from floor 0 to floor 5",
        "trainrun/training/components.py:5 imports trainrun.cli.main: uphill, from floor 4 to floor 10",
    ]
    assert set(circle_in(arrows)) in (
        {"cli.main", "cli.resume_command"},
        {"errors", "training.loop", "interfaces"},
    )
    assert (
        circle_in([arrow for arrow in arrows if arrow.source.startswith(("training.", "interfaces"))]) == []
    )
    typed = [Arrow("board", "parts", 1, True), Arrow("parts", "board", 1, False)]
    assert circle_in(typed) == []
    assert set(circle_in(typed, with_types=True)) == {"board", "parts"}
