"""What every benchmark script does around its measurements: options, a progress bar, results that survive Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashtile.bench_mark.result import Result

T = TypeVar("T")


def parse(options: type[T], description: str | None, args: Sequence[str] | None, may_be_zero: Sequence[str] = ()) -> T:
    """Read a dataclass of options from the command line; ``--help`` shows the examples in the module's text.

    Raises ValueError for whole numbers below 1, or below 0 where their name is in ``may_be_zero``.
    """
    import tyro

    # Usage and examples show what was typed: the bench command of the command line has put its name here.
    prog = sys.argv[0] if sys.argv[0].startswith("flashtile ") else None
    if prog:
        description = re.sub(r"python -m flashtile\.bench_mark\.\w+", prog, description or "")
    elif spec := getattr(sys.modules["__main__"], "__spec__", None):
        prog = f"python -m {spec.name}"
    chosen = tyro.cli(_without_empty_defaults(options), prog=prog, description=description, args=args)
    for f in dataclasses.fields(options):  # pyright: ignore[reportArgumentType]  # a dataclass
        value, least = getattr(chosen, f.name), 0 if f.name in may_be_zero else 1
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) is int and number < least:
                raise ValueError(f"--{f.name.replace('_', '-')} is {number}, but wants {least} or more")
    return chosen


def _without_empty_defaults(options: Any) -> Any:
    """Return the class with no "(default: )" in its help where the default is nothing: the text says what it means."""
    import tyro

    hints, quiet = typing.get_type_hints(options), tyro.conf.arg(help_behavior_hint="")
    empty = [f for f in dataclasses.fields(options) if f.default in ((), None, "")]
    fields = [(f.name, typing.Annotated[hints[f.name], quiet], f) for f in empty]
    return dataclasses.make_dataclass(options.__name__, fields, bases=(options,))


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
