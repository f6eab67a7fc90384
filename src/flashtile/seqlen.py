"""Which sequence a program works on."""

from typing import Any, NamedTuple


class Where(NamedTuple):
    """The place of a tile: its batch entry, its query head, and the two lengths of its sequence.

    Every field is an int, a torch tensor that broadcasts against a score tile, or a Triton scalar,
    so the mask and score functions that read it run in PyTorch and in kernels alike.
    """

    batch: Any
    head: Any
    seqlen_q: Any
    seqlen_k: Any
