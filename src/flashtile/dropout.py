"""Dropout as a function of place: whether a weight is kept depends on (seed, batch, head, query, key) and nothing else.

    r = philox4x32-10(key = seed, counter = (k_idx, q_idx, head, batch))[0]         kept iff r >= floor(p * 2**32)
    o = sum_j keep_ij / (1 - p) * softmax(s)_ij * v_j

So tile sizes, backends and recomputation all agree, and nothing of size n x n is stored. The log-sum-exp is that of
the softmax before dropout. ``flashtile.kernel.dropout`` is the same function on the device.

Source: Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.seqlen import Where

WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


class Dropout(NamedTuple):
    """Drop each weight with probability ``p``, ``0 <= p < 1``; ``seed`` is an int64 tensor of one element."""

    p: float
    seed: Tensor

    @property
    def threshold(self) -> int:
        """The random word from which on a weight is kept, ``floor(p * 2**32)``."""
        return threshold(self.p)

    @property
    def rescale(self) -> float:
        """What kept weights are multiplied by, ``1 / (1 - p)``."""
        return 1.0 / (1.0 - self.p)


def threshold(p: float) -> int:
    """Return ``floor(p * 2**32)``; raises ValueError unless ``0 <= p < 1``."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p is {p}, but wants 0 <= p < 1")
    return int(p * 2**32)


def draw_seed(device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
    """Return a fresh seed, int64 ``(1,)`` on ``device``, from torch's generator, which advances.

    The number never visits the host, so a CUDA graph draws a new one at every replay.
    """
    return torch.empty(1, dtype=torch.int64, device=device).random_(generator=generator)


def keep_mask(seed: Tensor, where: Where, q_idx: Any, k_idx: Any, p: float) -> Tensor:
    """Return True where the weight of query ``q_idx`` and key ``k_idx`` is kept; everything broadcasts.

    ``seed`` holds one int64; the fields of ``where`` and the indices are ints or integer tensors.
    """
    device = seed.device
    counter = (_tensor(x, device).long() & WORD for x in (k_idx, q_idx, where.head, where.batch))
    key = seed.reshape(())
    return philox((key & WORD, (key >> 32) & WORD), tuple(counter))[0] >= threshold(p)


def _tensor(x: Tensor | int, device: torch.device) -> Tensor:
    """Return a tensor on ``device``, without a copy from the host, which a CUDA graph could not capture."""
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=device)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: two key words and four counter words to four random words.

        c0', c1' = high(M1 c2) ^ c1 ^ k0, low(M1 c2)        c2', c3' = high(M0 c0) ^ c3 ^ k1, low(M0 c0)

    Words are unsigned 32-bit numbers in int64 tensors that broadcast against each other.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        # A product may wrap around in 64 signed bits; its two 32-bit halves are right all the same. The low one keeps
        # the high one above itself until the next round's ``& WORD``.
        product_0, product_1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((product_1 >> 32) ^ c1 ^ k0) & WORD, product_1
        c2, c3 = ((product_0 >> 32) ^ c3 ^ k1) & WORD, product_0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD
