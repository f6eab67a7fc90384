"""Pictures of masks, and the page that shows them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile import mask
from flashtile.mask import Mask, causal, document, prefix, window


def wrong(value: Any) -> Any:
    """Return what a type checker would have refused."""
    return value


def test_picture_in_characters() -> None:
    assert causal().show(3).splitlines() == ["causal(): 3 queries x 3 keys", "█ · ·", "█ █ ·", "█ █ █"]
    coarse = mask.show(window(4, 0), 8, 12, width=3)
    assert coarse.splitlines() == ["window(4, 0): 8 queries x 12 keys, a cell is 4 x 4", "▒ ▒ ·", "· ▒ ▒"]
    assert mask.show(prefix([1, 2]), 1, 3, batch=1).splitlines()[1] == "█ █ ·"
    assert mask.show(causal(), 0, 0) == "causal(): 0 queries x 0 keys"


def not_in_the_first_head(where, q_idx, k_idx, args):
    return ~(where.head == 0) & (k_idx <= q_idx)


def test_picture_of_a_head() -> None:
    """A head by itself is a tensor all the same: ~ of a number would be another number."""
    value = Mask.of(not_in_the_first_head)
    assert value.show(2).splitlines()[1:] == ["· ·", "· ·"]
    assert value.show(2, head=1).splitlines()[1:] == ["█ ·", "█ █"]


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (lambda path: causal().show(-4), ValueError, "seqlen_q is -4, but wants at least 0"),
        (lambda path: causal().show(4, wrong(2.5)), TypeError, "seqlen_k is 2.5, but wants an int"),
        (lambda path: causal().show(8, width=0), ValueError, "width is 0, but wants at least 1"),
        (lambda path: mask.show(wrong("causal"), 8), TypeError, "mask is a str, but wants a value of flashtile.mask"),
        (lambda path: mask.save_png(wrong("causal"), path, 8), TypeError, "mask is a str, but wants a value of"),
        (lambda path: mask.save_png(causal(), path, 8, tile_q=0), ValueError, "tile_q is 0, but wants at least 1"),
        (lambda path: mask.save_png(causal(), path, 100000), ValueError, "100000 x 100000, but .* 67,108,864 entries"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, draw, error, words) -> None:
    with pytest.raises(error, match=words):
        draw(tmp_path / "mask.png")


def test_picture_as_png(tmp_path) -> None:
    mask.save_png(causal() & document(torch.tensor([0] * 20 + [1] * 12)), tmp_path / "mask.png", 24, 32, tile_q=8)
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


PAGE = Path(__file__).parents[1] / "docs" / "masks.md"


def test_page_shows_what_its_code_draws() -> None:
    text = PAGE.read_text()
    ids = torch.tensor([0] * 20 + [1] * 8 + [2] * 36)
    assert (causal() & document(ids)).show(64, width=16) in text
    drawn = set(re.findall(r'save_png\(.*"(\w+\.png)"', text))
    assert drawn == set(re.findall(r"\(figures/(\w+\.png)\)", text))


def test_page_has_every_mask() -> None:
    text = PAGE.read_text()
    assert [name for name in mask.__all__ if name[0].islower() and name not in text] == ["jitted"]
