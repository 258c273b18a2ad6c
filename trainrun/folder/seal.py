"""The seal of a run folder: proof that this user wrote its config and links, or trusted them once.

A config names code to run, files to write and servers to contact, so a folder from somebody else is used completely
or not at all. The seal is a file of HMACs with a key that only this user can read. They cover the config, its
secrets, the working directory in which the run began, and the links that lead out of the folder. A run seals its
folder when it begins and whenever it writes its config. `--trust` seals any other folder. The key is in the user's
state folder, so every machine with the same home has it. The seal does not contain the folder's path: a folder may
be moved or copied.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, read_bytes, read_identity, read_origin, write_text
from trainrun.output import say

KEY_BYTES = 32
MAX_BYTES = 2**22  # of each sealed file


def find_key_path() -> Path:
    """Return the path of this user's key. Raise OSError if the user has no home folder."""
    state = os.environ.get("XDG_STATE_HOME")
    try:
        folder = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise OSError(f"no home folder is known, and XDG_STATE_HOME is not set ({error})") from error
    return folder / "trainrun" / "key"


def read_key() -> bytes:
    """Return this user's key; empty before its first use. Raise OSError if other users can read it."""
    path = find_key_path()
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise OSError(f"{path}: others may know this key; only its owner may read it (chmod 600)")
        key = file.read()
    return key if len(key) == KEY_BYTES else b""


def make_key() -> bytes:
    """Return this user's key; create it at its first use. Raise OSError if it cannot be written."""
    if key := read_key():
        return key
    path = find_key_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # runs that begin together make one key
        if key := read_key():
            return key
        key = secrets.token_bytes(KEY_BYTES)
        file.truncate(0)
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key


def find_seal_path(run: RunDir, key: bytes) -> Path:
    """Return the path of a user's seal. Each user who trusts a shared folder has one."""
    return run.root / f"seal-{hashlib.sha256(key).hexdigest()[:8]}.txt"


def iterate_outward_links(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each link that leads out of the folder, with the absolute path of its target."""
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in sorted(folders + files)):
            if path.is_symlink():
                target = os.path.realpath(path)
                if not Path(target).is_relative_to(root.resolve()):
                    yield path, target


def iterate_sealed_parts(
    run: RunDir, pending: Mapping[Path, str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each part of a run folder that can make a command run code.

    pending: contents of files that are about to be written.
    """
    texts = [(path, text.encode("utf-8", "backslashreplace")) for path, text in (pending or {}).items()]
    for path in (run.config, run.config_before, run.secrets):
        if os.path.lexists(path):
            try:
                texts.append((path, read_bytes(path, MAX_BYTES)))
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from error
    for path, content in texts:
        name = run.config.name if path == run.config_before else path.name
        yield name, content
    if origin := read_origin(run):
        yield run.environment.name, repr(tuple(map(str, origin))).encode("utf-8", "backslashreplace")
    for path, target in iterate_outward_links(run.root):
        yield str(path.relative_to(run.root)), os.fsencode(target)


def digest_part(key: bytes, run_id: str, name: str, content: bytes) -> str:
    """Return the HMAC of one part of a folder."""
    parts = (run_id.encode("utf-8", "surrogatepass"), os.fsencode(name), content)
    lengths = b" ".join(b"%d" % len(part) for part in parts)
    return hmac.digest(key, b"\n".join([lengths, *parts]), "sha256").hex()


def seal_folder(run: RunDir, pending: Mapping[Path, str] | None = None) -> None:
    """Seal the current parts of the folder and files that are about to be written. Raise OSError if that fails.

    So the folder is sealed whether a run is killed before or after it writes a pending file.
    """
    key, run_id = make_key(), read_identity(run)["run_id"]
    lines = {digest_part(key, run_id, name, content) for name, content in iterate_sealed_parts(run, pending)}
    write_text(find_seal_path(run, key), "".join(f"{line}\n" for line in sorted(lines)), durable=True)


def list_unsealed_parts(run: RunDir) -> tuple[list[str], str]:
    """Return the names of the parts that this user has not sealed, and the reason."""
    names = [name for name, _ in iterate_sealed_parts(run)]
    try:
        key = read_key()
        if not key:
            return names, f"you have no key yet ({find_key_path()} is made by your first run)"
        run_id = read_identity(run)["run_id"]
        lines = set(read_bytes(find_seal_path(run, key), MAX_BYTES).decode("ascii").split())
    except FileNotFoundError:
        return names, "you have neither trained in it nor trusted it before"
    except (OSError, ValueError, ConfigError) as error:
        return names, str(error)
    changed = [
        name
        for name, content in iterate_sealed_parts(run)
        if digest_part(key, run_id, name, content) not in lines
    ]
    return changed, f"{', '.join(changed)}: changed since you trained in it or trusted it"


def is_sealed(run: RunDir) -> bool:
    """Return whether this user has sealed every part of the folder."""
    return not list_unsealed_parts(run)[0]


def check_seal(run: RunDir, trust: bool, way: str = "add --trust, once (in Python trust=True)") -> None:
    """Raise ConfigError if this user has not sealed the folder. Import nothing. trust: seal the folder instead.

    way: the end of the message, which says how to trust the folder.
    """
    check_files(run.root, trust)
    names, why = list_unsealed_parts(run)
    if not names:
        return
    if not trust:
        raise ConfigError(
            f"{run.root}: may belong to somebody else: {why}. A config can name any code, file or server, so nothing "
            "of "
            f"this folder was used. If you trust all of it, {way}"
        )
    try:
        seal_folder(run)
    except (OSError, ConfigError) as error:
        say(
            f"note: {run.root}: trusted for this command only, because it cannot be sealed ({error})",
            file=sys.stderr,
        )


def check_files(root: Path, trust: bool, way: str = "--trust") -> None:
    """Raise ConfigError for a pipe or a device in a folder, and for an unsealed link that leads out of it.

    way: the option that allows such links.
    """
    for folder, _, files in os.walk(root):
        for path in (Path(folder, name) for name in files):
            with contextlib.suppress(FileNotFoundError):  # the run may be training
                if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                    raise ConfigError(f"{path}: neither a plain file nor a folder; take it away")
    links = {str(path.relative_to(root)): path for path, _ in iterate_outward_links(root)}
    if trust or not links:
        return
    for name in list_unsealed_parts(RunDir(root))[0]:
        if name in links:
            raise ConfigError(
                f"{links[name]}: leads out of the run folder to {links[name].readlink()}; if you made this link, "
                f"allow it: {way}"
            )
