"""One result format: what was measured, where and with which versions, as JSON; tables and plots are made from it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

FORMAT = 1
Row = dict[str, Any]


@dataclass
class Result:
    """A benchmark's outcome: ``rows`` are flat dictionaries; everything else says where they come from."""

    benchmark: str
    device: dict[str, Any]
    versions: dict[str, str]
    commit: str
    date: str
    settings: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    format: int = FORMAT

    @classmethod
    def start(cls, benchmark: str, device: torch.device, settings: dict[str, Any], commit: str = "") -> Result:
        """Return an empty result that describes this machine at this moment."""
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        # Where a file lies is nobody's business but its owner's.
        shown = {name: value for name, value in settings.items() if name not in ("out", "apply", "write", "commit")}
        return cls(benchmark, device_facts(device), versions(), commit or git_commit(), date, shown)

    def save(self, path: str | Path) -> Path:
        """Write the JSON at once or not at all, so that an interrupted run leaves the last whole version."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(_plain(asdict(self)), indent=1, allow_nan=False) + "\n")
        os.replace(temporary, path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a result file."""
        values = json.loads(Path(path).read_text())
        if values.get("format") != FORMAT:
            raise ValueError(f"{path} has format {values.get('format')!r}; this version reads format {FORMAT}")
        return cls(**values)

    def caption(self) -> str:
        """Say in one line where the numbers come from."""
        shown = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        commit, *changed = self.commit.split("-")
        return f"{self.device['name']}, {self.date[:10]}, commit {'-'.join([commit[:12], *changed])}, {shown}"

    def table(self, columns: Sequence[str] | None = None, title: str | None = None) -> Table:
        """Return a rich table of the rows."""
        columns = list(columns or columns_of(self.rows))
        table = Table(title=title or self.benchmark, caption=self.caption())
        for name in columns:
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*(cell(row.get(name)) for name in columns))
        return table

    def markdown(self, columns: Sequence[str] | None = None) -> str:
        """Return a GitHub table of the rows."""
        columns = list(columns or columns_of(self.rows))
        return markdown_table(columns, ([row.get(name) for name in columns] for row in self.rows))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a GitHub table; the cells are formatted by :func:`cell`."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(value).replace("|", "\\|") for value in row) + " |" for row in rows]
    return "\n".join(lines)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the names that occur in the rows, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cell(value: Any) -> str:
    """Format a value for a table: three significant digits, thousands separated, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == 0 or not math.isfinite(value):
            return f"{value:g}"
        magnitude = abs(value)
        if magnitude >= 100:
            return f"{value:,.0f}"
        return f"{value:.2e}" if magnitude < 1e-2 else f"{value:.3g}"
    return str(value)


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the device's name and size."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "arch": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        }
    return {"type": device.type, "name": _cpu_name(), "arch": platform.machine(), "threads": torch.get_num_threads()}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on; empty where something is not there."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    found = {
        "flashtile": _package_version("flashtile"),
        "torch": str(torch.__version__),
        "triton": _package_version("triton"),
        "cuda": torch.version.cuda or "",
        "cudnn": str(cudnn) if cudnn else "",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "fa3-fwd": _package_version("fa3-fwd"),
        "python": platform.python_version(),
    }
    return {name: version.splitlines()[0] if version else "" for name, version in found.items()}


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    if name != "flashtile":
        return ""
    # Run from a source tree that is not installed.
    project = Path(__file__).parents[3] / "pyproject.toml"
    lines = project.read_text().splitlines() if project.exists() else []
    return next((line.split('"')[1] for line in lines if line.startswith("version = ")), "")


def git_commit() -> str:
    """Return the commit of this source tree, marked where it has uncommitted changes; "unknown" outside git."""
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", ".", "..")
    return commit + ("-dirty" if changed else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _plain(value: Any) -> Any:
    """Make a value fit for JSON: no NaN or infinity, floats to six significant digits, paths and dtypes as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
