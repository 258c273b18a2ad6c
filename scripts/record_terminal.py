"""Record the first run as a picture of a terminal: trainrun/manual/pictures/terminal.svg, for README and manual.

python scripts/record_terminal.py            the output is that of a real run in a folder that is thrown away
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURE: Final = ROOT / "trainrun" / "manual" / "pictures" / "terminal.svg"
SETTINGS: Final = ("trainer.max_epochs=8", "output_dir=runs/digits")
WIDTH: Final = 92


def recorded_lines(folder: Path) -> str:
    """Return what a run in the folder prints, with the folder of a user."""
    command = [sys.executable, "-m", "trainrun", *SETTINGS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return (done.stderr + done.stdout).replace(str(folder), "/home/you")


def picture_of(lines: str) -> str:
    """Return lines of a terminal as SVG that loads nothing from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ ", "green") + Text(f"trainrun {' '.join(SETTINGS)}", "bold"))
    for line in lines.splitlines():
        console.print(Text(line, "bold" if line.startswith(("epoch", "ended")) else ""), crop=True)
    picture = console.export_svg(title="trainrun", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(picture_of(recorded_lines(Path(folder))), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
