"""Masks as values: copied, pickled, made inside compiled functions, and what is taken for one and is none."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

from flashtile import flash_attention, mask
from flashtile.mask import Mask, causal, document, prefix, window


def untyped(value: Any) -> Any:
    """Return the value to a type checker that knows better."""
    return value


@pytest.mark.parametrize(
    "value", [causal(), document(torch.tensor([0, 0, 1])) & causal(), prefix([2, 3]) | window(2, 0)]
)
def test_a_mask_that_kernels_have_seen_can_be_copied_and_pickled(value) -> None:
    pytest.importorskip("triton")
    value.on_device()
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (other.name, other.predicate) == (value.name, value.predicate)
        assert all(map(torch.equal, other.tensors(), value.tensors()))
        assert other.on_device().predicate is value.on_device().predicate


@pytest.mark.parametrize(
    "make",
    [
        lambda n: (document, torch.arange(n) // 7),
        lambda n: (lambda ids: document(ids) & causal(), (torch.arange(n) // 7).expand(2, n).contiguous()),
        lambda n: (mask.dense, torch.ones(n, n) > 0),
        lambda n: (lambda visible: visible, torch.ones(n, n) > 0),
        lambda n: (lambda blocks: mask.block_sparse(blocks, 8, 8), torch.ones(-(-n // 8), -(-n // 8)) > 0),
        lambda n: (prefix, torch.tensor([n // 2, n // 3])),
    ],
    ids=["document", "document-and", "dense", "tensor", "blocks", "prefix"],
)
def test_masks_made_inside_of_compiled_functions_at_any_length(make) -> None:
    torch._dynamo.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, q, q, mask=make(1)[0](table))

    for n in (40, 33, 50):
        q = torch.randn(2, 2, n, 16)
        of, table = make(n)
        torch.testing.assert_close(attend(q, table), flash_attention(q, q, q, mask=of(table)))


def shifted(where, q_idx, k_idx, args):
    return k_idx <= q_idx + args[0]


def by_torch(where, q_idx, k_idx, args):
    return torch.logical_and(q_idx >= k_idx, k_idx > 2)


def test_a_mask_of_a_function_made_inside_of_a_compiled_one() -> None:
    torch._dynamo.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, q, q, mask=Mask.of(shifted, (3,)), softmax_scale=q.shape[2] ** -0.5)

    for n in (20, 25):
        q = torch.randn(2, 2, n, 16)
        want = flash_attention(q, q, q, mask=Mask.of(shifted, (3,)), softmax_scale=n**-0.5)
        torch.testing.assert_close(attend(q), want)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: causal() and window(2, 0), r"mask causal\(\) has no truth value: masks combine with &, \| and ~"),
        (lambda: not causal(), "has no truth value"),
        (
            lambda: causal() & untyped(torch.ones(2, 2)),
            r"combines with masks, .*mask.dense\(tensor\)",
        ),
        (lambda: untyped(torch.ones(2, 2)) | causal(), r"flashtile.mask.dense\(tensor\) makes a mask"),
        (lambda: Mask.of(by_torch), "predicate by_torch uses torch of torch, which kernels do not have"),
        (
            lambda: flash_attention(*[torch.ones(1, 1, 3, 4)] * 3, mask=untyped(causal)),
            r"as in mask=causal\(\)",
        ),
    ],
    ids=["and", "not", "tensor", "tensor-first", "torch", "uncalled"],
)
def test_what_is_no_mask_says_so(make, words) -> None:
    with pytest.raises(TypeError, match=words):
        make()
