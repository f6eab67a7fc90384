"""How to call the command line again from the shell that this process was started from."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def flashtile(*words: object) -> str:
    """Return the line that calls `flashtile` with these words: by its name if the shell finds it, else by its path."""
    return shlex.join([*_program(), *map(str, words)])


def _program() -> list[str]:
    beside = Path(sys.executable).with_name("flashtile.exe" if os.name == "nt" else "flashtile")
    found = shutil.which("flashtile")
    if found and beside.exists() and os.path.samefile(found, beside):
        return ["flashtile"]
    if beside.exists():
        return [_short(beside)]
    return [_short(Path(sys.executable)), "-m", "flashtile.cli"]


def _short(path: Path) -> str:
    """Return the path as seen from here, if it is below: `.venv/bin/flashtile`."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
