"""What is a secret is in no file but its own, and on no screen; a run goes on with it all the same."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
import yaml
from approved import approve_error

import trainrun
from trainrun.cli.main import main
from trainrun.config.argv import find_conf_dir
from trainrun.config.schema import iterate_config_leaves
from trainrun.output import HIDDEN, is_secret_name, is_secret_value, mask_argument, mask_secrets
from trainrun.sweep.space import expand_grid

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, api_key, token, width=3):
        super().__init__()
        assert (api_key, token) == ("typed-1234", "given-5678")
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x.flatten(1))
"""
FAILING = """
class Net:
    def __init__(self, **known):
        raise ValueError("no network today")
"""
QUIET = [
    "monitor.progress_bar=false",
    "monitor.hardware=false",
    "trainer.max_steps=2",
    "trainer.limit_val_batches=1",
]
WORDS = ["model=secret_net.Net", "model.api_key=typed-1234", "model.token=${oc.env:OWN_TOKEN}", *QUIET]


@pytest.mark.parametrize(
    "key",
    ["model.api_key", "wandb_api_key", "hf_token", "token", "data.train.accessToken", "password", "db.db_password",
     "aws_secret_access_key", "client-secret", "apiKey", "credentials", "monitor.x.auth_token",
     "model.api_key.0", "model.api_key[1]", "model.hosts.0.password", "headers.Authorization"],
)  # fmt: skip
def test_secrets_by_their_names(key: str) -> None:
    assert is_secret_name(key)


@pytest.mark.parametrize(
    "key",
    ["key", "tokenizer", "bytes_per_token", "max_tokens", "num_tokens", "key_padding", "pad_token", "image_key",
     "token_budget", "tokens_per_second", "sort_key", "key_size", "data.train.monkey", "keyboard", "compass", "0",
     "model.api_key.width", "token.0.size", "num_token", "attn_key", "cls_token", "token.pooling", "query_key",
     "password_file", "my_token"],
)  # fmt: skip
def test_names_that_only_look_like_it(key: str) -> None:
    assert not is_secret_name(key)


def test_no_setting_of_the_package_is_a_secret() -> None:
    names = [
        key
        for path in find_conf_dir().rglob("*.yaml")
        for key, _ in iterate_config_leaves(yaml.safe_load(path.read_text()))
    ]
    assert len(names) > 200
    assert [name for name in names if is_secret_name(name)] == []


def test_texts_and_words_are_masked() -> None:
    assert (
        mask_secrets("got a.api_key=x1, width=3; db.password='y z' here")
        == "got a.api_key=*** width=3; db.password=*** here"
    )
    assert mask_argument("+db.password=a b,c") == "+db.password=***"
    assert mask_argument("model.token=${oc.env:HF}") == "model.token=${oc.env:HF}"
    assert mask_argument("+a={user: x, token: t 1, n: 2}") == "+a={user: x, token: ***, n: 2}"
    assert mask_argument("a=[{password: 'x,y'}, {api_key: [p, q]}]") == "a=[{password: ***}, {api_key: ***}]"
    assert mask_secrets("failed; a={'token': 'x 1', 'user': 'y'}, api_key=['p', 'q']") == (
        "failed; a={'token': ***, 'user': 'y'}, api_key=***"
    )
    assert (
        mask_secrets("model.api_key: a secret that is not stored")
        == "model.api_key: a secret that is not stored"
    )


def test_secrets_in_dicts_and_lists_and_in_the_arguments_of_a_failed_call(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (workdir / "failing_net.py").write_text(FAILING)
    monkeypatch.setenv("OWN_TOKEN", "given-5678")
    words = [
        "model=failing_net.Net", "model.url=http://me:${oc.env:OWN_TOKEN}@host", "model.api_key=[typed-1, typed-2]",
        "model.auth={token: typed-3, user: somebody}", *QUIET,
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["trainrun", *words])
    assert main([*words, "output_dir=run"]) == 2
    assert main(["--cfg", "job", words[0], *words[2:]]) == 0
    shown = capfd.readouterr()
    for text in [shown.out, shown.err]:
        assert "typed-" not in text
        assert "5678" not in text
    assert "failed: ValueError: no network today" in shown.err
    assert "'user': 'somebody'" in shown.err


@pytest.mark.train
def test_a_run_with_secrets(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (workdir / "secret_net.py").write_text(NET)
    monkeypatch.setenv("OWN_TOKEN", "given-5678")
    monkeypatch.setattr("sys.argv", ["trainrun", *WORDS])
    assert main([*WORDS, "output_dir=run"]) == 0
    run = workdir / "run"
    files = {path.name: path for path in run.rglob("*") if path.is_file()}
    for secret in ("typed-1234", "given-5678"):
        holders = [name for name, path in files.items() if secret.encode() in path.read_bytes()]
        assert holders == ([".secrets.json"] if secret == "typed-1234" else [])
    config = files["config.yaml"].read_text()
    assert "token: ${oc.env:OWN_TOKEN}" in config
    assert "api_key: '***'" in config
    for name in ("config.yaml", "overrides.txt", ".secrets.json", "environment.json", "status.json"):
        assert stat.S_IMODE(files[name].stat().st_mode) == 0o600, name

    assert main(["resume", "run", "trainer.max_steps=3"]) == 0
    assert main([*WORDS, "output_dir=run"]) == 2  # another number of steps now
    more = [word.replace("max_steps=2", "max_steps=3") for word in WORDS]
    assert main([*more, "output_dir=run"]) == 0
    assert trainrun.load_model("run") is not None
    assert main(["--cfg", "job", *WORDS]) == 0
    assert main([*WORDS, "model.api_key=typed-56"]) == 2  # two values
    other = [word.replace("typed-1234", "[typed-56]").replace("${oc.env:OWN_TOKEN}", "x") for word in more]
    assert main([*other, "output_dir=run"]) == 2
    shown = capfd.readouterr()
    assert "api_key: '***'" in shown.out
    assert "already contains a run, which has model.api_key=***" in shown.err
    assert "typed-" not in shown.err
    assert "1234" not in shown.out
    assert "5678" not in shown.out
    assert "model.api_key=typed" not in shown.err

    monkeypatch.delenv("OWN_TOKEN")
    assert main(["evaluate", "run"]) == 2
    approve_error(capfd.readouterr().err, "OWN_TOKEN")
    monkeypatch.setenv("OWN_TOKEN", "given-5678")
    (run / ".secrets.json").unlink()
    assert main(["evaluate", "run"]) == 2
    approve_error(capfd.readouterr().err, "model.api_key")
    assert main(["evaluate", "run", "model.api_key=typed-1234"]) == 0
    assert trainrun.load_run("run").folder == run


@pytest.mark.train
def test_a_strangers_folder_looks_nothing_up(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=1", "monitor.plots=false", *QUIET[:2], "output_dir=run"]) == 0
    config = workdir / "run" / "config.yaml"
    config.write_text(config.read_text().replace("run_name: digits-mlp", "run_name: ${oc.env:HOME}"))
    assert main(["evaluate", "run"]) == 2
    approve_error(capsys.readouterr().err, "--trust")


@pytest.mark.train
def test_hyperparameters_that_sound_like_secrets_are_shown_swept_and_copied(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "token_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_token, attn_key, token, pad_token='', password=0):\n"
        "        super().__init__()\n"
        "        assert (token, password, pad_token) == (3, 12, '[PAD]')\n"
        "        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_token + attn_key - 5))\n"
        "    def forward(self, x):\n"
        "        return self.layers(x)\n"
    )
    words = [
        "model.num_token=6",
        "model.attn_key=9",
        "model.token=3",
        "model.password=12",
        "model.pad_token='[PAD]'",
    ]
    assert main(["model=token_net.Net", *words, *QUIET, "output_dir=run"]) == 0
    assert HIDDEN not in (workdir / "run" / "config.yaml").read_text()
    assert (workdir / "run" / "overrides.txt").read_text().splitlines()[1:6] == words
    (workdir / "copy").mkdir()
    for path in (workdir / "run").glob("[!.]*"):
        shutil.move(path, workdir / "copy")
    assert main(["evaluate", "copy"]) == 0
    assert [job[0] for job in expand_grid(["model.num_token=2,6"])] == [
        "model.num_token=2",
        "model.num_token=6",
    ]


def test_the_text_of_a_secret_is_hidden_and_its_number_is_not() -> None:
    assert is_secret_value("a.token", "6")
    assert is_secret_value("a.token", "abc")
    assert not any(is_secret_value("a.token", value) for value in (6, 1.5, True, None, "", "${oc.env:X}"))
    assert mask_argument("a.token=6") == "a.token=6"
    assert mask_argument("a.token='6'") == "a.token=***"
    assert mask_argument("a={token: 6, api_key: x}") == "a={token: 6, api_key: ***}"
