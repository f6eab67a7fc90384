"""A test for scores of your own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.score.value import Score
from flashtile.seqlen import Where


def gradcheck(
    score: Score, *, batch: int = 2, heads: int = 2, seqlen_q: int = 5, seqlen_k: int = 7, scale: float = 3.0
) -> None:
    """Compare a score's derivatives with central differences in fp64, at random logits of size ``scale``.

    Both d(logit) / ds and, for the tensors it declares, d(logit) / d(entry). Raises ValueError at the first difference,
    naming where. ``batch``, ``heads`` and the lengths must fit the score's tensors.
    """
    tensors = [t.detach().double() if t.is_floating_point() else t for t in score.tensors()]
    score = score.with_tensors(tuple(tensors))
    device = tensors[0].device if tensors else torch.device("cpu")
    place = torch.arange(batch, device=device).view(-1, 1, 1, 1), torch.arange(heads, device=device).view(-1, 1, 1)
    indices = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    at = (Where(*place, seqlen_q, seqlen_k), *indices)
    generator = torch.Generator().manual_seed(0)
    s = scale * torch.randn((batch, heads, seqlen_q, seqlen_k), generator=generator, dtype=torch.float64).to(device)
    step = 1e-5

    def forward(score: Score, s: Tensor) -> Tensor:
        return torch.as_tensor(score.forward(*at, s, score.args)).expand_as(s)

    def compare(what: str, got: Any, want: Tensor) -> None:
        got = torch.as_tensor(got, dtype=torch.float64, device=device).expand_as(want)
        wrong = ((got - want).abs() > 1e-6 * (1.0 + want.abs())) | got.isnan()
        if wrong.any():
            b, h, i, j = wrong.nonzero()[0].tolist()
            place = f"batch {b}, head {h}, query {i}, key {j}, s = {s[b, h, i, j]:.6g}"
            raise ValueError(
                f"score {score.name}: {what} is {got[b, h, i, j]:.6g}, but wants {want[b, h, i, j]:.6g} ({place})"
            )

    slope = (forward(score, s + step) - forward(score, s - step)) / (2 * step)
    compare("d(logit) / ds", score.derivative(*at, s, score.args), slope)
    for p in score.parameters():

        def moved(by: float, index: int = p.index) -> Tensor:
            shifted = [t + by if i == index else t for i, t in enumerate(score.tensors())]
            return forward(score.with_tensors(tuple(shifted)), s)

        # Each logit reads one entry of the tensor, so that moving all of them at once moves that one.
        slope = (moved(step) - moved(-step)) / (2 * step)
        compare(f"d(logit) / d(entry of tensor {p.index})", p.score.derivative(*at, s, p.score.args), slope)
