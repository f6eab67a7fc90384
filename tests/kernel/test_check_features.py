"""Bad masks, scores, sinks, dropout and lengths: the error's type, and that its text says what is met and wanted."""

import math
from typing import Any

import pytest
import torch

import flashtile
from flashtile import flash_attention, flash_attention_varlen, mask, score

Q = torch.randn(2, 4, 8, 16)
K = torch.randn(2, 2, 9, 16)
META = torch.device("meta")


def undeclared(where, q_idx, k_idx, s, args):
    return s + args[0]


def slope(where, q_idx, k_idx, s, args):
    return 1.0


BAD: dict[str, tuple[Any, Any, tuple[str, ...]]] = {  # name: (options; error; what its text holds)
    "mask-float": ({"mask": torch.zeros(8, 9)}, TypeError, ("mask is a tensor of torch.float32", "bool", "score.bias")),
    "mask-int": ({"mask": torch.zeros(8, 9).int()}, TypeError, ("torch.int32", "torch.bool")),
    "mask-other": ({"mask": "causal"}, TypeError, ("mask is 'causal'", "flashtile.mask", "torch.bool tensor")),
    "mask-shape": ({"mask": torch.ones(8, 8, dtype=torch.bool)}, ValueError, ("seqlen_k 8", "have seqlen_k 9")),
    "mask-batch": ({"mask": mask.key_padding([1, 2, 3])}, ValueError, ("key_padding", "batch 3", "have batch 2")),
    "mask-nested": (
        {"mask": mask.key_padding([1, 2, 3]) & mask.causal(), "is_causal": True},
        ValueError,
        ("batch 3", "have batch 2"),
    ),
    "mask-device": (
        {"mask": mask.key_padding([1, 2]).to(META)},
        ValueError,
        ("key_padding", "tensor on meta", "wants cpu"),
    ),
    "score-tensor": (
        {"score": torch.zeros(8, 9)},
        TypeError,
        ("score is a tensor of shape (8, 9)", "score.bias(tensor)"),
    ),
    "score-float": ({"score": 50.0}, TypeError, ("score is 50.0", "flashtile.score")),
    "score-size": ({"score": score.bias(torch.zeros(8, 8))}, ValueError, ("bias", "size 8", "1 or 9")),
    "score-heads": ({"score": score.alibi(torch.zeros(3))}, ValueError, ("alibi", "size 3", "1 or 4")),
    "score-device": ({"score": score.alibi(torch.zeros(4, device="meta"))}, ValueError, ("alibi", "on meta", "cpu")),
    "score-gradient": (
        {"score": score.Score.of(undeclared, slope, (torch.ones(1, requires_grad=True),))},
        NotImplementedError,
        ("undeclared", "requires a gradient", "declares none"),
    ),
    "sinks-kind": ({"sinks": [0.0] * 4}, TypeError, ("sinks is [0.0, 0.0, 0.0, 0.0]", "tensor of shape (heads_q,)")),
    "sinks-heads": ({"sinks": torch.zeros(2)}, ValueError, ("sinks has shape (2,)", "(4,)")),
    "sinks-rank": ({"sinks": torch.zeros(1, 4)}, ValueError, ("sinks has shape (1, 4)", "(4,)")),
    "sinks-dtype": ({"sinks": torch.zeros(4).int()}, TypeError, ("sinks has dtype torch.int32", "floating-point")),
    "sinks-device": ({"sinks": torch.zeros(4, device="meta")}, ValueError, ("sinks is on meta", "cpu like q")),
    "dropout-1": ({"dropout_p": 1.0}, ValueError, ("dropout_p is 1.0", "0 <= dropout_p < 1")),
    "dropout-negative": ({"dropout_p": -0.1}, ValueError, ("dropout_p is -0.1", "0 <= dropout_p < 1")),
    "dropout-nan": ({"dropout_p": math.nan}, ValueError, ("dropout_p is nan",)),
    "dropout-kind": ({"dropout_p": "0.1"}, TypeError, ("dropout_p is '0.1'", "float")),
    "dropout-bool": ({"dropout_p": True}, TypeError, ("dropout_p is True", "float")),
    "generator": ({"dropout_p": 0.5, "generator": 3}, TypeError, ("generator is 3", "torch.Generator")),
    "deterministic": ({"deterministic": 1}, TypeError, ("deterministic is 1", "True or False")),
    "twice": ({"differentiable_twice": None}, TypeError, ("differentiable_twice is None", "True or False")),
    "max-logits": ({"return_max_logits": "yes"}, TypeError, ("return_max_logits is 'yes'", "True or False")),
    "twice-backend": ({"differentiable_twice": True, "backend": "cpu"}, ValueError, ("backend is 'cpu'", "None")),
    "is-causal": ({"mask": mask.causal(), "is_causal": 1}, TypeError, ("is_causal is 1", "True or False")),
    "scale": ({"sinks": torch.zeros(4), "softmax_scale": math.inf}, ValueError, ("softmax_scale is inf", "finite")),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_bad_options(name, packed):
    options, error, texts = BAD[name]
    if packed and name in ("mask-shape", "score-size"):
        pytest.skip("lengths lie on the device")

    def call():
        if not packed:
            return flash_attention(Q, K, K, **options)
        q, k = Q.transpose(1, 2).flatten(0, 1), K.transpose(1, 2).flatten(0, 1)
        return flash_attention_varlen(q, k, k, cu(0, 8, 16), cu(0, 9, 18), **options)

    with pytest.raises(error) as met:
        call()
    for text in texts:
        assert text in str(met.value)


def test_mask_and_score_tensors_that_fit_pass():
    flash_attention(
        Q, K, K, mask=torch.ones(2, 1, 8, 9, dtype=torch.bool), score=score.bias(torch.zeros(9)), backend="cpu"
    )


# ---------------------------------------------------------------------------------------------------- packed sequences

T = torch.randn(10, 2, 16)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)


def cu(*entries):
    return torch.tensor(entries, dtype=torch.int32)


BAD_LENGTHS: dict[str, tuple[tuple, dict[str, Any], Any, tuple[str, ...]]] = {
    "q-4d": ((T[None], T, T, CU, CU), {}, ValueError, ("q has shape (1, 10, 2, 16)", "(total_q, heads_q, head_dim)")),
    "k-list": ((T, [1.0], T, CU, CU), {}, TypeError, ("k is [1.0]", "torch.Tensor")),
    "v-rows": ((T, T, T[:9], CU, CU), {}, ValueError, ("k has 10 rows and v has 9", "total_k")),
    "heads": ((T, T[:, :0], T[:, :0], CU, CU), {}, ValueError, ("q has 2 heads", "multiple of the 0")),
    "cu-list": ((T, T, T, [0, 4, 10], CU), {}, TypeError, ("cu_seqlens_q is [0, 4, 10]", "int32 tensor")),
    "cu-int64": ((T, T, T, CU, CU.long()), {}, TypeError, ("cu_seqlens_k has dtype torch.int64", "torch.int32")),
    "cu-2d": ((T, T, T, CU[None], CU), {}, ValueError, ("cu_seqlens_q has shape (1, 3)", "one dimension")),
    "cu-empty": ((T, T, T, CU[:0], CU[:0]), {}, ValueError, ("cu_seqlens_q has shape (0,)", "(batch + 1,)")),
    "cu-differ": (
        (T, T, T, CU, CU[:2]),
        {},
        ValueError,
        ("cu_seqlens_q has 3 entries and cu_seqlens_k 2", "batch + 1"),
    ),
    "cu-device": ((T, T, T, CU.to(META), CU), {}, ValueError, ("cu_seqlens_q is on meta", "cpu like q")),
    "used-size": ((T, T, T, CU, CU), {"seqused_q": CU}, ValueError, ("seqused_q has shape (3,)", "(batch,) = (2,)")),
    "used-dtype": ((T, T, T, CU, CU), {"seqused_k": torch.zeros(2)}, TypeError, ("seqused_k has dtype torch.float32",)),
    "max-kind": ((T, T, T, CU, CU), {"max_seqlen_q": 4.0}, TypeError, ("max_seqlen_q is 4.0", "int or None")),
    "max-negative": ((T, T, T, CU, CU), {"max_seqlen_k": -1}, ValueError, ("max_seqlen_k is -1", "0 or more")),
}
BAD_CONTENTS: dict[str, tuple[tuple, dict[str, Any], tuple[str, ...]]] = {
    "start": ((cu(1, 4, 10), CU), {}, ("cu_seqlens_q starts with 1", "wants 0")),
    "falls": ((CU, cu(0, 7, 6)), {}, ("cu_seqlens_k falls from 7 to 6", "rising")),
    "end": ((cu(0, 4, 11), CU), {}, ("cu_seqlens_q ends with 11", "at most the 10 rows of q")),
    "used": ((CU, CU), {"seqused_k": cu(4, 7)}, ("seqused_k[1] is 7", "0 to 6")),
    "used-negative": ((CU, CU), {"seqused_q": cu(-1, 3)}, ("seqused_q[0] is -1", "0 to 4")),
    "max": ((CU, CU), {"max_seqlen_k": 5}, ("max_seqlen_k is 5", "a sequence has 6 rows")),
}


@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_bad_lengths(name):
    arguments, options, error, texts = BAD_LENGTHS[name]
    with pytest.raises(error) as met:
        flash_attention_varlen(*arguments, **options)
    for text in texts:
        assert text in str(met.value)


def test_a_mask_tensor_is_named_as_it_was_given():
    q = torch.empty(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 1, 1, 1, 4, 4\), but wants 1 to 4 dimensions"):
        flashtile.flash_attention(q, q, q, mask=torch.ones(1, 1, 1, 1, 4, 4).bool())


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_contents_of_lengths_are_checked_when_asked(name):
    lengths, options, texts = BAD_CONTENTS[name]
    with pytest.raises(ValueError) as met, flashtile.checked():  # noqa: PT011
        flash_attention_varlen(T, T, T, *lengths, **options)
    for text in texts:
        assert text in str(met.value)


@pytest.mark.parametrize("name", sorted(set(BAD_CONTENTS) - {"max"}))
def test_contents_on_the_cpu_are_checked_anyway(name):
    lengths, options, texts = BAD_CONTENTS[name]
    with pytest.raises(ValueError) as met:  # noqa: PT011
        flash_attention_varlen(T, T, T, *lengths, **options)
    for text in texts:
        assert text in str(met.value)


TOO_SHORT: dict[str, tuple[dict[str, Any], str]] = {  # of sequences of up to 6 rows
    "dense": (
        {"mask": torch.ones(3, 3).bool()},
        r"mask dense\(visible of 3 x 3\) is made for 3 queries, but a sequence",
    ),
    "keys": ({"mask": mask.causal() & mask.dense(torch.ones(1, 5).bool())}, "is made for 5 keys, but a sequence has 6"),
    "blocks": ({"mask": mask.block_sparse(torch.ones(2, 1).bool(), 2, 2)}, "is made for 4 queries"),
    "bias": ({"score": score.bias(torch.zeros(6, 3))}, "score bias is made for 3 keys, but a sequence has 6"),
}


@pytest.mark.parametrize("name", TOO_SHORT)
def test_sequences_longer_than_a_table_are_refused(name):
    options, words = TOO_SHORT[name]
    with pytest.raises(ValueError, match=words), flashtile.checked():
        flash_attention_varlen(T, T, T, CU, CU, **options)


def test_a_table_may_be_longer_than_sequences():
    flash_attention_varlen(T, T, T, CU, CU, backend="cpu", mask=torch.ones(9, 9).bool(),
                           score=score.bias(torch.zeros(7, 1)))  # fmt: skip
    flash_attention_varlen(T, T, T, CU, CU, backend="cpu", mask=torch.ones(4, 4).bool(), seqused_q=cu(4, 4),
                           seqused_k=cu(4, 4))  # fmt: skip


def test_checked_lets_good_lengths_pass_and_ends():
    with flashtile.checked():
        flash_attention_varlen(T, T, T, CU, CU, seqused_q=cu(4, 0), seqused_k=cu(2, 6), max_seqlen_q=4, max_seqlen_k=6,
                               backend="cpu")  # fmt: skip
    flash_attention_varlen(T, T, T, CU, CU, max_seqlen_q=1, backend="cpu")
