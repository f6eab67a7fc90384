"""The numbers of the backward kernels for Hopper: what the launch table says, and what follows from it."""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from triton.experimental import gluon

from flashtile.kernel.launch import HopperConfig

SHARED_LIMIT = 232_448 - 1_024  # bytes of shared memory, without what small numbers and mbarriers take
HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # a head between two of them computes as the wider one


@dataclass(frozen=True)
class Sizes:
    """What is known when a kernel is compiled.

    ``head_dim`` and ``head_dim_v`` are those of the tiles, at least those of the tensors: the copy engine fills up with
    zeros. ``panel`` is the number of columns that it copies at a time. A tile of dQ consists of boxes of 64 x 32
    numbers: ``dq_boxes`` says how many each consumer computes, ``dq_kept`` how many of them it stores at a time.
    ``in_turn``: programs add to a tile of dQ in an order of their blocks, so that it is the same in every run.
    """

    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    panel: int
    stages: int
    stages_do: int
    dq_boxes: tuple[int, int]
    dq_kept: int
    dk_late: bool
    packed: bool
    in_turn: bool
    registers_consumer: int
    registers_mover: int
    entry_bytes: int  # of a score's entries in shared memory
    entries_stages: int  # how many tiles of them there is room for

    @property
    def bytes(self) -> int:
        """Of shared memory, without the numbers and mbarriers."""
        rows = self.block_m * (self.head_dim * self.stages + self.head_dim_v * self.stages_do)
        keys = self.block_n * (self.head_dim + self.head_dim_v)
        p_ds = 2 * self.block_m * self.block_n if self.block_n > 64 else 3 * self.block_m * self.block_n
        per_query = self.block_m * (self.stages + self.stages_do)
        entries = self.block_m * self.block_n * self.entries_stages * self.entry_bytes
        return 2 * (rows + keys + p_ds) + 4 * (2 * self.dq_kept * 64 * 32 + per_query) + entries


@functools.cache
def of(
    head_dim: int, head_dim_v: int, config: HopperConfig, packed: bool, in_turn: bool = False, entry_bytes: int = 0
) -> Sizes:
    """Return the sizes for heads of these dims (multiples of 8, at most 256) under a configuration.

    A score's entries of ``entry_bytes`` get what room there is left.
    """
    served = HEAD_DIMS if config.block_m == 128 else HEAD_DIMS[1:]
    head_dim, head_dim_v = (next(n for n in served if n >= dim) for dim in (head_dim, head_dim_v))
    if config.block_n == 64:  # the consumers share out dQ's columns, 64 at a time
        share = head_dim // 64 // 2 * 2
        dq_boxes, dq_kept = (share, head_dim // 32 - share), 2
    elif config.block_m == 128:  # its rows
        dq_boxes, dq_kept = (head_dim // 32, head_dim // 32), head_dim // 32
    else:  # its columns, at once
        share = 2 if head_dim > 64 else 1
        dq_boxes, dq_kept = (share, head_dim // 32 - share), share
    whole = head_dim % 64 == 0 and head_dim_v % 64 == 0 and 1 not in dq_boxes
    if config.block_n == 64:
        whole = head_dim % 64 == 0 and head_dim_v % 64 == 0
    size = Sizes(
        head_dim, head_dim_v, config.block_m, config.block_n, 64 if whole else 32, config.stages, config.stages,
        dq_boxes, dq_kept, head_dim > 64, packed, in_turn, config.registers_consumer, config.registers_producer,
        entry_bytes, 0,
    )  # fmt: skip
    size = size if size.bytes <= SHARED_LIMIT else replace(size, stages_do=1)
    ways = [replace(size, entries_stages=stages) for stages in (2, 1) if entry_bytes]
    return next((way for way in ways if way.bytes <= SHARED_LIMIT), size)


@gluon.constexpr_function
def first_box(consumer, sizes):
    """The first box of a dQ tile that a consumer computes."""
    return consumer * sizes.dq_boxes[0]


@gluon.constexpr_function
def boxes_in(part, consumer, sizes):
    """How many boxes a consumer stores as part number ``part`` of its share; 0 past the last part."""
    return min(sizes.dq_kept, max(0, sizes.dq_boxes[consumer] - part * sizes.dq_kept))


@gluon.constexpr_function
def parts(consumer, sizes):
    """In how many parts a consumer stores its share of a dQ tile."""
    return -(-sizes.dq_boxes[consumer] // sizes.dq_kept)
