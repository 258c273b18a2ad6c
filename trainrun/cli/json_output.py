"""`--json`: print the result of a command as one JSON object. The lines for people go to standard error.

    {"schema": 1, "command": "evaluate", "exit_code": 0, "error": null, "result": {...}}

`error` is null, or an object with `kind` (the class of the error) and `message`. `result` holds what the command
passed to `report_result`. A number that JSON cannot express is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from trainrun.errors import EXIT_FAILED, EXIT_INTERRUPTED
from trainrun.folder.run_folder import format_json_file
from trainrun.output import HIDDEN, RESULT, is_secret_value, mask_secrets, print_encodable

FLAG = "--json"
SCHEMA = 1
HELPS = ("--help", "-h")  # a help text is for people, whatever else is asked for


def run_as_json(command: str, run: Callable[[], int]) -> int:
    """Run a command, print its result as JSON, and return its exit code."""
    RESULT.clear()
    answer: dict[str, Any] = {"schema": SCHEMA, "command": command, "exit_code": EXIT_FAILED, "error": None}
    output = sys.stdout
    try:
        with redirect_output_to_stderr():
            answer["exit_code"] = run()
    except BaseException as error:  # a bug of ours, or a second Ctrl-C
        if isinstance(error, KeyboardInterrupt):
            answer["exit_code"] = EXIT_INTERRUPTED
        report_error(error)
        raise
    finally:
        answer["error"] = RESULT.pop("error", None)
        answer["result"] = dict(RESULT)
        if os.environ.get("RANK", "0") == "0":  # of several ranks of torchrun one answers
            print_encodable(format_json_file(convert_to_public_value(answer)), output, end="", flush=True)
    return int(answer["exit_code"])


def report_error(error: BaseException) -> None:
    """Record why a command failed, for `--json`."""
    RESULT["error"] = {"kind": type(error).__name__, "message": str(error)}


@contextmanager
def redirect_output_to_stderr() -> Iterator[None]:
    """Send what this process and its child processes print to standard error, until the end of the block."""
    with redirect_stdout(sys.stderr):
        if not writes_to_descriptor(1):  # a notebook or a test has its own
            yield
            return
        stdout_copy = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(stdout_copy, 1)
            os.close(stdout_copy)


def writes_to_descriptor(number: int) -> bool:
    """Return whether the standard output of Python is this file descriptor."""
    try:
        return sys.__stdout__ is not None and sys.__stdout__.fileno() == number
    except (OSError, ValueError):
        return False


def convert_to_public_value(value: Any, key: str = "") -> Any:
    """Return a value in a form that JSON can express, with secrets hidden. key: the name of the value."""
    if isinstance(value, dict):
        return {str(name): convert_to_public_value(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [convert_to_public_value(inner) for inner in value]
    if isinstance(value, (str, Path)):
        return HIDDEN if is_secret_value(key, str(value)) else mask_secrets(str(value))
    return value
