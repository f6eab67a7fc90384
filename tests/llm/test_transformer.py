"""Modules against their formulas, the three attention settings against each other, causality, caches, names."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from flashtile.llm import (
    Embedding,
    KVCache,
    Linear,
    ModelConfig,
    MultiHeadAttention,
    MultiHeadAttentionWithRoPE,
    RMSNorm,
    ScaledDotProductAttention,
    SwiGLU,
    TransformerBlock,
    TransformerLM,
    cross_entropy,
    scaled_dot_product_attention,
)
from flashtile.llm.config import PRESETS, default_d_ff
from flashtile.llm.transformer import attend, causal_mask
from tests.llm.conftest import TINY

SETTINGS = ["flash", "naive", "sdpa"]


def dense(q, k, v, is_causal):
    """Attention in fp64, one query at a time."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    rows = []
    for i in range(q.shape[-2]):
        seen = k.shape[-2] if not is_causal else max(0, i + 1 + k.shape[-2] - q.shape[-2])
        p = torch.softmax((k[..., :seen, :] @ q[..., i, :, None]).mT / q.shape[-1] ** 0.5, -1)
        rows.append(p @ v[..., :seen, :])
    return torch.cat(rows, -2)


def test_linear_and_embedding():
    linear, embedding = Linear(3, 5), Embedding(7, 4)
    assert linear.weight.shape == (5, 3)
    assert list(linear.state_dict()) == list(embedding.state_dict()) == ["weight"]
    x = torch.randn(2, 6, 3)
    torch.testing.assert_close(linear(x), torch.einsum("oi,bsi->bso", linear.weight, x))
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.equal(embedding(ids), embedding.weight[ids])
    assert Linear(2, 2, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_rmsnorm_has_eps_inside_the_root_and_computes_in_fp32():
    norm = RMSNorm(8)
    torch.nn.init.normal_(norm.weight)
    x = 1e-3 * torch.randn(3, 8)  # so small that eps matters
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    torch.testing.assert_close(norm(x), expected)
    large = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square overflows fp16
    assert norm(large).dtype == torch.float16
    torch.testing.assert_close(norm(large), norm.weight[None].half(), atol=2e-3, rtol=2e-3)


def test_swiglu():
    ffn = SwiGLU(8, 24)
    assert {n: tuple(p.shape) for n, p in ffn.named_parameters()} == {
        "w1.weight": (24, 8), "w2.weight": (8, 24), "w3.weight": (24, 8),
    }  # fmt: skip
    x = torch.randn(3, 8)
    expected = (F.silu(x @ ffn.w1.weight.T) * (x @ ffn.w3.weight.T)) @ ffn.w2.weight.T
    torch.testing.assert_close(ffn(x), expected)
    assert SwiGLU(768).w1.weight.shape == (default_d_ff(768), 768) == (2048, 768)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_scaled_dot_product_attention_with_a_mask(lead):
    q, k, v = (torch.randn(*lead, n, d) for n, d in ((5, 8), (7, 8), (7, 6)))
    mask = torch.rand(5, 7) < 0.5
    mask[:, 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)
    torch.testing.assert_close(ScaledDotProductAttention()(q, k, v, mask), expected)


def test_a_query_that_may_attend_to_nothing_gives_zero():
    q, k, v = (torch.randn(4, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    o = scaled_dot_product_attention(q, k, v, mask)
    assert o[2].eq(0).all()
    for grad in torch.autograd.grad(o.square().sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_a_mask_that_is_not_boolean_is_refused():
    x = torch.zeros(2, 4)
    with pytest.raises(TypeError, match=r"mask must be boolean \(True = attend\), got torch.float32"):
        scaled_dot_product_attention(x, x, x, torch.zeros(2, 2))


@pytest.mark.parametrize("attention", SETTINGS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (1, 9), (4, 9), (9, 4)])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (4, 2), (3, 1)])
def test_every_setting_gives_the_same_attention_and_gradients(
    attention, is_causal, seqlen_q, seqlen_k, heads, heads_kv
):
    q = torch.randn(2, heads, seqlen_q, 8, requires_grad=True)
    k, v = (torch.randn(2, heads_kv, seqlen_k, 8, requires_grad=True) for _ in range(2))
    o, expected = attend(q, k, v, is_causal=is_causal, attention=attention), dense(q, k, v, is_causal)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    do = torch.randn_like(o)
    ours = torch.autograd.grad(o, (q, k, v), do)
    theirs = torch.autograd.grad(expected, (q, k, v), do.double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_attend_refuses_an_unknown_setting():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(
        ValueError, match="attention must be one of 'flash', 'flash_triton', 'naive', 'sdpa', got 'fast'"
    ):
        attend(x, x, x, is_causal=True, attention="fast")  # pyright: ignore[reportArgumentType]


def test_causal_mask_is_aligned_bottom_right():
    assert causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("attention", SETTINGS)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_multi_head_attention_is_that_of_its_heads(attention, lead):
    module = MultiHeadAttention(16, 4, num_heads_kv=2, attention=attention)
    x = torch.randn(*lead, 6, 16)
    heads = []
    for h in range(4):
        rows, rows_kv = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
        q = x @ module.q_proj.weight[rows].T
        k, v = (x @ w.weight[rows_kv].T for w in (module.k_proj, module.v_proj))
        heads.append(dense(q[..., None, :, :], k[..., None, :, :], v[..., None, :, :], True).squeeze(-3).float())
    expected = torch.cat(heads, -1) @ module.output_proj.weight.T
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


def test_multi_head_attention_with_rope_rotates_queries_and_keys():
    module = MultiHeadAttentionWithRoPE(16, 4, max_seq_len=20, theta=100.0, attention="naive")
    plain = MultiHeadAttention(16, 4, attention="naive")
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 6, 16)
    assert not torch.allclose(module(x), plain(x), atol=1e-3)
    # Attention depends on the distance between positions only.
    torch.testing.assert_close(module(x, torch.arange(14, 20)), module(x), atol=1e-5, rtol=1e-5)
    # The first token attends to itself alone, wherever it stands.
    torch.testing.assert_close(module(x)[:, 0], plain(x)[:, 0])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_causality_is_an_option(is_causal):
    module = MultiHeadAttentionWithRoPE(16, 4, 20, is_causal=is_causal)
    x = torch.randn(1, 6, 16)
    changed = x.clone()
    changed[:, -1] += 1
    first = (module(x) - module(changed))[:, :-1].abs().max()
    assert (first < 1e-6) == is_causal


def test_block_is_pre_norm():
    block = TransformerBlock(16, 4, 32, 20, 10_000.0)
    x = torch.randn(2, 6, 16)
    middle = x + block.attn(block.ln1(x))
    assert torch.equal(block(x), middle + block.ffn(block.ln2(middle)))


def test_names_and_shapes_of_the_weights():
    model = TransformerLM(vocab_size=50, context_length=12, d_model=16, num_layers=2, num_heads=4, d_ff=24)
    block = {"ln1": (16,), "ln2": (16,), "ffn.w1": (24, 16), "ffn.w2": (16, 24), "ffn.w3": (24, 16)}
    block |= {f"attn.{name}_proj": (16, 16) for name in ("q", "k", "v", "output")}
    names = {f"layers.{n}.{name}.weight": shape for n in range(2) for name, shape in block.items()}
    names |= {"token_embeddings.weight": (50, 16), "ln_final.weight": (16,), "lm_head.weight": (50, 16)}
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == names
    assert model.layers[0].attn.attention == "flash"  # pyright: ignore


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_settings_train_the_same_model(attention):
    torch.manual_seed(0)
    flash = TransformerLM.from_config(TINY)
    other = TransformerLM.from_config(replace(TINY, attention=attention))
    other.load_state_dict(flash.state_dict())
    ids = torch.randint(300, (3, 17))
    for model in (flash, other):
        cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
    for (name, a), b in zip(flash.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("attention", SETTINGS)
def test_a_training_step_is_one_graph(attention):
    torch._dynamo.reset()
    model = TransformerLM.from_config(replace(TINY, attention=attention))
    ids = torch.randint(300, (2, 17))
    cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
    eager = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.compile(backend="aot_eager", fullgraph=True)
    cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
    for a, b in zip(eager, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-6, rtol=1e-4)


def test_language_model_is_causal_and_takes_one_sequence_or_many():
    model = TransformerLM.from_config(TINY)
    ids = torch.randint(300, (3, 16))
    logits = model(ids)
    assert logits.shape == (3, 16, 300)
    torch.testing.assert_close(model(ids[1]), logits[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(ids[:, :7]), logits[:, :7], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", SETTINGS)
@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 7, 3]], ids=str)
def test_reading_through_a_cache_is_reading_at_once(attention, pieces):
    model = TransformerLM.from_config(replace(TINY, attention=attention)).eval()
    ids = torch.randint(300, (2, 16))
    cache = KVCache(model.config, 2, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache) for part in ids.split(pieces, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(ids), atol=1e-5, rtol=1e-5)
    assert cache.length == 16
    with pytest.raises(ValueError, match="token_ids must fit the context: 17 tokens, but context_length=16"):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="the cache holds 16 tokens, cannot grow to 17"):
        cache.layers[0].append(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8))
    cache.clear()
    assert cache.length == 0


def test_activation_checkpointing_changes_no_bit():
    ids = torch.randint(300, (2, 17))
    losses, gradients = [], []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = TransformerLM.from_config(TINY).train()
        model.activation_checkpointing = recompute
        loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_tied_embeddings_are_one_matrix():
    model = TransformerLM.from_config(replace(TINY, tie_embeddings=True))
    assert model.lm_head.weight is model.token_embeddings.weight
    untied = TransformerLM.from_config(TINY)
    assert untied.num_parameters() - model.num_parameters() == 300 * 32


def test_the_gpt2_preset_has_124_million_parameters():
    config, _ = PRESETS["gpt2-124m"]
    model = TransformerLM.from_config(config, device="meta")
    assert round(model.num_parameters() / 1e6) == 124


def test_casting_the_model_leaves_the_rotary_tables_alone():
    model = TransformerLM.from_config(TINY).bfloat16()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert all(b.dtype == torch.float32 for b in model.buffers())
    assert model(torch.randint(300, (1, 5))).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_heads is 5, but wants a divisor of d_model, which is 32"),
        ({"num_heads_kv": 3}, "num_heads_kv is 3, but wants a divisor of num_heads, which is 4"),
        (
            {"d_model": 36, "num_heads_kv": 4},
            "d_model / num_heads is 36 / 4 = 9, but rotary embeddings want an even head",
        ),
        ({"attention": "fast"}, "attention must be one of 'flash', 'flash_triton', 'naive', 'sdpa', got 'fast'"),
        ({"vocab_size": 0}, "vocab_size is 0, but wants 1 or more"),
        ({"d_ff": -1}, "d_ff is -1, but wants 1 or more"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerLM(**TINY.to_dict() | change)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**TINY.to_dict() | change)
