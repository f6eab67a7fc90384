"""What bench_mark_features measures: every feature as we are told of it, as FlexAttention is, and as a formula.

A feature is made for a ``Setting`` as ``Rules``, the value that our own passes take. The same rules give the call that
is timed, the expected values (``feature_gate``), and the tiles that a kernel has to visit (``visited``).
FlexAttention's modifications are those of its authors' blog (https://pytorch.org/blog/flexattention/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile import dispatch, mask, score
from flashtile.attention import flash_attention, flash_attention_varlen
from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import PROVIDERS, Attention, Inputs, Prepared, Provider, available_bytes
from flashtile.dropout import Dropout, draw_seed
from flashtile.kernel import launch
from flashtile.kernel.rules import Rules
from flashtile.mask import Mask
from flashtile.seqlen import Seqlens, Where

CAP, DROPOUT_P, SEED = 20.0, 0.1, 7
_BUCKETS = 32  # of relative positions, as in T5

Modification = Callable[[Any, Any, Any, Any, Any], Any]
MaskModification = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Sizes:
    """The shapes of a run: ``tokens`` in sequences of ``seq_len``, or in a single one for features that are long; and
    the backend that ours is asked for."""

    dtype: str
    tokens: int
    width: int
    seq_len: int
    head_dim: int
    backend: str | None = None

    def setting(self, device: torch.device, long: bool, learns: bool = False) -> Setting:
        seqlen = self.tokens if long else self.seq_len
        batch, heads = max(1, self.tokens // seqlen), max(1, self.width // self.head_dim)
        case = Case(self.dtype, batch, heads, seqlen, self.head_dim, True)
        return Setting(case, device, max(1, self.tokens // 16), learns, self.backend)


@dataclass(frozen=True)
class Setting:
    """One shape, and what features are made of on it; ``part`` is the width of the window, the length of a document."""

    case: Case
    device: torch.device
    part: int
    learns: bool = False
    backend: str | None = None

    def rules(self, rule: Mask | None = None, **options: Any) -> Rules:
        rule = mask.causal() if rule is None else rule
        return Rules(self.case.head_dim**-0.5, rule, backend=self.backend, **options)

    def learned(self, *shape: int) -> Tensor:
        """Return random normal numbers in the inputs' dtype, which get a gradient where the feature learns."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=self.case.torch_dtype)
        return values.requires_grad_(self.learns)

    def slopes(self) -> Tensor:
        """Return ALiBi's slopes, ``2 ** (-8 (h + 1) / heads)``."""
        head = torch.arange(1, self.case.heads + 1, device=self.device, dtype=torch.float32)
        return torch.exp2(-8.0 * head / self.case.heads).requires_grad_(self.learns)

    def cu_seqlens(self) -> Tensor:
        bounds = [*range(0, self.case.seqlen, self.part), self.case.seqlen]
        return torch.tensor(bounds, dtype=torch.int32, device=self.device)

    def ids(self) -> Tensor:
        return mask.document_ids(self.cu_seqlens(), self.case.seqlen)


Made = tuple[Rules, Tensor | None]  # and the tensor that gets a gradient, if there is one


@dataclass(frozen=True)
class Feature:
    """A feature: what it is in our words and in FlexAttention's, and how much longer than plain it may take."""

    name: str
    make: Callable[[Setting], Made]
    flex: Callable[[Setting], tuple[Modification | None, MaskModification | None]] | None = None
    peer: str = ""  # the feature whose time by FlexAttention this one is held against, itself by default
    long: bool = False
    learns: bool = False
    backward_only: bool = False  # its forward pass is another feature's
    as_value: bool = False  # causal() as a value instead of is_causal=True
    most: float | None = None  # times the plain causal pass
    most_by_tiles: float | None = None  # times the share of tiles that are visited

    def setting(self, sizes: Sizes, device: torch.device) -> Setting:
        return sizes.setting(device, self.long, self.learns)


# --- ours -------------------------------------------------------------------------------------------------------------


def _documents(at: Setting) -> Made:
    return at.rules(mask.document(at.ids()) & mask.causal()), None


def _packed_documents(at: Setting) -> Made:
    return at.rules(seqlens=Seqlens(at.cu_seqlens(), at.cu_seqlens())), None


def _alibi(at: Setting) -> Made:
    slopes = at.slopes()
    return at.rules(score=score.alibi(slopes)), slopes


def _bias(at: Setting) -> Made:
    tensor = at.learned(1, 1, at.case.seqlen, at.case.seqlen)
    return at.rules(score=score.bias(tensor)), tensor


def _bias_of_heads(at: Setting) -> Made:
    shape = (1, at.case.heads, at.case.seqlen, at.case.seqlen)
    # The tensor, its gradient in both precisions, and memory filled with NaN before the check.
    needed = math.prod(shape) * (3 * at.case.torch_dtype.itemsize + 8)
    if needed > (available := available_bytes(at.device)):
        raise MemoryError(f"needs about {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are free")
    tensor = at.learned(*shape)
    return at.rules(score=score.bias(tensor)), tensor


def _relative_position(at: Setting) -> Made:
    table = at.learned(_BUCKETS, at.case.heads)
    return at.rules(score=score.relative_position(table, bidirectional=False)), table


def _sinks(at: Setting) -> Made:
    sinks = at.learned(at.case.heads)
    return at.rules(sinks=sinks), sinks


def _dropout(at: Setting) -> Made:
    seed = draw_seed(at.device, torch.Generator(at.device).manual_seed(SEED))
    return at.rules(dropout=Dropout(DROPOUT_P, seed)), None


def _key_padding(at: Setting) -> Made:
    lengths = [at.case.seqlen if batch % 2 == 0 else at.case.seqlen * 5 // 8 for batch in range(at.case.batch)]
    return at.rules(mask.key_padding(lengths).to(at.device) & mask.causal()), None


# --- FlexAttention's --------------------------------------------------------------------------------------------------


def _flex_causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _flex_window(at: Setting) -> tuple[None, MaskModification]:
    width = at.part

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width)

    return None, window


def _flex_documents(at: Setting) -> tuple[None, MaskModification]:
    ids = at.ids()

    def documents(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return None, documents


def _flex_softcap(at: Setting) -> tuple[Modification, MaskModification]:
    def softcap(score, b, h, q_idx, kv_idx):
        return CAP * torch.tanh(score / CAP)

    return softcap, _flex_causal


def _flex_alibi(at: Setting) -> tuple[Modification, MaskModification]:
    slopes = at.slopes()

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi, _flex_causal


CAUSAL = Feature("causal", lambda at: (at.rules(), None), lambda at: (None, _flex_causal))

# Features that are measured in one process, beside plain causal attention of the same shape.
GROUPS: dict[str, tuple[Feature, ...]] = {
    "plain": (
        CAUSAL,
        Feature("causal as a value", lambda at: (at.rules(), None), peer="causal", as_value=True, most=1.03),
        Feature("full", lambda at: (at.rules(mask.full()), None), lambda at: (None, None)),
    ),
    "window": (
        Feature("window", lambda at: (at.rules(mask.window(at.part, 0)), None), _flex_window, long=True,
                most_by_tiles=1.15),
    ),
    "documents": (
        Feature("documents", _documents, _flex_documents, long=True, most_by_tiles=1.15),
        Feature("documents, packed", _packed_documents, peer="documents", long=True, most_by_tiles=1.15),
    ),
    "softcap": (Feature("softcap", lambda at: (at.rules(score=score.softcap(CAP)), None), _flex_softcap, most=1.35),),
    "alibi": (
        Feature("alibi", _alibi, _flex_alibi, most=1.15),
        Feature("alibi, gradient", _alibi, learns=True, backward_only=True),
    ),
    "bias": (
        Feature("bias", _bias, most=1.6),
        Feature("bias, gradient", _bias, learns=True, backward_only=True, most=1.6),
    ),
    "bias_of_heads": (
        Feature("bias of every head", _bias_of_heads, most=1.6),
        Feature("bias of every head, gradient", _bias_of_heads, learns=True, backward_only=True, most=1.6),
    ),
    "relative_position": (
        Feature("relative position", _relative_position),
        Feature("relative position, gradient", _relative_position, learns=True, backward_only=True),
    ),
    "sinks": (Feature("sinks", _sinks, learns=True),),
    "dropout": (Feature("dropout", _dropout),),
    "key_padding": (Feature("key padding", _key_padding),),
}  # fmt: skip


def features_of(group: str, provider: str) -> list[Feature]:
    """Return the features of a group that a provider has, plain causal attention of their shape first."""
    found = [feature for feature in GROUPS[group] if provider == "flashtile" or feature.flex is not None]
    return [dataclasses.replace(CAUSAL, long=found[0].long), *(f for f in found if f is not CAUSAL)] if found else []


# --- calls ------------------------------------------------------------------------------------------------------------


class Problem:
    """A feature made for a shape, with its inputs, ready to be checked and to be timed."""

    def __init__(self, feature: Feature, provider: str, at: Setting) -> None:
        self.feature, self.at, self.case = feature, at, at.case
        self.rules, tensor = feature.make(at)
        self.learned = tensor if feature.learns else None
        self.inputs = Inputs.random(at.case, at.device)
        kind = self._ours() if provider == "flashtile" else self._flex()
        self.prepared = _Prepared(kind, at.case, self.inputs, self.learned)

    def configs(self) -> Mapping[str, Any]:
        """Return the launch configurations of the kernels that serve these shapes, by kernel; none on a CPU."""
        inputs = self.inputs
        return dispatch.select(dispatch.Problem.of(inputs.q, inputs.k, inputs.v), self.rules.backend).launch

    def _ours(self) -> Provider:
        rules, feature, device = self.rules, self.feature, self.at.device
        plain = PROVIDERS["flashtile"]
        if rules.seqlens is not None:
            cu_seqlens = rules.seqlens.cu_seqlens_q
            packed_options: Any = {"is_causal": True, "backend": rules.backend}

            def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return flash_attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, **packed_options)[None]

            return dataclasses.replace(plain, build=lambda case: packed, layout="bshd")
        options: dict[str, Any] = {"score": rules.score, "sinks": rules.sinks, "backend": rules.backend}
        if rules.mask == mask.causal() and not feature.as_value:
            options["is_causal"] = True
        else:
            options["mask"] = rules.mask
        attention: Any = flash_attention
        if rules.dropout is None:
            return dataclasses.replace(plain, build=lambda case: lambda q, k, v: attention(q, k, v, **options))
        options["dropout_p"] = rules.dropout.p
        generator = torch.Generator(device)

        def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Seeded anew, every call draws the seed that the expected values were made with.
            return attention(q, k, v, generator=generator.manual_seed(SEED), **options)

        return dataclasses.replace(plain, build=lambda case: dropped)

    def _flex(self) -> Provider:
        """FlexAttention with its block mask made beforehand; on a CPU, for tests, not compiled."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        modifications: Any = self.feature.flex  # features_of leaves out those without
        score_mod, mask_mod = modifications(self.at)
        n, device = self.case.seqlen, self.at.device
        block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, n, n, device=str(device))
        attention: Any = flex_attention
        if device.type == "cuda":
            attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        call: Attention = lambda q, k, v: attention(q, k, v, score_mod=score_mod, block_mask=block_mask)  # noqa: E731
        context = PROVIDERS["flex"].context if device.type == "cuda" else _quiet
        return dataclasses.replace(PROVIDERS["flex"], build=lambda case: call, context=context)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled is slow, it says
        yield


class _Prepared(Prepared):
    """A call that has the gradient of one more tensor, if one is given."""

    def __init__(self, provider: Provider, case: Case, inputs: Inputs, learned: Tensor | None) -> None:
        super().__init__(provider, case, inputs)
        attention = self.attention
        # What the attention reads besides q, k and v it has already; autograd only has to know of it.
        self.attention = lambda q, k, v, *_: attention(q, k, v)
        if learned is not None:
            self.leaves.append(learned)

    def outputs(self, backward: bool) -> dict[str, Tensor]:
        found = super().outputs(False)
        if backward:
            timed = self.timed("backward")
            with timed.context():
                dq, dk, dv, *others = timed.call()
            found |= {"dq": self.read(dq), "dk": self.read(dk), "dv": self.read(dv)}
            if others:
                found["dlearned"] = others[0]
        return found


# --- tiles ------------------------------------------------------------------------------------------------------------

# The kernels of a pass: how many matrix products each does on a tile, and whether it walks over queries.
_KERNELS = {
    "forward": {"forward": (2, False), "hopper_forward": (2, False)},
    "backward": {"backward_dq": (3, False), "backward_dkdv": (4, True), "hopper_backward": (5, True)},
}


def visited(rules: Rules, case: Case, mode: str, configs: Mapping[str, Any]) -> int:
    """Count the entries of all tiles that the kernels of a pass visit in one head, times the products done on each.

    ``configs`` has the tiles by kernel; which of them are visited is read off the mask's ranges, as in ``tile_bounds``
    of the kernels.
    """
    rule: Any = rules.mask.to("cpu")  # with ranges, as every mask here
    lengths: Sequence[int] = [case.seqlen] * case.batch
    if rules.seqlens is not None:
        lengths = rules.seqlens.cu_seqlens_q.diff().tolist()
    total = 0
    for kernel, (products, over_queries) in _KERNELS[mode].items():
        if kernel not in configs:
            continue
        kept, walked, ranges = configs[kernel].block_m, configs[kernel].block_n, rule.key_range
        if over_queries:
            kept, walked, ranges = walked, kept, rule.query_range
        for batch, n in enumerate(lengths):
            for lo in range(0, n, kept):
                start, _, _, end = ranges(Where(batch, 0, n, n), lo, min(lo + kept, n), rule.args)
                first = max(start, 0) // walked
                total += max(launch.ceil_div(max(min(end, n), 0), walked) - first, 0) * kept * walked * products
    return total
