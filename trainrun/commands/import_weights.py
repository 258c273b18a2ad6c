"""`trainrun import FILE.pt DEST --untrusted`: the weights of a foreign torch file as safetensors."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainrun.commands.arguments import Parser
from trainrun.errors import EXIT_DONE, CheckpointError, ConfigError
from trainrun.output import say

KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "OMP_NUM_THREADS", "SYSTEMROOT")  # of the environment
WAIT_SECONDS, BYTES_PER_SECOND = 120, 5 * 2**20
CHILD = (
    "import sys, json; told = json.loads(sys.argv[1]); sys.path[:] = told['paths']; "
    "from trainrun.checkpoint.foreign import main; main(told['source'], told['target'], told['keys'])"
)


def main(argv: list[str]) -> int:
    """Write DEST and print how a run begins with it."""
    words = import_parser().parse_args(argv)
    source, dest = Path(words.file).expanduser(), Path(words.dest).expanduser()
    if not source.is_file():
        raise ConfigError(f"{words.file}: {'not a plain file' if source.exists() else 'no such file'}")
    if source.suffix == ".safetensors":
        raise ConfigError(
            f"{source}: is safetensors already; begin a run with it: trainrun init_from={shlex.quote(str(source))}"
        )
    if not words.untrusted:
        raise ConfigError(
            f"{source}: a torch file is a pickle, which can hold a program; "
            f"{shlex.join(['trainrun', 'import', str(source), str(dest)])} --untrusted reads it in a process without "
            "your environment, with limited memory and time, and takes tensors only"
        )
    if dest.suffix != ".safetensors":
        raise ConfigError(f"{dest}: must end in .safetensors")
    if dest.exists():
        raise ConfigError(f"{dest}: is there already; name another")
    if not dest.absolute().parent.is_dir():
        raise ConfigError(f"{dest}: the folder {dest.parent} does not exist")
    found = convert(source.absolute(), dest.absolute(), words.key)
    say(f"{dest}: {found['tensors']:,} tensors, {dest.stat().st_size / 1e6:,.1f} MB")
    if found["num_not_finite"]:
        say(f"warning: {found['num_not_finite']} tensors hold nan or inf: {', '.join(found['not_finite'])}")
    say(f"begin a run with it: trainrun init_from={shlex.quote(str(dest))} model=...")
    return EXIT_DONE


def import_parser() -> Parser:
    parser = Parser(
        prog="trainrun import", allow_abbrev=False,
        description="Turns the weights in a torch file (.pt, .pth, .bin, .ckpt) into safetensors. Runs nothing of it.",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="a file that torch.save wrote")
    parser.add_argument("dest", metavar="DEST", help="a new .safetensors file")
    parser.add_argument(
        "--untrusted", action="store_true", help="read it, whoever made it, in a process that can do no harm"
    )
    parser.add_argument(
        "--key", action="append", default=[], metavar="NAME",
        help="where the dict of tensors is, as --key state_dict; again for a dict in a dict",
    )  # fmt: skip
    return parser


def convert(source: Path, dest: Path, keys: list[str]) -> dict[str, Any]:
    """By way of a temporary file, which is checked here, where no foreign byte was unpickled."""
    temporary = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.tmp")
    try:
        found = answer_of_child(source, temporary, keys)
        if "fault" in found:
            raise CheckpointError(f"{source}: {found['fault']}")
        from trainrun.checkpoint.weights import check_file

        check_file(temporary)
        os.link(temporary, dest)  # unlike a rename it replaces nothing
    except OSError as error:
        raise ConfigError(f"{dest}: cannot write there ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found


def answer_of_child(source: Path, target: Path, keys: list[str]) -> dict[str, Any]:
    """Return what the limited process says; if that was killed, the file is at fault."""
    paths = [str(Path(path).absolute()) for path in sys.path if path and Path(path) != Path.cwd()]
    package = str(Path(__file__).resolve().parents[2])
    told = {"paths": [*paths, package], "source": str(source), "target": str(target), "keys": keys}
    seconds = WAIT_SECONDS + source.stat().st_size // BYTES_PER_SECOND
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", CHILD, json.dumps(told)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, cwd=target.parent,
            env={name: os.environ[name] for name in KEPT if name in os.environ},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"fault": f"not read within {seconds} s"}
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        why = (
            "it takes more processor time than its size allows"
            if name in ("SIGXCPU", "SIGKILL")
            else "damaged"
        )
        return {"fault": f"reading it was ended by {name}: {why}"}
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(answer, dict)
        return answer
    except (ValueError, IndexError):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return {"fault": f"cannot be read ({lines[-1][:300]})"}
