"""Pictures of masks: in characters for a terminal, and as a PNG with its tiles coloured empty, partial, full."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile.seqlen import Where

if TYPE_CHECKING:
    from flashtile.mask.value import Mask

EMPTY, PARTIAL, FULL = "·", "▒", "█"
_ROWS_AT_A_TIME = 1024
MOST = 2**26  # entries of a picture: 8,192 queries and keys


def visible(mask: Mask, seqlen_q: int, seqlen_k: int | None = None, batch: int = 0, head: int = 0) -> Tensor:
    """Return the mask of one batch entry and query head as a bool tensor ``(seqlen_q, seqlen_k)``, on the CPU.

    ``seqlen_k`` is ``seqlen_q`` unless given. Raises TypeError for what is no mask, ValueError for sizes that are no
    lengths, or more entries than ``MOST``.
    """
    from flashtile.mask.value import Mask

    if not isinstance(mask, Mask):
        raise TypeError(f"mask is a {type(mask).__name__}, but wants a value of flashtile.mask")
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    for name, value in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("batch", batch), ("head", head)):
        _whole(name, value, 0)
    if seqlen_q * seqlen_k > MOST:
        raise ValueError(
            f"seqlen_q x seqlen_k is {seqlen_q} x {seqlen_k}, but a picture wants at most {MOST:,} entries, such as "
            "8,192 x 8,192"
        )
    device = next(mask.tensors(), torch.empty(0)).device
    # Tensors, as on the CPU path: ~ of a comparison of numbers would be no truth value.
    place = torch.tensor([batch, head], device=device).view(2, 1, 1)
    where = Where(place[0], place[1], seqlen_q, seqlen_k)
    k_idx = torch.arange(seqlen_k, device=device)[None, :]
    rows = torch.arange(seqlen_q, device=device)[:, None].split(_ROWS_AT_A_TIME)
    parts = [mask.predicate(where, q_idx, k_idx, mask.args).expand(len(q_idx), seqlen_k).cpu() for q_idx in rows]
    return torch.cat(parts) if parts else torch.zeros((0, seqlen_k), dtype=torch.bool)


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, but wants an int")
    if value < least:
        raise ValueError(f"{name} is {value}, but wants at least {least}")


def tile_states(seen: Tensor, tile_q: int, tile_k: int) -> Tensor:
    """Return 0 (empty), 1 (partial) or 2 (full) for each tile of a bool matrix; tiles at the edges may be smaller."""
    rows, cols = -(-seen.shape[0] // tile_q), -(-seen.shape[1] // tile_k)
    states = torch.zeros((rows, cols), dtype=torch.int64)
    for i in range(rows):
        for j in range(cols):
            tile = seen[i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
            states[i, j] = 2 if tile.all() else int(tile.any())
    return states


def show(
    mask: Mask, seqlen_q: int, seqlen_k: int | None = None, *, batch: int = 0, head: int = 0, width: int = 64
) -> str:
    """Return a picture of at most ``width`` cells a row, queries downwards: · sees nothing, ▒ some, █ every key.

    A cell is one (query, key), or a square of as many as it takes. ``seqlen_k`` is ``seqlen_q`` unless given.
    """
    _whole("width", width, 1)
    seen = visible(mask, seqlen_q, seqlen_k, batch, head)
    side = max(-(-max(seen.shape, default=0) // width), 1)
    unit = "" if side == 1 else f", a cell is {side} x {side}"
    lines = [f"{mask}: {seen.shape[0]} queries x {seen.shape[1]} keys{unit}"]
    for row in tile_states(seen, side, side).tolist():
        lines.append(" ".join((EMPTY, PARTIAL, FULL)[state] for state in row))
    return "\n".join(lines)


def save_png(
    mask: Mask,
    path: str | Path,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    tile_q: int | None = None,
    tile_k: int | None = None,
    batch: int = 0,
    head: int = 0,
) -> None:
    """Draw the mask with its tiles of ``tile_q`` x ``tile_k``: empty ones white, full ones dark, partial ones light
    where hidden and dark where visible. By default a tile is an eighth of the keys on either side."""
    for name, tile in (("tile_q", tile_q), ("tile_k", tile_k)):
        if tile is not None:
            _whole(name, tile, 1)
    seen = visible(mask, seqlen_q, seqlen_k, batch, head)
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    eighth = max(seen.shape[1] // 8, 1)
    tile_q, tile_k = tile_q or eighth, tile_k or eighth
    states = tile_states(seen, tile_q, tile_k)
    spread = (
        states.to(torch.uint8)
        .repeat_interleave(tile_q, 0)
        .repeat_interleave(tile_k, 1)[: seen.shape[0], : seen.shape[1]]
    )
    # Colours: empty, hidden in a partial tile, visible in a partial tile, full.
    colours = ["#ffffff", "#dbe7f3", "#6b9bd1", "#1f4e8c"]
    image = torch.where(spread == 1, 1 + seen.to(torch.uint8), (spread == 2) * torch.tensor(3, dtype=torch.uint8))

    figure = Figure(figsize=(3.6, 3.6 * max(min(seen.shape[0] / max(seen.shape[1], 1), 2), 0.5) + 0.6), dpi=110)
    axes = figure.add_subplot()
    axes.imshow(image.numpy(), cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="nearest")
    axes.set_xticks([x - 0.5 for x in range(0, seen.shape[1] + 1, tile_k)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(0, seen.shape[0] + 1, tile_q)], minor=True)
    axes.grid(which="minor", color="#b8c4d0", linewidth=0.6)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)
    axes.set_title(str(mask), fontsize=9)
    named = {"empty": colours[0], "partial": colours[2], "full": colours[3]}
    patches = [Patch(facecolor=colour, edgecolor="#b8c4d0", label=name) for name, colour in named.items()]
    figure.legend(handles=patches, loc="lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
