"""Bad input: the error's type, and that its text names the argument, the value met and the value wanted."""

import math
import re

import pytest
import torch

from flashtile import FlashAttention, FlashAttentionMock, flash_attention, ops
from flashtile.kernel import check

GOOD = (2, 4, 8, 16)


def qkv(q=GOOD, k=GOOD, v=GOOD, dtypes=(torch.float32,) * 3, devices=("cpu",) * 3):
    return [torch.empty(s, dtype=t, device=d) for s, t, d in zip((q, k, v), dtypes, devices, strict=True)]


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BAD = {  # name: (q, k, v; error; what its text holds)
    "list": (([[1.0]], *qkv()[1:]), TypeError, ("q is a list", "torch.Tensor")),
    "none": ((*qkv()[:2], None), TypeError, ("v is a NoneType", "torch.Tensor")),
    "sparse": ((torch.empty(2, 4, 8).to_sparse(), *qkv()[1:]), TypeError, ("q has layout torch.sparse_coo", "dense")),
    "nested": (
        (torch.nested.nested_tensor([torch.ones(4, 8, 16)] * 2), *qkv()[1:]),
        TypeError,
        ("q is a nested tensor", "varlen"),
    ),
    "q-2d": (qkv(q=(8, 16)), ValueError, ("q has shape (8, 16)", "at least 3 dimensions")),
    "v-1d": (qkv(v=(16,)), ValueError, ("v has shape (16,)", "at least 3 dimensions")),
    "ranks": (qkv(q=(4, 8, 16)), ValueError, ("3, 4, 4 dimensions", "same number", "k (2, 4, 8, 16)")),
    "batch": (qkv(k=(3, 4, 8, 16)), ValueError, ("leading (batch) dimensions (2,), (3,), (2,)", "the same")),
    "batch-5d": (qkv((2, 2, *GOOD[1:]), (4, 1, *GOOD[1:]), (2, 2, *GOOD[1:])), ValueError, ("(2, 2), (4, 1), (2, 2)",)),
    "heads-kv": (qkv(v=(2, 2, 8, 16)), ValueError, ("k has 4 heads and v has 2", "heads_kv")),
    "group": (qkv(q=(2, 6, 8, 16)), ValueError, ("q has 6 heads", "multiple of the 4 heads of k and v")),
    "fewer-q-heads": (qkv(q=(2, 2, 8, 16)), ValueError, ("q has 2 heads", "multiple of the 4")),
    "no-kv-heads": (qkv(k=(2, 0, 8, 16), v=(2, 0, 8, 16)), ValueError, ("q has 4 heads", "multiple of the 0")),
    "keys": (qkv(v=(2, 4, 9, 16)), ValueError, ("k has 8 keys and v has 9", "seqlen_k")),
    "head-dim": (qkv(k=(2, 4, 8, 15)), ValueError, ("q has head_dim 16 and k has 15", "same")),
    "head-dim-0": (qkv(q=(2, 4, 8, 0), k=(2, 4, 8, 0)), ValueError, ("head_dim 0", "1 to 576")),
    "head-dim-577": (qkv(q=(2, 4, 8, 577), k=(2, 4, 8, 577)), ValueError, ("head_dim 577", "1 to 576")),
    "head-dim-v-0": (qkv(v=(2, 4, 8, 0)), ValueError, ("head_dim_v 0", "1 to 512")),
    "head-dim-v-600": (qkv(v=(2, 4, 8, 600)), ValueError, ("head_dim_v 600", "1 to 512")),
    "mixed-dtypes": (qkv(dtypes=(F32, BF16, F16)), TypeError, ("float32", "bfloat16", "float16", "same", "autocast")),
    "integers": (qkv(dtypes=(torch.int64,) * 3), TypeError, ("torch.int64", "float16, bfloat16, float32 or float64")),
    "bool": (qkv(dtypes=(torch.bool,) * 3), TypeError, ("torch.bool",)),
    "complex": (qkv(dtypes=(torch.complex64,) * 3), TypeError, ("torch.complex64",)),
    "float8": (qkv(dtypes=(torch.float8_e4m3fn,) * 3), TypeError, ("torch.float8_e4m3fn",)),
    "devices": (qkv(devices=("cpu", "meta", "cpu")), ValueError, ("cpu, meta, cpu", "one device")),
}


@pytest.mark.parametrize(("tensors", "error", "texts"), BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "call",
    [flash_attention, FlashAttention.apply, FlashAttentionMock.apply],
    ids=["flash_attention", "FlashAttention", "FlashAttentionMock"],
)
def test_bad_tensors(call, tensors, error, texts):
    with pytest.raises(error) as met:
        call(*tensors)
    for text in texts:
        assert text in str(met.value)


def test_options_of_the_reference():
    q = torch.ones(2, 4, 8)
    with pytest.raises(TypeError, match="is_causal is 'no', but wants True or False"):
        FlashAttentionMock.apply(q, q, q, "no")
    with pytest.raises(TypeError, match="naive is 1, but wants True or False"):
        FlashAttentionMock.apply(q, q, q, False, 1)
    with pytest.raises(ValueError, match=r"leading \(batch\) dimensions \(2,\), \(1,\), \(1,\)"):
        FlashAttentionMock.apply(torch.ones(2, 4, 16, 8), *(torch.ones(1, 4, 16, 8),) * 2)


@pytest.mark.parametrize("name", ["group", "keys", "head-dim-577", "integers", "mixed-dtypes"])
def test_operator_checks_too(name):
    tensors, error, texts = BAD[name]
    with pytest.raises(error, match=re.escape(texts[0])):
        ops.forward(*tensors, 1.0, False)


def test_operator_wants_four_dimensions():
    with pytest.raises(ValueError, match="3 dimensions, but the operator wants 4"):
        ops.forward(*qkv(*[(4, 8, 16)] * 3), 1.0, False)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale_is_finite(scale):
    with pytest.raises(ValueError, match=f"softmax_scale is {scale}, but wants a finite number"):
        flash_attention(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["0.5", True, torch.tensor(0.5)], ids=str)
def test_scale_is_a_number(scale):
    with pytest.raises(TypeError, match=r"softmax_scale is .*, but wants a float"):
        flash_attention(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("is_causal", [None, 1, torch.ones(8, 8)], ids=["None", "1", "mask"])
def test_is_causal_is_a_bool(is_causal):
    with pytest.raises(TypeError, match=r"is_causal is .*, but wants True or False"):
        flash_attention(*qkv(), is_causal=is_causal)


@pytest.mark.parametrize("scale", [None, 0, 2, 0.125, -1.0])
def test_good_options_pass(scale):
    check.options(True, scale)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (GOOD, GOOD, GOOD),
        ((4, 8, 16), (4, 9, 16), (4, 9, 3)),
        ((2, 6, 8, 16), (2, 3, 9, 16), (2, 3, 9, 256)),
        ((0, 4, 8, 16), (0, 4, 8, 16), (0, 4, 8, 16)),
        ((2, 0, 8, 16), (2, 0, 8, 16), (2, 0, 8, 16)),
        ((2, 4, 0, 1), (2, 4, 0, 1), (2, 4, 0, 1)),
        ((5, 1, 2, 4, 8, 16), (5, 1, 2, 2, 8, 16), (5, 1, 2, 2, 8, 16)),
    ],
    ids=str,
)
def test_good_shapes_pass(q, k, v):
    check.attention_inputs(*qkv(q, k, v))  # pyright: ignore[reportArgumentType]
