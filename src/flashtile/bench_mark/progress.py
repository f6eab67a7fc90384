"""What every benchmark script does around its measurements: options, a progress bar, results that survive Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashtile.bench_mark.result import Result

T = TypeVar("T")


def parse(options: type[T], description: str | None, args: Sequence[str] | None) -> T:
    """Read a dataclass of options from the command line; ``--help`` shows the examples in the module's text."""
    import tyro

    return tyro.cli(options, description=description, args=args)


def device_of(name: str) -> torch.device:
    """Return the device of this name, "auto" being the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch.cuda.is_available() is False; use 'cpu' or 'auto'")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def device_error(device: torch.device) -> str:
    """Return why the device no longer answers, empty if it does: an illegal access ends every later call as well."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def bar(console: Console) -> Progress:
    """Return the progress bar that the benchmarks share."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def saving(result: Result, path: Path, console: Console, columns: Sequence[str] | None = None) -> Iterator[None]:
    """Write the result file however the block ends, then show its table; Ctrl-C ends the block quietly."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("interrupted: what was measured is kept")
    finally:
        result.save(path)
        if result.rows and console.is_terminal:
            console.print(result.table(columns))
        console.print(f"{len(result.rows)} rows in {path}", highlight=False)
