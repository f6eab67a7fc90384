"""The device side of ``flashtile.dropout``: which weights of a tile are kept."""

import triton
import triton.language as tl


@triton.jit
def keep(seed, where, q_idx, k_idx, threshold):
    """Return a boolean tile, True where a weight is kept: ``flashtile.dropout.keep_mask``, bit for bit.

    seed: the int64 number itself (loaded once per program). where: batch and head are scalars. q_idx and k_idx
    broadcast against each other, ``[rows, 1]`` and ``[1, cols]`` or transposed. threshold: ``Dropout.threshold``, any
    integer type.
    """
    # 32-bit words: with 64-bit ones tl.philox is another generator.
    c0 = k_idx.to(tl.uint32)
    c1 = q_idx.to(tl.uint32)
    c2 = tl.cast(where.head, tl.uint32)
    c3 = tl.cast(where.batch, tl.uint32)
    word, _, _, _ = tl.philox(seed, c0, c1, c2, c3)  # pyright: ignore[reportGeneralTypeIssues]
    return word >= tl.cast(threshold, tl.uint32)
