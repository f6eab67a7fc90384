"""A decoder-only transformer: rotary positions, RMSNorm before each sublayer, SwiGLU, no biases.

The seam is `attend`: modules project and rotate, then hand `(..., heads, seq, head_dim)` to whoever the `attention`
setting names. The parameters of TransformerLM, each with `.weight` behind it:

    token_embeddings, ln_final, lm_head
    layers.N.{ln1, attn.{q_proj, k_proj, v_proj, output_proj}, ln2, ffn.{w1, w2, w3}}
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flashtile.attention import flash_attention
from flashtile.llm.config import Attention, ModelConfig, check_attention, check_heads, default_d_ff
from flashtile.llm.functional import silu, softmax
from flashtile.llm.kv_cache import KVCache, LayerCache
from flashtile.llm.rope import RotaryPositionalEmbedding

Device = torch.device | str | None


class Linear(nn.Module):
    """`y = W x` with W of shape `(out_features, in_features)` and no bias."""

    def __init__(
        self, in_features: int, out_features: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        # Glorot's variance: activations and gradients both keep their scale.
        std = math.sqrt(2 / (in_features + out_features))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """A row of the weight `(num_embeddings, embedding_dim)` per token id."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3.0, b=3.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map integers `(...)` to `(..., embedding_dim)`."""
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """`y = weight * x / sqrt(mean(x^2) + eps)`, computed in fp32 and returned in x's dtype.

    Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """

    def __init__(
        self, d_model: int, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `(..., d_model)`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """`y = w2(silu(w1 x) * w3 x)`. Source: Shazeer, https://arxiv.org/abs/2002.05202."""

    def __init__(
        self, d_model: int, d_ff: int | None = None, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        d_ff = default_d_ff(d_model) if d_ff is None else d_ff
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., d_model)` to `(..., d_model)`."""
        return self.w2(silu(self.w1(x)) * self.w3(x))


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `softmax(q k^T / sqrt(d_k)) v`, dense and readable: the whole score matrix is made.

    Args:
        q: `(..., seqlen_q, d_k)`.
        k: `(..., seqlen_k, d_k)`.
        v: `(..., seqlen_k, d_v)`.
        mask: bool, broadcastable to `(..., seqlen_q, seqlen_k)`; True = attend. A query that may attend to no key
            gives 0.

    Raises:
        TypeError: if the mask is not boolean.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be boolean (True = attend), got {mask.dtype}")
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores, dim=-1) @ v


def causal_mask(seqlen_q: int, seqlen_k: int, device: Device = None) -> Tensor:
    """Return bool `(seqlen_q, seqlen_k)`: the last query sees every key, each earlier one a key less."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(seqlen_k - seqlen_q)


class ScaledDotProductAttention(nn.Module):
    """The dense `scaled_dot_product_attention` as a module, with grouped key/value heads and a causal option."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from `(..., heads, seqlen_q, d)` over `(..., heads_kv, seqlen_k, d)`; `mask` and causality both hold.

        Query head h reads key/value head `h // (heads / heads_kv)`.
        """
        if q.ndim > 2 and k.shape[-3] != q.shape[-3]:
            group = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
        if self.is_causal:
            causal = causal_mask(q.shape[-2], k.shape[-2], q.device)
            mask = causal if mask is None else mask & causal
        return scaled_dot_product_attention(q, k, v, mask)


_DENSE = {is_causal: ScaledDotProductAttention(is_causal) for is_causal in (False, True)}


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, attention: Attention = "flash") -> Tensor:
    """Compute attention by the implementation that `attention` names; all give the same answer.

    Args:
        q: `(..., heads, seqlen_q, head_dim)`.
        k: `(..., heads_kv, seqlen_k, head_dim)`, `v` likewise.
        is_causal: query i sees keys `j <= i + seqlen_k - seqlen_q`, so new queries see all cached keys.
        attention: "flash", "flash_triton", "naive" or "sdpa".
    """
    if attention == "flash":
        return flash_attention(q, k, v, is_causal=is_causal)
    if attention == "flash_triton":
        return flash_attention(q, k, v, is_causal=is_causal, backend="triton")
    if attention == "naive":
        return _DENSE[is_causal](q, k, v)
    check_attention(attention)
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    # torch's is_causal aligns the first query with the first key, which is ours only for equal lengths.
    aligned = seqlen_q == seqlen_k
    mask = causal_mask(seqlen_q, seqlen_k, q.device) if is_causal and not aligned and seqlen_q > 1 else None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal and aligned, enable_gqa=q.shape[-3] != k.shape[-3]
    )


class MultiHeadAttention(nn.Module):
    """`output_proj(concat_h attend(q_h, k_h, v_h))` over `num_heads` slices of the projected input.

    With `num_heads_kv < num_heads` consecutive query heads share a key/value head (grouped-query attention,
    https://arxiv.org/abs/2305.13245).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_heads_kv: int | None = None,
        is_causal: bool = True,
        attention: Attention = "flash",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        check_heads(d_model, num_heads, self.num_heads_kv)
        check_attention(attention)
        self.head_dim = d_model // num_heads
        self.is_causal = is_causal
        self.attention: Attention = attention
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, self.num_heads_kv * self.head_dim, device, dtype)
        self.v_proj = Linear(d_model, self.num_heads_kv * self.head_dim, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)

    def forward(self, x: Tensor, token_positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Map `(..., seq, d_model)` to the same shape.

        Args:
            x: the tokens; with a cache, only the new ones.
            token_positions: `(seq)` or `(batch, seq)`; None means the order of the tokens.
            cache: keys and values of earlier tokens, extended by this call. x is then `(batch, seq, d_model)`.
        """
        start = 0 if cache is None else cache.length
        q, k, v = (self._split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.encode_positions(q, k, token_positions, start)
        if cache is not None:
            k, v = cache.append(k, v)
        o = attend(q, k, v, is_causal=self.is_causal, attention=self.attention)
        return self.output_proj(o.transpose(-3, -2).flatten(-2))

    def encode_positions(
        self, q: Tensor, k: Tensor, token_positions: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor]:
        """Return q and k with their positions worked in; here attention knows no positions."""
        return q, k

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)


class MultiHeadAttentionWithRoPE(MultiHeadAttention):
    """MultiHeadAttention whose queries and keys are rotated by their positions first."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_seq_len: int,
        theta: float = 10_000.0,
        *,
        num_heads_kv: int | None = None,
        is_causal: bool = True,
        attention: Attention = "flash",
        rope: RotaryPositionalEmbedding | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`rope`, when given, is used instead of a new one: layers of one model share their tables."""
        super().__init__(
            d_model,
            num_heads,
            num_heads_kv=num_heads_kv,
            is_causal=is_causal,
            attention=attention,
            device=device,
            dtype=dtype,
        )
        self.rope = rope or RotaryPositionalEmbedding(theta, self.head_dim, max_seq_len, device)

    def encode_positions(
        self, q: Tensor, k: Tensor, token_positions: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor]:
        """Return q and k rotated."""
        return self.rope(q, token_positions, start=start), self.rope(k, token_positions, start=start)


class TransformerBlock(nn.Module):
    """`x = x + attn(ln1(x)); x = x + ffn(ln2(x))`."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None,
        max_seq_len: int,
        theta: float = 10_000.0,
        *,
        num_heads_kv: int | None = None,
        is_causal: bool = True,
        attention: Attention = "flash",
        rope: RotaryPositionalEmbedding | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(d_model, device=device, dtype=dtype)
        self.attn = MultiHeadAttentionWithRoPE(
            d_model,
            num_heads,
            max_seq_len,
            theta,
            num_heads_kv=num_heads_kv,
            is_causal=is_causal,
            attention=attention,
            rope=rope,
            device=device,
            dtype=dtype,
        )
        self.ln2 = RMSNorm(d_model, device=device, dtype=dtype)
        self.ffn = SwiGLU(d_model, d_ff, device, dtype)

    def forward(self, x: Tensor, token_positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Map `(..., seq, d_model)` to the same shape; the arguments are those of MultiHeadAttention."""
        x = x + self.attn(self.ln1(x), token_positions, cache)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """A causal language model: embed, `num_layers` blocks, normalise, project to vocabulary logits."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int | None = None,
        rope_theta: float = 10_000.0,
        *,
        num_heads_kv: int | None = None,
        tie_embeddings: bool = False,
        attention: Attention = "flash",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The arguments are ModelConfig's fields; see there. ValueError where they do not fit together."""
        super().__init__()
        self.config = config = ModelConfig(
            vocab_size=vocab_size,
            context_length=context_length,
            d_model=d_model,
            num_layers=num_layers,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            d_ff=d_ff,
            rope_theta=rope_theta,
            tie_embeddings=tie_embeddings,
            attention=attention,
        )
        self.activation_checkpointing = False
        rope = RotaryPositionalEmbedding(rope_theta, config.head_dim, context_length, device)
        self.token_embeddings = Embedding(vocab_size, d_model, device, dtype)
        self.layers = nn.ModuleList(
            TransformerBlock(
                d_model,
                num_heads,
                d_ff,
                context_length,
                rope_theta,
                num_heads_kv=num_heads_kv,
                attention=attention,
                rope=rope,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, device=device, dtype=dtype)
        self.lm_head = Linear(d_model, vocab_size, device, dtype)
        if tie_embeddings:
            # One matrix, two uses: logits need a small scale (GPT-2's), and at the input normalisation makes up for it.
            nn.init.trunc_normal_(self.lm_head.weight, std=0.02, a=-0.06, b=0.06)
            self.token_embeddings.weight = self.lm_head.weight

    @classmethod
    def from_config(cls, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None) -> TransformerLM:
        """Build the model that a config describes."""
        return cls(**config.to_dict(), device=device, dtype=dtype)

    def forward(self, token_ids: Tensor, token_positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Map token ids `(..., seq)` to next-token logits `(..., seq, vocab)`.

        Args:
            token_ids: integers below `vocab_size`; with a cache, only the new tokens.
            token_positions: `(seq)` or `(batch, seq)`; None means the order of the tokens.
            cache: what earlier calls have read, extended by this one. token_ids are then `(batch, seq)`.

        Raises:
            ValueError: if the sequence would be longer than `context_length`.
        """
        return self.lm_head(self.hidden(token_ids, token_positions, cache))

    def hidden(self, token_ids: Tensor, token_positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Return what lm_head reads, `(..., seq, d_model)`; the arguments are those of `forward`."""
        length = token_ids.shape[-1] + (0 if cache is None else cache.length)
        if length > self.config.context_length:
            raise ValueError(
                f"token_ids must fit the context: {length} tokens, but context_length={self.config.context_length}"
            )
        x = self.token_embeddings(token_ids)
        for index, layer in enumerate(self.layers):
            if self.activation_checkpointing and self.training and cache is None:
                x = checkpoint(layer, x, token_positions, use_reentrant=False)
            else:
                x = layer(x, token_positions, None if cache is None else cache.layers[index])
        return self.ln_final(x)

    def num_parameters(self) -> int:
        """Return the number of trained values, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())
