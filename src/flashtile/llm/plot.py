"""Pictures of training runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flashtile.llm.atomic import atomic_write
from flashtile.llm.metrics import History


def plot_loss(histories: Mapping[str, History], path: Path | str, title: str = "") -> Path:
    """Draw training losses as lines and validation losses as points, one colour per run, into a PNG or SVG file.

    Later runs are drawn thinner, so that equal curves show, one on the other.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, history) in enumerate(histories.items()):
        color = f"C{index}"
        thickness = 1.4 * (len(histories) - index)
        steps = [row["step"] for row in history.train]
        axes.plot(steps, history.losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(history.losses), color=color, linewidth=thickness, label=f"{name}, training")
        if history.val:
            val_steps = [row["step"] for row in history.val]
            axes.plot(
                val_steps,
                history.val_losses,
                "o",
                color=color,
                markersize=2 + 2 * thickness,
                label=f"{name}, validation",
            )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    path = Path(path)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=150)
    return path


def _smooth(values: list[float], decay: float = 0.9) -> list[float]:
    """Return the exponential moving average, corrected for its start at 0."""
    smooth, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        smooth.append(average / (1 - decay**count))
    return smooth
