"""The operators that take masks, scores and the rest: as PyTorch sees them, and under compilers and transforms."""

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flashtile import flash_attention, flash_attention_varlen, mask, ops, score
from flashtile.dropout import Dropout
from flashtile.kernel import autograd
from flashtile.kernel.rules import Rules, flatten, key_of, num_learned, structure_of, unflatten
from flashtile.seqlen import Seqlens
from tests.reference import Case
from tests.test_attention import everywhere

OPERATOR = torch.ops.flashtile.forward_with_rules.default


def tensors(*shape, device="cpu", grad=True) -> list[Any]:
    return [torch.randn(shape or (2, 4, 9, 8), device=device, requires_grad=grad) for _ in range(3)]


def learned(device="cpu") -> tuple[Any, Any, Any]:
    return (
        torch.randn(1, 4, 9, 9, device=device, requires_grad=True),
        torch.randn(4, device=device, requires_grad=True),
        torch.randn(4, device=device, requires_grad=True),
    )


def call(q, k, v, bias, slopes, sinks, **options):
    the_score = score.bias(bias).then(score.softcap(3.0)).then(score.alibi(slopes))
    return flash_attention(q, k, v, mask=mask.window(4, 1), score=the_score, sinks=sinks, **options)


def operator_arguments(device, backend, packed=False) -> tuple:
    q, k, v = tensors(1, 4, 9, 8, device=device) if packed else tensors(device=device)
    bias, slopes, sinks = learned(device)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    rules = Rules(
        0.3,
        mask.window(4, 1) & mask.key_padding(torch.tensor([5, 9], device=device)),
        score.alibi(slopes) if packed else score.softcap(3.0).then(score.bias(bias)),
        sinks,
        Dropout(0.25, torch.tensor([5], device=device)),
        Seqlens(cu, cu) if packed else None,
        backend,
    )
    arguments = ops.arguments(rules, True)
    return q, k, v, *arguments[:6], list(arguments[6:])


# ------------------------------------------------------------------------------------------------- rules taken apart


def test_rules_come_back_together():
    bias, slopes, sinks = learned()
    rules = Rules(
        0.5,
        (mask.window(3, -1) | mask.document(torch.arange(9) // 4)) & mask.causal(),
        score.bias(bias).then(score.softcap(2.0)).then(score.alibi(slopes)),
        sinks,
        Dropout(0.1, torch.tensor([3])),
        backend="cpu",
    )
    flat = flatten(rules)
    again = unflatten(0.5, flat)
    assert again.score == rules.score
    assert again.mask == rules.mask
    assert (again.sinks, again.dropout, again.backend) == (rules.sinks, rules.dropout, "cpu")
    learned_first = zip(flat.tensors, rules.learned(), strict=False)
    assert all(a is b for a, b in learned_first)


def test_numbers_and_tensors_are_no_part_of_the_key():
    keys = {
        key_of(flatten(Rules(1.0, mask.window(w, 0) & mask.causal(), score.softcap(w + 1.0))).structure)
        for w in range(5)
    }
    assert len(keys) == 1
    assert "softcap" in (key := keys.pop())
    assert key_of(structure_of(key)) == key


@pytest.mark.parametrize("sinks", [None, torch.ones(4)], ids=["", "sinks"])
def test_learned_tensors_are_counted_without_them(sinks):
    slopes, ids = score.alibi(torch.ones(4)), torch.zeros(4, dtype=torch.int32)
    chain = slopes.then(score.softcap(2.0)).then(score.bias(torch.ones(4, 4)))
    for value in (None, score.softcap(3.0), slopes, chain, score.relative_position(torch.ones(32, 4))):
        rules = Rules(1.0, mask.document(ids), value, sinks, seqlens=Seqlens(ids, ids))
        assert num_learned(key_of(flatten(rules).structure)) == len(rules.learned())
    with pytest.raises(ValueError, match="rules are 'nothing', but want a text that this process made"):
        structure_of("nothing")


# ----------------------------------------------------------------------------------------------------- the operators


@everywhere
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck(packed, device, backend):
    arguments = operator_arguments(device, backend, packed)
    assert set(opcheck(ops.forward_with_rules, arguments).values()) == {"SUCCESS"}
    o, lse, _ = ops.forward_with_rules(*arguments)
    q, k, v, scale, key, ints, floats, changing, _, leaves = arguments
    saved = [t.detach() for t in (q, k, v, o, lse)]
    count = len(structure_learned(arguments))
    for needs in ([True] * (3 + count), [False, False, True, *[True] * (count - 1), False]):
        given = (
            torch.randn_like(o),
            *saved,
            None,
            scale,
            key,
            ints,
            floats,
            changing,
            needs,
            [t.detach() for t in leaves],
        )
        assert set(opcheck(ops.backward_with_rules, given).values()) == {"SUCCESS"}


def structure_learned(arguments):
    return [t for t in arguments[-1] if t.requires_grad]


def test_schemas_take_nothing_in_place():
    for operator in (ops.forward_with_rules, ops.backward_with_rules):
        assert not any(argument.alias_info for argument in operator._schema.arguments)


def test_flops():
    q, k, v = tensors()
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, is_causal=True, sinks=torch.zeros(4), backend="cpu").sum().backward()
    forward = 2 * 2 * 4 * 9 * 9 * 16 // 2
    assert counter.get_total_flops() == forward + forward * 5 // 2


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_data(kind):
    def results(**where):
        q = torch.empty(2, 9, 4, 8, **where).transpose(1, 2)
        return q, flash_attention(q, q, q, mask=mask.window(3, 0), return_lse=True, return_max_logits=True)

    if kind == "fake":
        with FakeTensorMode():
            q, (o, lse, largest) = results()
    else:
        q, (o, lse, largest) = results(device="meta")
    assert o.stride() == q.stride()
    assert lse.shape == largest.shape == (2, 4, 9)


def test_make_fx_records_one_operator():
    graph = make_fx(lambda *t: call(*t, backend="cpu"))(*tensors(), *learned())
    assert sum(node.target == OPERATOR for node in graph.graph.nodes) == 1


@everywhere
def test_results_lie_in_memory_like_their_inputs(device, backend):
    q = torch.randn(2, 20, 12, 16, device=device).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 12, 20, 16, device=device, requires_grad=True) for _ in range(2))
    o, lse = flash_attention(q, k, v, mask=mask.window(4, 0), return_lse=True, backend=backend)
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert [t.stride() for t in (o, *grads)] == [t.stride() for t in (q, q, k, v)]
    assert lse.is_contiguous()


# --------------------------------------------------------------------------------------------------------- compilers


def compiled_like_eager(function, argument_sets, inputs=lambda args: args[:3], backend="aot_eager") -> int:
    """Check results and gradients of the compiled function; return how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for args in argument_sets:
        want, got = function(*args), compiled(*args)
        torch.testing.assert_close(got, want)
        leaves = inputs(args)
        grads = [torch.autograd.grad(o.square().sum(), leaves) for o in (got, want)]
        torch.testing.assert_close(*grads)
    return counter.frame_count


WIDTHS = range(3, 11)


@everywhere
@pytest.mark.parametrize("kind", ["window", "window-and-causal", "combined", "softcap", "several"])
def test_other_numbers_compile_nothing_new(kind, device, backend):
    q, k, v = tensors(device=device)
    options = {
        "window": lambda n: (mask.window(n, 0), None),
        "window-and-causal": lambda n: (mask.window(n, n), None),
        "combined": lambda n: (mask.window(n, 3) & mask.chunked(n), None),
        "softcap": lambda n: (None, score.softcap(n + 0.5)),
        "several": lambda n: (mask.window(n, 0), score.softcap(n + 0.5).then(score.temperature(n / 2))),
    }[kind]

    def attend(q, k, v, the_mask, the_score):
        return flash_attention(q, k, v, mask=the_mask, score=the_score, is_causal=kind == "window-and-causal",
                               backend=backend)  # fmt: skip

    assert compiled_like_eager(attend, [(q, k, v, *options(n)) for n in WIDTHS]) <= 2


@everywhere
def test_a_cap_made_inside_compiles_nothing_new(device, backend):
    q, k, v = tensors(device=device)

    def attend(q, k, v, cap):
        return flash_attention(q, k, v, score=score.softcap(cap), backend=backend)

    assert compiled_like_eager(attend, [(q, k, v, n + 0.5) for n in WIDTHS]) <= 2


@everywhere
def test_every_gradient_under_a_compiler(device, backend):
    arguments = (*tensors(device=device), *learned(device))
    assert compiled_like_eager(functools.partial(call, backend=backend), [arguments], lambda args: args) == 1


@pytest.mark.slow
def test_inductor():
    arguments = (*tensors(), *learned())
    assert compiled_like_eager(functools.partial(call, backend="cpu"), [arguments], lambda args: args, "inductor") == 1


@everywhere
@pytest.mark.parametrize("kind", ["tensor", "document", "relative", "max", "twice"])
def test_other_values_under_a_compiler(kind, device, backend):
    q, k, v = tensors(device=device)
    ids = torch.arange(9, device=device) // 4
    table = torch.randn(8, 4, device=device, requires_grad=True)
    attend, extra = {
        "tensor": (lambda q, k, v, m: flash_attention(q, k, v, mask=m, backend=backend), ids[:, None] >= ids),
        "document": (lambda q, k, v, m: flash_attention(q, k, v, mask=m, backend=backend), mask.document(ids)),
        "relative": (
            lambda q, k, v, t: flash_attention(q, k, v, score=score.relative_position(t), backend=backend),
            table,
        ),
        "max": (lambda q, k, v, _: flash_attention(q, k, v, return_max_logits=True, backend=backend)[0], None),
        "twice": (lambda q, k, v, s: flash_attention(q, k, v, score=s, differentiable_twice=True), score.softcap(2.0)),
    }[kind]
    inputs = (lambda args: args) if kind == "relative" else (lambda args: args[:3])
    assert compiled_like_eager(attend, [(q, k, v, extra)], inputs) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export_within_the_process(strict):
    window, softcap = mask.window(3, 0), score.softcap(3.0)

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attention(q, k, v, mask=window, score=softcap, backend="cpu")

    n = torch.export.Dim("n", min=2, max=4096)
    inputs = tuple(tensors(grad=False))
    program = torch.export.export(Attention(), inputs, dynamic_shapes=({2: n},) * 3, strict=strict)
    assert sum(node.target == OPERATOR for node in program.graph.nodes) == 1
    longer = tensors(2, 4, 20, 8, grad=False)
    assert torch.equal(program.module()(*longer), Attention()(*longer))


@everywhere
def test_dropout_under_a_compiler_draws_anew(device, backend):
    torch._dynamo.reset()
    q, k, v = tensors(device=device)
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, dropout_p=0.5, backend=backend), fullgraph=True, backend="aot_eager"
    )
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    # The backward pass drops what the forward pass dropped: o is linear in v, with the same weights.
    (dv,) = torch.autograd.grad(first, v, first.detach())
    torch.testing.assert_close((dv * v).sum(), first.square().sum())


# -------------------------------------------------------------------------------------------------------- transforms


@everywhere
def test_functional_gradients(device, backend):
    arguments = (*tensors(device=device), *learned(device))

    def loss(*args):
        return call(*args, backend=backend).square().sum()

    got = torch.func.grad(loss, tuple(range(6)))(*arguments)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*arguments), arguments))


@everywhere
def test_vmap_is_a_loop_that_masks_and_scores_see(device, backend):
    _, k, v = (t.detach() for t in tensors(device=device))
    _, slopes, sinks = (t.detach() for t in learned(device))
    many_q = torch.randn(3, 2, 4, 9, 8, device=device)
    many_bias = torch.randn(1, 4, 9, 9, 3, device=device)

    def attend(q, bias):
        return call(q, k, v, bias, slopes, sinks, backend=backend)

    got = torch.vmap(attend, (0, -1))(many_q, many_bias)
    torch.testing.assert_close(got, torch.stack([attend(many_q[i], many_bias[..., i]) for i in range(3)]))

    def loss(q, bias):
        return attend(q, bias).square().sum()

    got = torch.vmap(torch.func.grad(loss, (0, 1)), (0, -1))(many_q, many_bias)
    want = [torch.func.grad(loss, (0, 1))(many_q[i], many_bias[..., i]) for i in range(3)]
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*want, strict=True))))


# ----------------------------------------------------------------------------------- autocast, checkpoints, memory


@everywhere
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_autocast(packed, device, backend):
    q, k, v = tensors(9, 4, 8, device=device) if packed else tensors(device=device)
    v = v.detach().bfloat16().requires_grad_()
    sinks = torch.randn(4, device=device, requires_grad=True)
    cu = torch.tensor([0, 9], dtype=torch.int32, device=device)

    def attend(q, k, v):
        if packed:
            return flash_attention_varlen(q, k, v, cu, cu, sinks=sinks, mask=mask.window(3, 0), backend=backend)
        return flash_attention(q, k, v, sinks=sinks, mask=mask.window(3, 0), backend=backend)

    with torch.autocast(device, torch.bfloat16):
        o = attend(q, k, v)
    assert o.dtype == torch.bfloat16
    grads = torch.autograd.grad(o.float().sum(), (q, k, v, sinks))
    assert [t.dtype for t in grads] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert torch.equal(o, attend(*(t.bfloat16() for t in (q, k, v))))


def save_attention(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == OPERATOR else CheckpointPolicy.PREFER_RECOMPUTE


@everywhere
@pytest.mark.parametrize(("policy", "times"), [(None, 2), (save_attention, 1)], ids=["plain", "must-save"])
def test_selective_checkpointing_with_dropout(policy, times, monkeypatch, device, backend):
    counts = []
    original = autograd.run_forward
    monkeypatch.setattr(autograd, "run_forward", lambda *args: counts.append(1) or original(*args))
    *inputs, do, _ = Case(2, 4, 2, 20, 20, 8).tensors(device=device)
    inputs: list[Any] = [t.requires_grad_() for t in inputs]

    def block(q, k, v):
        return flash_attention(q.sin(), k, v, is_causal=True, dropout_p=0.3, backend=backend).sin()

    torch.manual_seed(0)
    want = torch.autograd.grad(block(*inputs), inputs, do)
    counts.clear()
    torch.manual_seed(0)
    kind: Any = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if policy else {}
    o: Any = checkpoint(block, *inputs, use_reentrant=False, **kind)
    got = torch.autograd.grad(o, inputs, do)
    assert len(counts) == times
    assert all(map(torch.equal, got, want))


def test_a_bias_changed_in_place_is_noticed():
    q, k, v = tensors()
    bias = torch.zeros(1, 4, 9, 9)
    o = flash_attention(q, k, v, score=score.bias(bias), backend="cpu")
    bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace"):
        o.sum().backward()


def test_checkpoints_keep_no_tensor_of_a_score():
    import weakref

    q, k, v = tensors()
    made: list[Any] = []

    def block(q, k, v):
        bias = torch.zeros(1, 4, 9, 9)
        made.append(weakref.ref(bias))
        return flash_attention(q, k, v, score=score.bias(bias), backend="cpu")

    o: Any = checkpoint(block, q, k, v, use_reentrant=False)
    assert made[0]() is None
    o.sum().backward()


def test_a_mask_made_inside_a_compiled_function():
    """Another window, made and combined inside, compiles at most one graph more."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def attend(q, left):
        return flash_attention(q, q, q, mask=mask.causal() & mask.window(left, 0), backend="cpu")

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    q = torch.randn(1, 2, 40, 16)
    for left in (3, 5, 7, 9):
        torch.testing.assert_close(compiled(q, left), attend(q, left))
    assert len(graphs) <= 2
