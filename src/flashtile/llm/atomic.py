"""Files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that takes the place of `path` only once it is whole and on disk.

    The bytes go to a temporary file in the same folder, which is synced and then renamed. Whatever happens before the
    rename, a crash or an exception, `path` keeps what it held.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError, AttributeError):  # not every system can sync a folder
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def replacing(folder: Path, names: Sequence[str], sign: str) -> Iterator[None]:
    """Set files and folders aside while others take their place, and put them back if that fails.

    They wait in `folder/earlier`. They are gone for good when the block ends, unless it ends by an exception before
    `sign`, one of the names, is there again. After a kill they are still in `earlier`.
    """
    aside = folder / "earlier"
    old = [name for name in names if (folder / name).exists()]
    if (folder / sign).exists():
        _remove(aside)
        aside.mkdir()
        for name in old:
            os.replace(folder / name, aside / name)
    try:
        yield
    except BaseException:
        if aside.exists() and not (folder / sign).exists():
            for name in names:
                _remove(folder / name)
            for path in aside.iterdir():
                os.replace(path, folder / path.name)
        _remove(aside)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
