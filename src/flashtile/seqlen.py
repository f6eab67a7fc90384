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


class Seqlens(NamedTuple):
    """Lengths of sequences packed one after the other: sequence i has the rows ``[cu_seqlens[i], cu_seqlens[i + 1])``.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32 tensors of ``batch + 1`` entries. ``seqused_*`` (``batch`` entries)
    cut each sequence to its first rows; ``max_seqlen_*`` are hints that nothing depends on.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any = None
    seqused_k: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
