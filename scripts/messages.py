"""Write the texts that tests approve into `tests/messages.txt`; its diff is what to review. If the tests do not run to
their end, the file stays as it was.

python scripts/messages.py                 of every test that approves a text
python scripts/messages.py tests/config    of the tests of a folder or file
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from approved import FILE, REWRITE, read_texts, write_texts  # noqa: E402

RAN: Final = (0, 1)  # exit codes of pytest: all tests passed, some failed
APPROVES: Final = re.compile(r"\b(?:approve|approve_error|refused|refuses)\(")


def approving_tests(paths: list[Path]) -> list[str]:
    """Return the names of the tests that approve a text, as `tests/room/test_x.py::test_y`."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    names = []
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        if not APPROVES.search(text):
            continue
        names += [
            f"{file.relative_to(ROOT).as_posix()}::{node.name}"
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if APPROVES.search(ast.get_source_segment(text, node) or "")
        ]
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders of tests; all without")
    paths = [path.resolve() for path in parser.parse_args().paths]
    tests = approving_tests(paths or [ROOT / "tests"])
    if not tests:
        print("no test of these files approves a text")
        return 0
    rewritten = {test.partition("::")[0] for test in tests}
    before = read_texts()
    files = {name: name.partition("::")[0] for name in before}
    rest = {name: text for name, text in before.items() if paths and files[name] not in rewritten}
    with tempfile.TemporaryDirectory() as folder:
        new_file = Path(folder) / FILE.name
        write_texts({name: text for name, text in rest.items() if (ROOT / files[name]).exists()}, new_file)
        command = [sys.executable, "-m", "pytest", "-q", *tests]
        environment = {**os.environ, REWRITE: str(new_file)}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code not in RAN:
            return code
        after = read_texts(new_file)
    write_texts(after)
    changed = sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
    print(f"{FILE.relative_to(ROOT)}: {len(after)} texts, {changed} changed")
    return code


if __name__ == "__main__":
    sys.exit(main())
