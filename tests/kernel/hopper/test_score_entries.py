"""Which scores' entries come in tiles: what the host says to the copy engine, without a GPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile import score
from flashtile.kernel.hopper import score_entries
from tests.kernel.hopper.biases import TILED, biases

SHAPE = 2, 4, 24, 40


@pytest.mark.parametrize("name", biases(*SHAPE, "cpu"))
def test_the_copy_engine_is_asked_for_what_it_can_read(name):
    tensor = biases(*SHAPE, "cpu")[name]()
    found = score_entries.tensor_of(score.bias(tensor), 0.1)
    assert (found is not None) == (name in TILED)


@pytest.mark.parametrize("name", TILED)
def test_descriptors_lead_to_every_entry(name):
    """By a batch entry and a head whatever it is shared by, by query and key."""
    tensor = biases(*SHAPE, "cpu")[name]()
    found = score_entries.tensor_of(score.bias(tensor), 0.1)
    assert found is not None
    described = score_entries.described(found, 64, 128, 3)
    assert described is not None
    assert described.shape[2:] == SHAPE[2:]
    assert all(stride * tensor.itemsize % 16 == 0 for stride in described.strides[:3])
    seen = found.as_strided(SHAPE, described.strides, found.storage_offset())
    assert torch.equal(seen, tensor.expand(SHAPE))


def test_chains_have_the_entries_of_one_score():
    first, after = (score.bias(torch.zeros(24, 40, dtype=torch.bfloat16)) for _ in range(2))
    cap, slopes = score.softcap(3.0), score.alibi(torch.ones(4))
    of = lambda rule, scale=0.1: score_entries.tensor_of(rule, scale)  # noqa: E731
    mine = first.tensors()[0]
    assert of(first) is of(first.then(cap)) is of(first.then(after)) is mine
    assert of(cap.then(first)) is of(slopes.then(first)) is of(cap.then(slopes).then(first)) is mine
    assert of(cap.then(first.then(cap))) is of(cap.then(first).then(slopes)) is mine
    assert of(first, 0.0) is mine  # behind another one, for want of a unit
    assert of(None) is of(cap) is of(cap.then(slopes)) is None
    own = score.Score.of(first.forward, first.derivative, first.args)
    assert of(own) is None
    assert of(own.then(first)) is mine


def test_entries_of_no_length():
    assert score_entries.tensor_of(score.bias(torch.zeros(2, 0, dtype=torch.bfloat16)), 0.1) is None
