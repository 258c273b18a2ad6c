"""Open nodes: what is found, what is refused, and with which words."""

import functools
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from approved import refused

from trainrun.errors import ConfigError, PluginError
from trainrun.instantiate import build_node, check_node_arguments, import_target

SOURCE = """
from trainrun.errors import ConfigError

WIDTH = 3

class Head:
    def __init__(self, size=1):
        self.size = size

class Net:
    def __init__(self, width, hidden=(1,), *, head=None):
        self.width, self.hidden, self.head = width, hidden, head
        if width == 9:
            raise ValueError("nine is too wide\\nand more")
        if width == 8:
            raise ConfigError("model.width=8: from trainrun")

    class Inner:
        pass

def optimizer(params, lr, **more):
    return params, lr, more

def positional(first, /, second=0, **more):
    return first, second, more

def everything(*args, **keywords):
    return args, keywords
"""

DOUBTFUL = """
import functools
import inspect

def with_labels(init):
    \"""As `transformers` does: the constructor takes more than the one that it says it wraps.\"""
    @functools.wraps(init)
    def wider(self, *args, num_labels=None, **more):
        if num_labels is not None:
            self.num_labels = num_labels
        init(self, *args, **more)
    return wider

class Config:
    @with_labels
    def __init__(self, width=1):
        self.width = width

class Declared:
    __signature__ = inspect.Signature([inspect.Parameter("width", inspect.Parameter.KEYWORD_ONLY)])

    def __init__(self, **fields):
        self.fields = fields

class Narrow:
    def __init__(self, width):
        self.width = width
"""


NO_HIDEN = "plug_net.Net takes no such argument; did you mean hidden? It takes: width, hidden, head"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import importlib
    import sys

    (tmp_path / "plug_net.py").write_text(SOURCE)
    (tmp_path / "plug_doubtful.py").write_text(DOUBTFUL)
    (tmp_path / "plug_broken.py").write_text("x = 1\ny = undefined_name\n")
    (tmp_path / "plug_syntax.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "plug_needs.py").write_text("import no_such_package_here\n")
    (tmp_path / "plug_exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "plug_lazy.py").write_text("def __getattr__(name):\n    raise RuntimeError('no ' + name)\n")
    (tmp_path / "plug_package").mkdir()
    (tmp_path / "plug_package" / "__init__.py").write_text("")
    (tmp_path / "plug_package" / "part.py").write_text("class Thing:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[name]


def test_a_hidden_module_is_found_in_the_folder_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after another one of that name was imported in another folder."""
    for folder in ("plug_elsewhere", "plug_first", "plug_second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plug_hidden.py").write_text(f"class Thing:\n    folder = '{folder}'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "plug_elsewhere"))
    for folder in ("plug_first", "plug_second"):
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / folder)])
        assert import_target("plug_hidden.Thing", "model").folder == folder


def test_a_module_younger_than_the_listing_of_its_folder_is_imported(tmp_path: Path) -> None:
    find_spec("plug_newest")  # Python lists the folder, and lists it again only when its time changes
    times = tmp_path.stat()
    (tmp_path / "plug_newest.py").write_text("class Thing:\n    pass\n")
    os.utime(tmp_path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert find_spec("plug_newest") is None
    assert import_target("plug_newest.Thing", "model").__name__ == "Thing"


def node(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("plug_net.Net", "Net"),
        ("plug_net.Net.Inner", "Inner"),
        ("plug_package.part.Thing", "Thing"),
        ("torch.nn.Linear", "Linear"),
        ("torch.optim.lr_scheduler.StepLR", "StepLR"),
        ("torch.zeros", "zeros"),
        ("functools.partial", "partial"),
    ],
)
def test_a_dotted_path_is_found(target: str, name: str) -> None:
    assert import_target(target, "model").__name__ == name


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("plug_net.Nett", "model._target_=plug_net.Nett: plug_net has no Nett; did you mean Net?"),
        ("plug_net.Net.Iner", "plug_net.Net.Iner: plug_net.Net has no Iner; did you mean Inner?"),
        ("plug_package.prt.Thing", "plug_package has no prt; did you mean part?"),
        ("plug_nett.Net", "no module plug_nett (looked in {folder}, PYTHONPATH and what is installed); did "
                           "you mean plug_net?"),
        ("torhc.nn.Linear", "{folder}, PYTHONPATH and what is installed); did you mean torch?"),
        ("zzqqxx.Net", "no module zzqqxx (looked in {folder}, PYTHONPATH and what is installed)"),
        ("plug_broken.Net", "importing plug_broken failed: NameError: name 'undefined_name' is not defined "
                            "({folder}/plug_broken.py line 2)"),
        ("plug_syntax.Net", "importing plug_syntax failed: SyntaxError: "),
        ("plug_syntax.Net", "({folder}/plug_syntax.py line 2)"),
        ("plug_needs.Net", "failed: ModuleNotFoundError: No module named 'no_such_package_here' "
                           "({folder}/plug_needs.py line 1)"),
        ("plug_exits.Net", "importing plug_exits failed: SystemExit: 3"),
        ("plug_lazy.Net", "importing plug_lazy.Net failed: RuntimeError: no Net"),
        ("plug_net.WIDTH", "this is a value of type int, not a class or function"),
        ("plug_package.part", "plug_package.part: this is a module; name a class or function in it"),
        ("torch.nn", "torch.nn: this is a module; name a class or function in it"),
        ("Net", "model._target_=Net: name a class or function by its path, as my_net.Net"),
        (None, "model: needs a class or function; name it, as model._target_=my_net.Net"),
        (3, "model._target_=3: name a class or function by its path"),
        ("plug_net.", "plug_net.: name a class or function by its path"),
        ("plug_net..Net", "plug_net..Net: name a class or function by its path"),
    ],
)  # fmt: skip
def test_what_is_not_found_is_said_in_one_line(target: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        import_target(target, "model")
    assert text.format(folder=tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target",
    ["os.system", "subprocess.run", "builtins.eval", "shutil.rmtree", "torch.os.system", "inspect.sys.exit"],
)
def test_ways_to_the_operating_system_are_refused(target: str) -> None:
    with refused(PluginError):
        import_target(target, "model")


def test_right_nodes_have_no_faults() -> None:
    assert check_node_arguments(node("plug_net.Net", width=1), "model") == []
    assert check_node_arguments(node("plug_net.Net", _args_=[1, 2]), "model") == []
    assert check_node_arguments(node("plug_net.Net", _partial_=True), "model") == []
    assert check_node_arguments(node("plug_net.optimizer", lr=1, anything=2), "optimizer", ["params"]) == []
    assert check_node_arguments(node("plug_net.positional", _args_=[1], first=2), "x") == []
    assert check_node_arguments(node("plug_net.everything", _args_=[1, 2, 3], a=1), "x", ["y"]) == []
    assert check_node_arguments(node("torch.zeros", size=[2]), "x") == []  # C code without a signature
    assert (
        check_node_arguments({"lr": 1}, "x")
        == check_node_arguments(None, "x")
        == check_node_arguments([1, "a"], "x")
        == []
    )


@pytest.mark.parametrize(
    ("key", "way"),
    [("data.val_transform", ", or data.val_transform._partial_=true for the function itself"), ("model", "")],
)
def test_a_function_that_is_meant_itself(key: str, way: str) -> None:
    """A transform of one sample is no function that makes one."""
    given = node("plug_net.optimizer", lr=1)
    assert check_node_arguments(given, key) == [
        f"{key}.params: plug_net.optimizer needs this argument; add {key}.params=...{way}"
    ]
    assert check_node_arguments(given | {"_partial_": True}, key) == []


@pytest.mark.parametrize(
    ("given", "extra", "faults"),
    [
        (node("plug_net.Net", width=1, hiden=2), (), [f"model.hiden: {NO_HIDEN}"]),
        (
            node("plug_net.Net", width=1, zzz=2),
            (),
            ["model.zzz: plug_net.Net takes no such argument. It takes: width, hidden, head"],
        ),
        (
            node("plug_net.Net.Inner", a=1),
            (),
            ["model.a: plug_net.Net.Inner takes no such argument. It takes none"],
        ),
        (node("plug_net.Net"), (), ["model.width: plug_net.Net needs this argument; add model.width=..."]),
        (node("plug_net.Net", _partial_=True, hiden=2), (), [f"model.hiden: {NO_HIDEN}"]),
        (
            node("plug_net.Net", width=1, _args_=[1]),
            (),
            ["model.width: plug_net.Net gets it by position already; take model.width away"],
        ),
        (
            node("plug_net.optimizer", params=3, lr=1),
            ("params",),
            ["model.params: plug_net.optimizer gets it by position already; take model.params away"],
        ),
        (
            node("plug_net.Net.Inner"),
            ("params",),
            [
                "model._target_=plug_net.Net.Inner: takes 0 arguments by position, "
                "but gets 1 (params from trainrun)"
            ],
        ),
        (
            node("plug_net.Net", width=1, _convert_="all"),
            (),
            ["model._convert_: not a word of trainrun, which knows _target_, _args_, _partial_, _check_"],
        ),
        (node("plug_net.everything", _args_=3), (), ["model._args_=3: must be a list"]),
        (node("plug_net.Net", _partial_="yes"), (), ["model._partial_=yes: must be true or false"]),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], extra: tuple[str, ...], faults: list[str]) -> None:
    assert check_node_arguments(given, "model", extra) == faults


def test_all_faults_of_nested_nodes_come_together() -> None:
    given = node(
        "plug_net.Net",
        hiden=1,
        head=node("plug_net.Head", sise=1),
        hidden=[node("plug_net.Head"), {"deep": node("plug_net.Nope")}],
        _args_=[node("plug_net.Head", other=2)],
    )
    faults = check_node_arguments(given, "model")
    assert [fault.split(": ")[0] for fault in faults] == [
        "model.hiden",
        "model.head.sise",
        "model.hidden[1].deep._target_=plug_net.Nope",
        "model._args_[0].other",
    ]


def test_a_target_that_is_missing_does_not_hide_the_faults_inside() -> None:
    faults = check_node_arguments(node("plug_net.Nett", head=node("plug_net.Head", sise=1)), "model")
    assert len(faults) == 2


def test_build_makes_nested_objects_and_leaves_the_rest() -> None:
    head = node("plug_net.Head", size=4)
    net = build_node(node("plug_net.Net", width=1, head=head, hidden=[head, {"a": head, "b": 2}]), "model")
    assert net.head.size == net.hidden[0].size == net.hidden[1]["a"].size == 4
    assert net.hidden[1]["b"] == 2
    assert head == node("plug_net.Head", size=4)  # the config itself is not touched
    assert build_node([1, {"a": None}], "x") == [1, {"a": None}]
    assert build_node("text", "x") == "text"


def test_positional_and_extra_arguments_come_from_the_runner() -> None:
    args, keywords = build_node(
        node("plug_net.everything", _args_=[3], a=1, b=2), "x", 1, 2, b=5, key=6, node=7
    )
    assert args == (1, 2, 3)
    assert keywords == {"a": 1, "b": 5, "key": 6, "node": 7}


def test_a_partial_waits_for_the_rest() -> None:
    made = build_node(node("plug_net.optimizer", _partial_=True, lr=node("plug_net.Head")), "optimizer")
    assert isinstance(made, functools.partial)
    params, lr, more = made([1], momentum=2)
    assert (params, lr.size, more) == ([1], 1, {"momentum": 2})


def test_an_error_in_the_constructor_is_named_with_call_and_place(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        build_node({"net": node("plug_net.Net", width=9, head=node("plug_net.Head"))}, "model")
    assert str(caught.value) == (
        "model.net: plug_net.Net failed: ValueError: nine is too wide "
        f"({tmp_path}/plug_net.py line 14); its arguments: width=9, head=Head"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_wrong_call_is_a_plugin_error_and_ours_pass_as_they_are() -> None:
    with refused(PluginError):
        build_node(node("plug_net.Net"), "model")
    with refused(ConfigError, "model.width"):
        build_node(node("plug_net.Net", width=8), "model")


@pytest.mark.parametrize(
    ("target", "given"), [("Config", {"num_labels": 3, "width": 2}), ("Declared", {"height": 3})]
)
def test_a_doubtful_signature_is_tried(target: str, given: dict[str, Any]) -> None:
    """What a wrapper or a signature set by hand hides is for the call to take or to refuse."""
    one = node(f"plug_doubtful.{target}", **given)
    assert check_node_arguments(one, "model") == []
    made = build_node(one, "model")
    assert getattr(made, "fields", None) == given or (made.num_labels, made.width) == (3, 2)


def test_a_plain_signature_is_still_held_against_the_arguments() -> None:
    assert check_node_arguments(node("plug_doubtful.Narrow", widht=2), "model") != []


def test_the_user_may_know_better() -> None:
    one = node("plug_doubtful.Narrow", widht=2, _check_=False)
    assert check_node_arguments(one, "model") == []
    with refused(PluginError):
        build_node(one, "model")
    assert build_node(node("plug_doubtful.Narrow", width=2, _check_=False), "model").width == 2
    assert check_node_arguments(node("plug_doubtful.Narrow", width=2, _check_="no"), "model") == [
        "model._check_=no: must be true or false"
    ]


def test_a_list_in_the_place_of_a_tensor_is_told_how_to_write_one() -> None:
    node = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1.0, 2.0]}
    with refused(PluginError):
        build_node(node, "task.loss")
    build_node({**node, "weight": {"_target_": "torch.tensor", "data": [1.0, 2.0]}}, "task.loss")
