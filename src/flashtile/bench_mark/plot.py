"""Make the docs' tables and plots from result files: nothing in them is typed by hand.

Examples:
  python -m flashtile.bench_mark.plot                                      docs/results/*.json -> docs/benchmarks.md
  python -m flashtile.bench_mark.plot --results out/bench_mark/flash_attention.json --docs None --figures /tmp/figures

Each result file gives one section: where it comes from, its tables, its figures (PNG files beside the result, or in
--figures). The sections replace what stands between the two markers of the docs page; the prose around them stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flashtile.bench_mark import progress
from flashtile.bench_mark.providers import PROVIDERS
from flashtile.bench_mark.result import Result, Row, cell, markdown_table

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NOTHING = "No result file has been committed yet.\n"
COLOURS = {
    "flashtile": "#d55e00", "flashtile_triton": "#e9a15f", "fa3": "#0072b2",
    "cudnn": "#56b4e9", "fa2": "#7f8c8d", "flex": "#cc79a7",
    "efficient": "#b8a23a", "sdpa": "#009e73", "naive": "#c9ccd1", "naive_compiled": "#a3a9b3",
    "dense_compiled": "#8a90a0", "mock": "#e8c39e", "flash": "#d55e00",
}  # fmt: skip
# By name, so that a new provider changes no picture.
MARKERS = {
    "flashtile_triton": "d", "fa2": "o", "cudnn": "s", "fa3": "D", "flex": "v", "efficient": "^", "sdpa": "P",
    "naive": "X", "naive_compiled": "<", "dense_compiled": ">", "mock": "*",
}  # fmt: skip
_RATIO_TICKS = tuple(m * 10.0**e for e in range(-2, 3) for m in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
_SHAPE = ("dtype", "head_dim", "causal", "seqlen", "batch", "heads", "heads_kv", "window")
_INK, _GRID = "#2f3437", "#e3e6e8"


@dataclass
class Options:
    """Turn result files into tables and plots."""

    results: tuple[Path, ...] = ()
    """Result files; default every JSON file in docs/results."""
    docs: Path | None = Path("docs/benchmarks.md")
    """The page to be rewritten between its markers; None leaves the docs alone."""
    figures: Path | None = None
    """Folder for the figures; default beside each result file."""


def shape_of(row: Row) -> tuple:
    """Return what identifies a row's shape."""
    return tuple(row.get(name, 0) for name in _SHAPE)  # older files lack the last two


def providers_of(rows: Sequence[Row]) -> list[str]:
    """Return the providers with at least one measurement, in the order of the table of providers."""
    measured = {row["provider"] for row in rows if row["status"] == "ok"}
    return [name for name in PROVIDERS if name in measured] + sorted(measured - PROVIDERS.keys())


def modes_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in rows if row["status"] == "ok"))


# ---- tables


def attention_tables(result: Result) -> str:
    """Return the summary and, per mode, TFLOP/s of every provider on every shape."""
    parts = [_summary_table(result)]
    for mode in modes_of(result.rows):
        rows = [row for row in result.rows if row["mode"] == mode]
        names = providers_of(rows)
        columns = ["head_dim", "causal", "seqlen", *names]
        ours = [row for row in rows if row["provider"] == "flashtile" and row["status"] == "ok"]
        with_ratio = bool(ours) and len(names) > 1
        if with_ratio:
            columns += ["flashtile / FA2", "flashtile / best peer", "peak MiB"]
        body = []
        for shape in dict.fromkeys(sorted(map(shape_of, rows))):
            here = {row["provider"]: row for row in rows if shape_of(row) == shape}
            line: list[Any] = [shape[1], shape[2], shape[3], *(_rate(here.get(name)) for name in names)]
            if with_ratio:
                mine = here.get("flashtile", {})
                line += [mine.get("vs_fa2"), mine.get("vs_best_peer"), mine.get("peak_mib")]
            body.append(line)
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
        table = markdown_table(columns, body)
        parts.append(f"<details><summary>{mode}, {dtypes}: TFLOP/s on every shape</summary>\n\n{table}\n\n</details>")
    missing = [row for row in result.rows if row["status"] not in ("ok", "unsupported")]
    if missing:
        counted: dict[tuple, int] = {}
        for row in missing:
            key = (row["provider"], row["mode"], row["status"], row["reason"])
            counted[key] = counted.get(key, 0) + 1
        table = markdown_table(
            ["provider", "mode", "status", "reason", "shapes"], [[*k, n] for k, n in counted.items()]
        )
        parts.append(f"Not measured:\n\n{table}")
    return "\n\n".join(parts)


def _rate(row: Row | None) -> Any:
    if row is None:
        return None
    return row["tflops"] if row["status"] == "ok" else {"unsupported": "-"}.get(row["status"], row["status"])


def _summary_table(result: Result) -> str:
    columns = [
        "pass",
        "provider",
        "shapes",
        "TFLOP/s",
        "of matmul",
        "against FA2",
        "lowest",
        "against best peer",
        "lowest",
    ]
    ceiling = result.ceilings.get("matmul_bf16_tflops")
    body = []
    for mode, providers in result.summary.items():
        for name, entry in providers.items():
            if "tflops" not in entry:
                continue
            label = f"**{name}**" if name == "flashtile" else name
            ratios = [entry.get(k) for k in ("vs_fa2", "vs_fa2_lowest", "vs_best_peer", "vs_best_peer_lowest")]
            share = entry["tflops"] / ceiling if ceiling else None
            body.append([mode, label, f"{entry['measured']}/{entry['shapes']}", entry["tflops"], share, *ratios])
    return "Geometric means over the shapes that a provider serves:\n\n" + markdown_table(columns, body)


def llama_tables(result: Result) -> str:
    """Return times and memory of each level, and the ratios beside the published ones."""
    columns = ("level", "attention", "mode", "ms", "peak_mib", "total_mib", "status")
    published = result.summary.get("published", {})
    body = [[name, *(entry.get(k) for k in ("time", "memory", "extra_memory"))]
            for name, entry in result.summary.get("ratios", {}).items()]  # fmt: skip
    body.append(["published, to beat", published.get("time"), published.get("memory"), None])
    ratios = markdown_table(["standard / flash", "time", "memory, all", "memory, between inputs and results"], body)
    return f"{ratios}\n\n<details><summary>every measurement</summary>\n\n{result.markdown(columns)}\n\n</details>"


def plain_table(result: Result) -> str:
    """Return the rows as they are, columns that say nothing left out."""
    names = [name for name in dict.fromkeys(k for row in result.rows for k in row) if name not in ("samples", "name")]
    useful = [name for name in names if len({cell(row.get(name)) for row in result.rows}) > 1]
    return result.markdown(useful or names)


def tune_table(result: Result) -> str:
    """Return the chosen configurations, and what each gained over the table before."""
    body = []
    for row in result.rows:
        if not row["chosen"]:
            continue
        key = ("kernel", "head_dim", "dtype")
        peers = [r for r in result.rows if r["current"] and "geomean_ms" in r and all(r[k] == row[k] for k in key)]
        gain = peers[0]["geomean_ms"] / row["geomean_ms"] if peers else None
        body.append([*(row[k] for k in (*key, "block_m", "block_n", "num_warps", "num_stages", "geomean_ms")), gain])
    columns = ["kernel", "head_dim", "dtype", "block_m", "block_n", "num_warps", "num_stages", "ms", "gain"]
    return markdown_table(columns, body)


def feature_table(result: Result) -> str:
    """Return what each mask, score and option costs, beside its target and FlexAttention."""
    columns = ("feature", "provider", "head_dim", "mode", "ms", "times_plain", "tiles", "target", "met", "vs_flex",
               "status", "reason")  # fmt: skip
    return result.markdown(columns)


# ---- figures


def _pyplot() -> Any:
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 9, "axes.edgecolor": _GRID, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
        "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": _GRID, "figure.facecolor": "white", "figure.dpi": 130,
    })  # fmt: skip
    return plt


def _finish(figure: Any, result: Result, title: str, path: Path) -> Path:
    import textwrap

    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    caption = "\n".join(textwrap.wrap(result.caption(), int(figure.get_size_inches()[0] * 16)))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    below = 0.0
    if labels:
        # Anchored by the figure's own transform, which survives the tight bounding box; "outside" locations do not.
        anchor = {"bbox_to_anchor": (0.5, 0.0), "bbox_transform": figure.transFigure}
        columns = min(5, len(labels))
        legend = figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, **anchor)
        figure.canvas.draw()
        below = legend.get_window_extent().transformed(figure.transFigure.inverted()).y0
    figure.text(0.01, below - 0.01, caption, ha="left", va="top", fontsize=7, color="#6b7378")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    _pyplot().close(figure)
    return path


def plot_tflops(result: Result, mode: str, path: Path) -> Path:
    """Draw TFLOP/s against seqlen: a panel per head_dim and mask, a bar per provider."""
    plt = _pyplot()
    rows = [row for row in result.rows if row["mode"] == mode]
    names = providers_of(rows)
    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    lengths = sorted({row["seqlen"] for row in rows})
    size = (max(4.5, 0.9 + 3.5 * len(head_dims)), 0.9 + 2.4 * len(masks))
    figure, axes = plt.subplots(
        len(masks), len(head_dims), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    width = 0.84 / max(1, len(names))
    unit, factor = _unit(rows)
    for i, causal in enumerate(masks):
        for j, head_dim in enumerate(head_dims):
            axis = axes[i][j]
            panel = [r for r in rows if r["causal"] == causal and r["head_dim"] == head_dim and r["status"] == "ok"]
            for n, name in enumerate(names):
                values = {r["seqlen"]: r["tflops"] * factor for r in panel if r["provider"] == name}
                at = [x - 0.42 + (n + 0.5) * width for x in range(len(lengths))]
                heights = [values.get(length, 0.0) for length in lengths]
                colour = COLOURS.get(name, "#444444")
                axis.bar(
                    at, heights, 0.92 * width, color=colour, label=_label(name), zorder=3 if name == "flashtile" else 2
                )
            ceiling = result.ceilings.get("matmul_bf16_tflops")
            if ceiling and mode == "forward":
                axis.axhline(ceiling * factor, color=_INK, lw=0.8, ls=(0, (4, 3)), label="bf16 matmul, same run")
            axis.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=9, loc="left")
            axis.set_xticks(
                range(len(lengths)), [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
            )
            axis.tick_params(length=0)
            if i == len(masks) - 1:
                axis.set_xlabel("seqlen")
            if j == 0:
                axis.set_ylabel(unit)
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    return _finish(figure, result, f"Attention {mode}, {dtypes}", path)


def _unit(rows: Sequence[Row]) -> tuple[str, float]:
    largest = max((row["tflops"] for row in rows if row["status"] == "ok"), default=0.0)
    return ("TFLOP/s", 1.0) if largest >= 1 else ("GFLOP/s", 1e3)


def _label(name: str) -> str:
    return PROVIDERS[name].label if name in PROVIDERS else name


def plot_ratios(result: Result, path: Path) -> Path:
    """Draw how many times faster flashtile is than each peer, shape by shape."""
    plt = _pyplot()
    from matplotlib import ticker

    modes = modes_of(result.rows)
    size = (9.5, 0.8 + 2.3 * len(modes))
    figure, axes = plt.subplots(len(modes), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, mode in zip(axes[:, 0], modes, strict=True):
        rows = [row for row in result.rows if row["mode"] == mode and row["status"] == "ok"]
        shapes = list(dict.fromkeys(sorted(map(shape_of, rows))))
        ms = {(shape_of(row), row["provider"]): row["ms"] for row in rows}
        for name in providers_of(rows):
            points = [(x, ms[s, name] / ms[s, "flashtile"]) for x, s in enumerate(shapes)
                      if (s, name) in ms and (s, "flashtile") in ms]  # fmt: skip
            if name != "flashtile" and points:
                axis.plot(*zip(*points, strict=True), MARKERS.get(name, "o"), ms=5, color=COLOURS.get(name, "#444444"),
                          label=f"against {_label(name)}")  # fmt: skip
        axis.axhline(1.0, color=_INK, lw=0.9)
        axis.set_yscale("log", base=2)
        low, high = axis.get_ylim()
        axis.set_yticks([tick for tick in _RATIO_TICKS if low <= tick <= high])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.set_ylabel(f"{mode}: times faster")
        axis.set_xticks(range(len(shapes)), [f"{s[3]}" for s in shapes], rotation=60, fontsize=7)
        axis.tick_params(length=0)
        groups = list(dict.fromkeys((s[0], s[1], s[2]) for s in shapes))
        for group in groups:
            inside = [x for x, s in enumerate(shapes) if s[:3] == group]
            text = f"d{group[1]} {'causal' if group[2] else 'full'}"
            axis.text(
                sum(inside) / len(inside), 1.01, text, transform=axis.get_xaxis_transform(), ha="center", fontsize=7.5
            )
            if inside[0]:
                axis.axvline(inside[0] - 0.5, color=_GRID, lw=1)
    return _finish(figure, result, "flashtile against its peers (above the line: flashtile is faster)", path)


def plot_llama(result: Result, path: Path) -> Path:
    """Draw milliseconds and memory of forward and backward together, per level."""
    plt = _pyplot()
    rows = [row for row in result.rows if row["mode"] == "both" and "ms" in row]
    levels = list(dict.fromkeys(row["level"] for row in rows))
    names = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, key, label in zip(axes, ("ms", "total_mib"), ("milliseconds", "MiB held at the peak"), strict=True):
        for n, name in enumerate(names):
            values = {row["level"]: row.get(key, 0.0) for row in rows if row["attention"] == name}
            at = [x - 0.42 + (n + 0.5) * 0.84 / len(names) for x in range(len(levels))]
            bars = axis.bar(at, [values.get(level, 0.0) for level in levels], 0.77 / len(names), label=name,
                            color=COLOURS.get(name, "#444444"))  # fmt: skip
            axis.bar_label(bars, fmt=lambda value: cell(float(value)), fontsize=7, padding=2)
        axis.set_xticks(range(len(levels)), levels)
        axis.set_ylabel(label)
        axis.tick_params(length=0)
    shape = next((f"{r['heads']} heads x {r['head_dim']}, {r['seqlen']} tokens" for r in rows), "")
    return _finish(figure, result, f"One LLaMA-shaped layer, forward and backward: {shape}", path)


# ---- sections and the page


def figures_of(result: Result, folder: Path, stem: str) -> list[Path]:
    """Draw the figures of a result file and return their paths."""
    if result.benchmark == "flash_attention":
        modes = modes_of(result.rows)
        drawn = [plot_tflops(result, mode, folder / f"{stem}_{mode}.png") for mode in modes]
        if any(row["provider"] == "flashtile" and "vs_best_peer" in row for row in result.rows):
            drawn.append(plot_ratios(result, folder / f"{stem}_ratios.png"))
        return drawn
    if result.benchmark == "llama" and any("ms" in row for row in result.rows):
        return [plot_llama(result, folder / f"{stem}.png")]
    return []


TABLES: dict[str, Callable[[Result], str]] = {
    "flash_attention": attention_tables,
    "features": feature_table,
    "llama": llama_tables,
    "tune_launch": tune_table,
}
TITLES = {
    "flash_attention": "Attention against its peers",
    "features": "What masks, scores and options cost",
    "llama": "One LLaMA-7B-shaped layer",
    "atten": "The plain baseline",
    "overhead": "Host overhead",
    "tune_launch": "The launch table",
}


def section(path: Path, docs: Path, figures: Path | None) -> str:
    """Return the docs section of one result file, and draw its figures."""
    result = Result.load(path)
    drawn = figures_of(result, figures or path.parent, path.stem)
    link = lambda target: os.path.relpath(target, docs.parent)  # noqa: E731
    title = TITLES.get(result.benchmark, result.benchmark)
    parts = [f"### {title}: `{path.stem}`", f"{result.caption()}. Data: [{path.name}]({link(path)})."]
    if not result.complete:
        parts.append("This run was not complete.")
    if result.ceilings:
        parts.append(
            "Measured in the same run: " + ", ".join(f"{k} {cell(float(v))}" for k, v in result.ceilings.items()) + "."
        )
    parts += [f"![{p.stem}]({link(p)})" for p in drawn]
    parts.append(TABLES.get(result.benchmark, plain_table)(result))
    return "\n\n".join(parts) + "\n"


def rewrite(page: str, sections: Sequence[str]) -> str:
    """Return the page with what stands between the markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must hold {BEGIN!r} once and {END!r} once after it")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n" + ("\n".join(sections) or NOTHING) + f"\n{END}" + rest.split(END)[1]


def run(options: Options, console: Console | None = None) -> list[str]:
    """Draw, rewrite the docs page, and return the sections."""
    console = console or Console()
    docs = options.docs or Path("benchmarks.md")
    paths = options.results or tuple(sorted((docs.parent / "results").glob("*.json")))
    sections = [section(path, docs, options.figures) for path in paths]
    if options.docs:
        options.docs.write_text(rewrite(options.docs.read_text(), sections))
        console.print(f"{len(sections)} sections in {options.docs}", highlight=False)
    else:
        for text in sections:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    return sections


def main(args: Sequence[str] | None = None) -> list[str]:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args))


if __name__ == "__main__":
    main()
