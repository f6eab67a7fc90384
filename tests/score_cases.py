"""Every kind of score, with tensors for given sizes, and the oracle of the gradients to those tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.kernel.flash_attention_mock import dense_attention
from flashtile.mask import Mask
from flashtile.score import Score, alibi, bias, relative_position, softcap, temperature
from tests.reference import _plain_attention, moved


def _bias(*dims: str) -> Callable[..., Score]:
    def make(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Score:
        sizes = {"b": batch, "h": heads, "q": seqlen_q, "k": seqlen_k, "1": 1}
        return bias(torch.randn([sizes[d] for d in dims]))

    return make


def _transposed_bias(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Score:
    return bias(torch.randn(heads, seqlen_k, 2 * seqlen_q)[:, :, ::2].mT)


def _in_order(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Score:
    slopes, mostly_flat = alibi(torch.rand(heads) / 4), bias(torch.randn(heads, seqlen_q, seqlen_k))
    return slopes.then(softcap(2.0)).then(mostly_flat).then(temperature(1.5))


# name: makes the score for (batch, heads_q, seqlen_q, seqlen_k)
SCORES: dict[str, Callable[..., Score]] = {
    "softcap": lambda b, h, q, k: softcap(1.5),
    "temperature": lambda b, h, q, k: temperature(0.7),
    "alibi": lambda b, h, q, k: alibi(torch.rand(h) / 4),
    "alibi per batch": lambda b, h, q, k: alibi(torch.rand(b, h) / 4),
    "bias bhqk": _bias("b", "h", "q", "k"),
    "bias hqk": _bias("h", "q", "k"),
    "bias b1qk": _bias("b", "1", "q", "k"),
    "bias qk": _bias("q", "k"),
    "bias b11k": _bias("b", "1", "1", "k"),
    "bias hq1": _bias("h", "q", "1"),
    "bias 1": _bias("1"),
    "bias strided": _transposed_bias,
    "relative": lambda b, h, q, k: relative_position(torch.randn(12, h), max_distance=20),
    "relative causal": lambda b, h, q, k: relative_position(torch.randn(7, h), max_distance=20, bidirectional=False),
    "in order": _in_order,
}


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score,
    dtype: torch.dtype = torch.float64,
    **options,
) -> list[Tensor]:
    """Return the gradients to the score's floating-point tensors by autograd: the oracle in fp64, or plain PyTorch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v, do, dlse = (t.detach().to(device, dtype) for t in (q, k, v, do, dlse))
    tensors = [t.detach().to(device) for t in score.tensors()]
    leaves = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]
    score = score.with_tensors(tuple(leaves))
    attend = dense_attention if dtype == torch.float64 else _plain_attention
    options = {"sinks": None, "dropout": None, "mask": mask, **options}
    options = {name: moved(option, device) for name, option in options.items()}
    o, lse = attend(q, k, v, softmax_scale=softmax_scale, score=score, **options)
    seen = lse.isfinite()
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        return []
    total = (o * do).sum() + (lse[seen] * dlse[seen]).sum()
    return [grad.cpu() for grad in torch.autograd.grad(total, wanted)]  # where the comparisons are
