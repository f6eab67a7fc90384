"""Every mask: its ranges against its predicate, by brute force. A new mask joins by one entry in MASKS."""

import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile import flash_attention, mask
from flashtile.kernel.flash_attention_mock import blockwise_backward, blockwise_forward
from flashtile.mask import Mask, causal, chunked, document, full, gather, key_padding, prefix, select, window
from flashtile.mask.kinds import looks_back, most_seen
from flashtile.seqlen import Where
from tests.conftest import INTERPRETED
from tests.reference import Case, Result, assert_result_accurate, plain, reference

BATCH, HEADS = 2, 2
LENGTHS = [(6, 6), (1, 7), (7, 1), (4, 9), (9, 4), (0, 3), (3, 0)]


def diagonal_stripes(where, q_idx, k_idx, args):
    return (q_idx + k_idx + where.head) % args[0] == 0


def by_table(where, q_idx, k_idx, args):
    table, length, offset = args
    return gather(table, k_idx + offset, length) > select(where.batch > 0, 2, 4)


def even_keys(where, q_idx, k_idx, args):
    return (k_idx % 2 == 0) & (q_idx >= 0)


def one_after_a_third(where, q_idx, k_idx, args):
    distance = q_idx - k_idx
    distance %= args[0]
    return distance == 1


def just_after(where, q_idx, k_idx, args):
    return (k_idx - q_idx) // args[0] == 0


def every_other(where, lo, hi, args):
    return 0, 0, 0, 9


MASKS = [
    full(),
    causal(),
    causal(align="top_left"),
    window(2, 1),
    window(0, 0),
    window(-1, 2),
    window(3, -1),
    chunked(3),
    chunked(1),
    prefix([0, 4]),
    prefix(2),
    key_padding(torch.tensor([9, 3])),
    document(torch.tensor([0, 0, 1, 1, 1, 5, 5, 2, 2])),
    document(torch.tensor([[3, 1, 3, 1, 1, 3, 0, 0, 3], [7, 7, 7, 7, 7, 7, 7, 7, 7]])),
    document(torch.tensor([4, 4, 9, 4])),  # shorter than most sequences
    mask.block_sparse(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 1]]).bool(), 2, 3),
    mask.dense(torch.arange(2 * 2 * 9 * 9).reshape(2, 2, 9, 9) % 3 > 0),
    mask.dense((torch.arange(9) % 4 > 0).reshape(9, 1)),
    Mask.of(diagonal_stripes, (3,), name="stripes"),
    Mask.of(by_table, (torch.tensor([5, 0, 3, 9]), 4, -1)),
    Mask.of(even_keys, (), every_other, every_other),
    Mask.of(one_after_a_third, (3,)),
    Mask.of(just_after, (4,)),
    causal() & window(2, 2),
    causal() | prefix([3, 1]),
    causal() & document(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])),
    (prefix(2) | window(1, 0)) & key_padding([7, 4]),
    chunked(4) & causal() | prefix([1, 0]),
    ~causal(),
    ~window(1, 1),
    ~(chunked(2) | prefix(3)) & key_padding(8),
    ~full(),
    window(1, 0) | Mask.of(diagonal_stripes, (4,)),
    (window(1, 0) | prefix(1)).without_ranges(),
]
all_masks = pytest.mark.parametrize("value", MASKS, ids=str)
all_lengths = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS, ids=str)


def visible(value: Mask, where: Where) -> list[list[bool]]:
    """Return the mask of one (batch, head) as nested lists, from the predicate on plain integers."""
    rows, cols = range(where.seqlen_q), range(where.seqlen_k)
    return [[bool(value.predicate(where, i, j, value.args)) for j in cols] for i in rows]


def places(seqlen_q: int, seqlen_k: int) -> list[Where]:
    return [Where(b, h, seqlen_q, seqlen_k) for b in range(BATCH) for h in range(HEADS)]


def check_range(bounds: tuple[int, int, int, int], length: int, tile: list[list[bool]]) -> None:
    """Check (lo, full_lo, full_hi, hi) against ``tile[j]``: what the rows of the tile say about index j."""
    lo, full_lo, full_hi, hi = bounds
    assert lo <= full_lo <= max(lo, hi), f"{bounds} is not in order"
    for j in range(length):
        if not lo <= j < hi:
            assert not any(tile[j]), f"index {j} is visible, but outside [{lo}, {hi})"
        if full_lo <= j < full_hi:
            assert all(tile[j]), f"index {j} is in the full range [{full_lo}, {full_hi}), but not visible to all"


def check_ranges(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    """Check both ranges of a mask for every tile of every (batch, head)."""
    if value.key_range is None or value.query_range is None:
        return
    for where in places(seqlen_q, seqlen_k):
        rows = visible(value, where)
        for q_lo, q_hi in itertools.combinations(range(seqlen_q + 1), 2):
            tile = [[rows[i][j] for i in range(q_lo, q_hi)] for j in range(seqlen_k)]
            check_range(value.key_range(where, q_lo, q_hi, value.args), seqlen_k, tile)
        for k_lo, k_hi in itertools.combinations(range(seqlen_k + 1), 2):
            tile = [rows[i][k_lo:k_hi] for i in range(seqlen_q)]
            check_range(value.query_range(where, k_lo, k_hi, value.args), seqlen_q, tile)
        if value.exact(value.args):
            for i in range(seqlen_q):
                _, first, last, _ = value.key_range(where, i, i + 1, value.args)
                assert rows[i] == [first <= j < last for j in range(seqlen_k)]
            for j in range(seqlen_k):
                _, first, last, _ = value.query_range(where, j, j + 1, value.args)
                assert [row[j] for row in rows] == [first <= i < last for i in range(seqlen_q)]


@all_masks
@all_lengths
def test_ranges_agree_with_predicate(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    check_ranges(value, seqlen_q, seqlen_k)


@all_masks
@all_lengths
def test_predicate_is_the_same_on_tensors(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    where = Where(torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None], seqlen_q, seqlen_k)
    q_idx, k_idx = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    got = value.predicate(where, q_idx, k_idx, value.args).expand(BATCH, HEADS, seqlen_q, seqlen_k)
    assert got.dtype == torch.bool
    want = [visible(value, place) for place in places(seqlen_q, seqlen_k)]
    assert got.flatten(0, 1).tolist() == want
    # The backward pass for keys has its tiles transposed.
    transposed = value.predicate(where, q_idx.mT, k_idx.mT, value.args).expand(BATCH, HEADS, seqlen_k, seqlen_q)
    assert transposed.mT.flatten(0, 1).tolist() == want


@all_masks
@all_lengths
def test_tiles_agree_with_the_dense_formula(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    case = Case(BATCH, HEADS, HEADS, seqlen_q, seqlen_k, head_dim=4)
    q, k, v, do, dlse = case.tensors()
    options = {"softmax_scale": 0.5, "mask": value, "block_q": 2, "block_k": 3}
    o, lse = blockwise_forward(q, k, v, **options)
    grads = blockwise_backward(do, q, k, v, o, lse, dlse, **options)
    expected = {"softmax_scale": 0.5, "mask": value, "do": do, "dlse": dlse}
    assert_result_accurate(Result(o, lse, *grads), reference(q, k, v, **expected), plain(q, k, v, **expected))


# --- masks made up at random ------------------------------------------------------------------------------------------

small = st.integers(0, 9)
simple_masks = st.one_of(
    st.just(full()),
    st.sampled_from(["bottom_right", "top_left"]).map(causal),
    st.builds(window, st.integers(-1, 6), st.integers(-1, 6)),
    st.builds(chunked, st.integers(1, 7)),
    st.lists(small, min_size=BATCH, max_size=BATCH).map(prefix),
    small.map(key_padding),
    st.lists(st.lists(st.integers(-1, 2), min_size=9, max_size=9), min_size=BATCH, max_size=BATCH).map(
        lambda ids: document(torch.tensor(ids))
    ),
    st.lists(small, min_size=1, max_size=9).map(lambda ids: document(torch.tensor(sorted(ids)))),
)
all_masks_at_random = st.recursive(
    simple_masks,
    lambda masks: st.one_of(
        st.builds(Mask.__and__, masks, masks), st.builds(Mask.__or__, masks, masks), masks.map(Mask.__invert__)
    ),
    max_leaves=4,
)


@given(value=all_masks_at_random, seqlen_q=st.integers(0, 7), seqlen_k=st.integers(0, 7))
@hypothesis.settings(max_examples=400, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_ranges_of_any_combination(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    check_ranges(value, seqlen_q, seqlen_k)


# --- what each mask shows ---------------------------------------------------------------------------------------------


def picture(value: Mask, seqlen_q: int, seqlen_k: int, batch: int = 0) -> list[str]:
    return ["".join(".#"[seen] for seen in row) for row in visible(value, Where(batch, 0, seqlen_q, seqlen_k))]


def test_causal_is_aligned_bottom_right() -> None:
    assert picture(causal(), 2, 4) == ["###.", "####"]
    assert picture(causal(), 3, 1) == [".", ".", "#"]
    assert picture(causal(align="top_left"), 2, 4) == ["#...", "##.."]


@all_masks
@all_lengths
def test_masks_that_look_back_show_no_key_after_the_query(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    where = Where(0, 0, seqlen_q, seqlen_k)
    seen = [(i, j) for i, row in enumerate(visible(value, where)) for j, shown in enumerate(row) if shown]
    assert not looks_back(value) or all(j <= i + seqlen_k - seqlen_q for i, j in seen)


def test_which_masks_are_known_to_look_back() -> None:
    ids = torch.tensor([0, 0, 1])
    for value in (causal(), window(3, 0), causal() & document(ids), document(ids) & (chunked(2) & window(1, 0)),
                  causal() & ~window(1, 1), causal() | window(2, 0), causal().without_ranges()):  # fmt: skip
        assert looks_back(value)
    for value in (full(), window(3, 1), window(3, -1), prefix(2) | causal(), ~causal(), causal(align="top_left")):
        assert not looks_back(value)


@all_masks
@all_lengths
def test_no_query_sees_more_keys_than_said(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    for where in places(seqlen_q, seqlen_k):
        assert all(sum(row) <= most_seen(value) for row in visible(value, where))


def test_how_many_keys_a_query_sees_at_most() -> None:
    assert most_seen(window(3, 1)) == 5
    assert most_seen(causal() & window(3, 0) & chunked(2)) == 2
    assert most_seen(window(3, 0) | chunked(2)) == 6
    assert min(map(most_seen, (causal(), full(), window(-1, 3), prefix(3) | causal(), ~window(1, 0)))) > 2**20


def everything(where, lo, hi, args):
    return 0, 0, 0, 2**30


def test_which_rows_are_known_exactly() -> None:
    pieces, scattered = document(torch.tensor([0, 0, 1, 1])), document(torch.tensor([0, 1, 0, 1]))
    for value in (
        pieces,
        pieces & causal(),
        window(2, 0) & pieces,
        pieces & pieces & prefix(3),
        window(2, 2) & causal(),
    ):
        assert value.exact(value.args)
    for value in (
        scattered,
        scattered & causal(),
        pieces & scattered,
        causal() & scattered & pieces,
        pieces.without_ranges(),
        pieces & causal().without_ranges(),
        (pieces & causal()).without_ranges(),
        Mask.of(pieces.predicate, pieces.args, everything, everything),
        ~pieces,
        pieces | causal(),
        pieces & ~causal(),
        pieces & mask.dense(torch.ones(1, 1) > 0),
    ):
        assert not value.exact(value.args)


def test_windows_count_keys_besides_the_current_one() -> None:
    assert picture(window(1, 0), 3, 4) == ["##..", ".##.", "..##"]
    assert picture(window(0, 1), 3, 3) == ["##.", ".##", "..#"]
    assert window(-1, 0) == causal()
    assert window(-1, -1) == full()
    # A bound is not cut to the number of keys: with more queries than keys it reaches further back.
    assert picture(window(-1, 100), 8, 4) == ["####"] * 8
    assert [row.count("#") for row in picture(window(-1, 4), 8, 4)] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert picture(window(2**40, 2**31 - 1), 2, 2) == ["##", "##"]


def test_chunks_documents_and_lengths() -> None:
    assert picture(chunked(2), 3, 5) == ["..##.", "..##.", "....#"]
    assert picture(document(torch.tensor([1, 1, 0, 1])), 4, 4) == ["##.#", "##.#", "..#.", "##.#"]
    assert picture(document(torch.tensor([5, 5, 6])), 4, 3) == ["...", "##.", "##.", "..#"]
    assert picture(prefix([1, 2]) | causal(), 3, 3, batch=1) == ["##.", "##.", "###"]
    assert picture(key_padding([1, 2]), 2, 3, batch=0) == ["#..", "#.."]


def test_narrow_ranges_for_documents_in_one_piece() -> None:
    packed = document(torch.tensor([0] * 5 + [1] * 3 + [2] * 8))
    where = Where(0, 0, 16, 16)
    assert packed.key_range is not None
    assert packed.key_range(where, 0, 4, packed.args) == (0, 0, 5, 5)
    assert packed.key_range(where, 5, 8, packed.args) == (5, 5, 8, 8)
    lo, full_lo, full_hi, hi = packed.key_range(where, 3, 7, packed.args)
    assert (lo, hi) == (0, 8)
    assert full_lo >= full_hi


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_ids_of_any_integer_dtype(dtype) -> None:
    assert picture(document(torch.tensor([200, 3, 200]).to(dtype)), 3, 3) == ["#.#", ".#.", "#.#"]


def test_ids_beyond_32_bits() -> None:
    assert picture(document(torch.tensor([1, 1 + 2**32])), 2, 2) == ["#.", ".#"]


def test_document_ids_from_boundaries() -> None:
    ids = mask.document_ids(torch.tensor([0, 2, 2, 5]), 7)
    assert ids.tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert ids.dtype == torch.int32


# --- values -----------------------------------------------------------------------------------------------------------


def test_masks_are_values() -> None:
    assert causal() == causal()
    assert causal() != full()
    assert hash(causal()) == hash(causal())
    assert window(3, 0) == window(3, 0) != window(4, 0)
    ids = torch.zeros(4, dtype=torch.int32)
    assert document(ids) != document(ids.clone())  # tensors are compared by identity: nothing waits for a device
    assert causal() & window(3, 0) == causal() & window(3, 0)
    assert full() & causal() == causal() == causal() & full()
    assert full() | causal() == full()


def test_names_read_as_they_were_written() -> None:
    assert str(causal() & window(3, 1)) == "causal() & window(3, 1)"
    assert str((prefix(2) | causal()) & key_padding([1, 2])) == "(prefix(2) | causal()) & key_padding(lengths of 2)"
    assert str(~(causal() | chunked(2)) | prefix(1)) == "~(causal() | chunked(2)) | prefix(1)"
    assert repr(mask.dense(torch.ones(3, 4).bool())) == "dense(visible of 3 x 4)"


def test_no_copy_of_a_large_mask() -> None:
    seen = torch.rand(5, 7) > 0.5
    value = mask.dense(seen.expand(3, 2, 5, 7))
    assert next(value.tensors()).data_ptr() == seen.data_ptr()
    value.check(3, 2, 5, 7)
    with pytest.raises(ValueError, match="made for heads_q 2, but the tensors have heads_q 4"):
        value.check(3, 4, 5, 7)


def test_sizes_are_checked_inside_combinations_too() -> None:
    blocks = mask.block_sparse(torch.ones(1, 1, 3, 2).bool(), 4, 8) & causal()
    blocks.check(7, 9, 12, 16)
    blocks.check(7, 9, 9, 9)
    with pytest.raises(ValueError, match="made for seqlen_q 3 blocks of 4, but the tensors have seqlen_q 13"):
        blocks.check(7, 9, 13, 16)
    with pytest.raises(ValueError, match="batch 2, but the tensors have batch 3"):
        (prefix([1, 2]) | causal()).check(3, 1, 4, 4)


def test_to_moves_every_tensor() -> None:
    value = (document(torch.arange(4)) | prefix([1, 2])).to("meta")
    assert {t.device.type for t in value.tensors()} == {"meta"}
    value.check(2, 1, 4, None, torch.device("meta"))
    with pytest.raises(ValueError, match="has a tensor on meta, but wants cpu"):
        value.check(2, 1, 4, None, torch.device("cpu"))


# --- arguments that cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(
    ("make", "shape_q", "shape_k"),
    [
        (lambda: torch.ones(0, 2, 5, 7).bool(), (0, 2, 5, 8), (0, 2, 7, 8)),
        (lambda: torch.ones(1, 2, 0, 7).bool(), (1, 2, 0, 8), (1, 2, 7, 8)),
        (lambda: torch.ones(5, 0).bool(), (1, 2, 5, 8), (1, 2, 0, 8)),
        (lambda: mask.block_sparse(torch.ones(2, 0).bool(), 4, 4), (1, 2, 5, 8), (1, 2, 0, 8)),
        (lambda: document(torch.zeros(0).int()), (1, 2, 5, 8), (1, 2, 0, 8)),
        (lambda: document(torch.zeros(0, 7).int()), (0, 2, 5, 8), (0, 2, 7, 8)),
        (lambda: prefix(torch.zeros(0).int()) | causal(), (0, 2, 5, 8), (0, 2, 7, 8)),
        (lambda: key_padding([]) & causal(), (0, 2, 5, 8), (0, 2, 7, 8)),
    ],
)
def test_masks_of_nothing(make, shape_q, shape_k, backend) -> None:
    """A batch, queries or keys that are not there: nothing, or zeros."""
    if backend == "triton" and not INTERPRETED:
        pytest.skip("the interpreter is off")
    value = make()
    q, k = torch.ones(shape_q, requires_grad=True), torch.ones(shape_k)
    o, lse = flash_attention(q, k, k, mask=value, return_lse=True, backend=backend)
    assert o.shape == shape_q
    assert torch.equal(o, torch.zeros(shape_q))
    assert (lse == -torch.inf).all()
    o.sum().backward()
    assert torch.equal(q.grad, torch.zeros(shape_q))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"made for (batch|seqlen_[qk]) 0"):
        flash_attention(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 7, 8), torch.ones(1, 2, 7, 8), mask=value)


SIZE = 3


def reads_a_global(where, q_idx, k_idx, args):
    return q_idx // SIZE == k_idx // SIZE


def wrong(value: Any) -> Any:
    """Return what a type checker would have refused."""
    return value


def around():
    size = 3

    def closure(where, q_idx, k_idx, args):
        return q_idx // size == k_idx // size

    return closure


def joined(where, q_idx, k_idx, args):
    return k_idx <= q_idx and k_idx + args[0] > q_idx


def either(where, q_idx, k_idx, args):
    near = k_idx + 1 > q_idx
    return near or k_idx == 0


def denied(where, q_idx, k_idx, args):
    return not k_idx > q_idx


def between(where, q_idx, k_idx, args):
    return 0 <= q_idx - k_idx < args[0]


def conditional(where, q_idx, k_idx, args):
    return k_idx <= q_idx if where.head > 0 else k_idx >= q_idx


def branching(where, q_idx, k_idx, args):
    if where.batch == 0:
        return k_idx <= q_idx
    return k_idx >= q_idx


def largest(where, q_idx, k_idx, args):
    return max(q_idx - k_idx, 0) < 3


def distant(where, q_idx, k_idx, args):
    return abs(q_idx - k_idx) < 3


def in_a_helper(where, q_idx, k_idx, args):
    return distance_of(q_idx, k_idx) < 3


def distance_of(i, j):
    return max(i - j, j - i)


def counted(where, q_idx, k_idx, args):
    return (k_idx <= q_idx) * 1


def always(where, q_idx, k_idx, args):
    return True


def on_numbers(where, q_idx, k_idx, args):
    """What asks numbers for a truth value is the same everywhere."""
    width = max(args[0], 1) if where.seqlen_k > 4 and args[1] is None else 2
    if not args[0] > 3:
        width += 1
    return (q_idx - k_idx < distance_of(width, 1)) & (k_idx <= q_idx)


def keys_between(where, q_lo, q_hi, args):
    return 0, 0, 0, q_hi if 0 <= q_lo < q_hi else where.seqlen_k


def keys_inverted(where, q_lo, q_hi, args):
    return 0, 0, 0, select(~(q_lo > 3), q_hi, where.seqlen_k)


def keys_on_numbers(where, q_lo, q_hi, args):
    first = where.seqlen_k if q_lo > 2 or not q_hi < 9 else q_hi
    return 0, 0, 0, max(first, where.seqlen_k)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (joined, r"`k_idx <= q_idx and .*` \(line \d+\), but wants `\(k_idx <= q_idx\) & \(k_idx \+ args\[0\] > q"),
        (either, r"`near or k_idx == 0` .* wants `\(near\) \| \(k_idx == 0\)`"),
        (denied, r"`not k_idx > q_idx` .* wants `~\(k_idx > q_idx\)`"),
        (between, r"wants `\(0 <= q_idx - k_idx\) & \(q_idx - k_idx < args\[0\]\)`"),
        (conditional, r"wants `select\(where.head > 0, k_idx <= q_idx, k_idx >= q_idx\)`"),
        (branching, r"predicate branching has `where.batch == 0` .* no `if` on it"),
        (largest, r"wants `select\(q_idx - k_idx > 0, q_idx - k_idx, 0\)`"),
        (distant, r"`abs\(q_idx - k_idx\)` .* wants `select\("),
        (in_a_helper, r"predicate distance_of has `max\(i - j, j - i\)`"),
        (counted, "predicate counted returns a tensor of torch.int64, but wants a tensor of torch.bool"),
        (always, "predicate always returns True, but wants a tensor of torch.bool"),
    ],
)
def test_what_tensors_cannot_answer_is_refused_by_name(fn, words) -> None:
    with pytest.raises(TypeError, match=words):
        Mask.of(fn, (3, None))


def test_ranges_may_ask_numbers() -> None:
    Mask.of(on_numbers, (3, None))
    Mask.of(even_keys, (), keys_on_numbers, keys_on_numbers)
    with pytest.raises(TypeError, match=r"key_range keys_between has .* wants `\(0 <= q_lo\) & \(q_lo < q_hi\)`"):
        Mask.of(even_keys, (), keys_between, keys_on_numbers)
    with pytest.raises(TypeError, match=r"query_range keys_inverted has `~\(q_lo > 3\)`.* wants `not \(q_lo > 3\)`"):
        Mask.of(even_keys, (), keys_on_numbers, keys_inverted)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: causal(align="left"), ValueError, "align is 'left', but wants"),
        (lambda: window(-2, 0), ValueError, "left is -2, but wants at least -1"),
        (lambda: window(0, wrong(1.5)), TypeError, "right is 1.5, but wants an int"),
        (lambda: chunked(0), ValueError, "size is 0, but wants at least 1"),
        (lambda: prefix(-1), ValueError, "lengths is -1"),
        (lambda: prefix(wrong([[1]])), ValueError, r"lengths has shape \(1, 1\), but wants 1 dimension"),
        (lambda: prefix(torch.zeros(0)), TypeError, "lengths has dtype torch.float32, but wants integers"),
        (lambda: mask.document_ids(torch.zeros(0).int(), 3), ValueError, "cu_seqlens has shape"),
        (lambda: key_padding(torch.ones(2)), TypeError, "lengths has dtype torch.float32, but wants integers"),
        (lambda: key_padding(wrong("all")), TypeError, "lengths is a str"),
        (lambda: document(torch.ones(1, 1, 1).int()), ValueError, r"ids has shape \(1, 1, 1\), but wants 1 or 2"),
        (lambda: mask.dense(torch.zeros(2, 2)), TypeError, "visible is torch.float32, but wants a torch.bool"),
        (lambda: mask.dense(torch.zeros(1, 1, 1, 2, 2).bool()), ValueError, "visible has shape"),
        (lambda: mask.block_sparse(torch.ones(2, 2).bool(), 0, 4), ValueError, "block_q is 0"),
        (lambda: Mask.of(lambda where, q, k, args: q == k), TypeError, "predicate is a lambda"),
        (lambda: Mask.of(around()), TypeError, "predicate closure uses size"),
        (lambda: Mask.of(reads_a_global), TypeError, "predicate reads_a_global reads the global SIZE"),
        (lambda: Mask.of(max), TypeError, "predicate is <built-in function max>"),
        (lambda: Mask.of(even_keys, args=wrong(3)), TypeError, "args is a int"),
        (lambda: Mask.of(even_keys, args=("a",)), TypeError, r"args\[0\] is a str"),
        (lambda: Mask.of(even_keys, key_range=every_other), ValueError, "query_range is None"),
        (lambda: causal() & wrong(3), TypeError, "unsupported operand"),
    ],
)
def test_bad_arguments_are_named(make, error, words) -> None:
    with pytest.raises(error, match=words):
        make()
