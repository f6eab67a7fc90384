"""Launches made again: the same ones, with other addresses, and only where nothing else is different."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashtile import flash_attention, flash_attention_varlen, mask, score
from flashtile.dropout import Dropout
from flashtile.seqlen import Seqlens

pytest.importorskip("triton")

from flashtile.kernel import flash_attention_backward, flash_attention_triton, launch, launcher, replay, tile_lists
from flashtile.kernel.hopper import backward, forward, schedule
from flashtile.kernel.rules import Rules
from flashtile.score import kinds

SCALE = 0.125
ADDRESSES = 2**40  # what is above is one


class Launches:
    """What reached the C launcher: for each launch, every argument."""

    def __init__(self):
        self.made, self.counter = [], torch.zeros(1, dtype=torch.int32)

    def named(self, tensors):
        """Return the launches so far with names instead of addresses; other addresses count from the lowest one."""
        names = {t.data_ptr(): name for name, t in (tensors | {"counter": self.counter}).items()}
        made, self.made = self.made, []
        others = [a for a in self._addresses(made) if a not in names]

        def named(arg):
            if isinstance(arg, (list, tuple)):
                return tuple(map(named, arg))
            address = self._address(arg)
            place = arg if address is None else names.get(address, address - min(others, default=0))
            return ("map", place, arg.block) if isinstance(arg, SimpleNamespace) else place

        return named(made)

    @classmethod
    def _addresses(cls, arg):
        if isinstance(arg, (list, tuple)):
            return [address for item in arg for address in cls._addresses(item)]
        address = cls._address(arg)
        return [] if address is None else [address]

    @staticmethod
    def _address(arg):
        if isinstance(arg, torch.Tensor):
            return arg.data_ptr()
        if isinstance(arg, SimpleNamespace):
            return arg.address
        return arg if isinstance(arg, int) and arg > ADDRESSES else None


@pytest.fixture
def launches(monkeypatch):
    """Launch nothing, as on a GPU that has a copy engine."""
    launches, run = Launches(), launcher.run

    def known(kernel, programs, device, args, constants, config):
        key = (kernel.fn, device.index, config, *constants.values(), *launcher._key(args, launcher._free(kernel)))
        compiled = SimpleNamespace(function=kernel.fn.__name__, packed_metadata=())
        encodings = [{"swizzle": 3} for arg in args if type(arg) is launcher.Descriptor]
        if key not in launcher._compiled:
            launcher._compiled[key] = launcher._Compiled(compiled, lambda *a: launches.made.append(a), encodings)
        run(kernel, programs, device, args, constants, config)

    monkeypatch.setattr(launcher, "run", known)
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: True)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(launcher, "prepare", lambda device: None)
    monkeypatch.setattr(launcher, "hooked", lambda: False)
    monkeypatch.setattr(launcher, "_free", lambda kernel: ())
    monkeypatch.setattr(
        launcher, "_encode",
        lambda d, _: [SimpleNamespace(address=d.tensor.data_ptr(), block=d.block), *d.shape, *d.strides],
    )  # fmt: skip
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(schedule, "counter_of", lambda device: launches.counter)
    for module, name in ((launcher, "_compiled"), (launcher, "_tensor_maps"), (replay, "_calls")):
        monkeypatch.setattr(module, name, {})
    return launches


def tensors(n=64, head_dim=64, heads=(4, 2), batch=2):
    make = lambda h: torch.randn(batch, h, n, head_dim).to(torch.bfloat16)  # noqa: E731
    q, do, o, k, v = (make(h) for h in (heads[0], heads[0], heads[0], heads[1], heads[1]))
    return {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": torch.randn(batch, heads[0], n)}


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def ids(*shape, dtype=torch.int32):
    return (torch.arange(64) // 10).expand(*shape, 64).to(dtype)


def lengths(*used, alike=False, sequences=3, **hints):
    """Return packed lengths, ``alike`` if those of queries are those of keys, with lengths in use of ``used``."""
    cu_q, cu_k = (torch.arange(sequences + 1, dtype=torch.int32) * 10 for _ in range(2))
    in_use = {f"seqused_{which}": torch.full((sequences,), 7, dtype=torch.int32) for which in used}
    return Seqlens(cu_q, cu_q if alike else cu_k, **in_use, **hints)


def softcapped_bias():
    return score.softcap(30.0).then(score.bias(torch.randn(4, 64, 64)).then(score.alibi(torch.rand(4))))


def slowly(where, q_idx, k_idx, s, args):
    return s * args[0]


def slope(where, q_idx, k_idx, s, args):
    return args[0]


def times(number):
    return score.Score.of(slowly, slope, (number,))


# Options of a call, with fresh tensors each time.
KINDS = {
    "packed": lambda: {"seqlens": lengths()},
    "packed, one cu_seqlens": lambda: {"seqlens": lengths(alike=True)},
    "packed, seqused": lambda: {"seqlens": lengths("q", "k")},
    "packed, seqused_k, alibi": lambda: {"seqlens": lengths("k"), "score": score.alibi(torch.rand(4))},
    "document": lambda: {"mask": mask.document(ids())},
    "document & causal": lambda: {"mask": mask.document(ids(2)) & mask.causal()},
    "window | ~document": lambda: {"mask": mask.window(8, 0) | ~mask.document(ids())},
    "prefix | causal": lambda: {"mask": mask.prefix(integers(5, 9)) | mask.causal()},
    "alibi": lambda: {"score": score.alibi(torch.rand(4))},
    "alibi by batch": lambda: {"score": score.alibi(torch.rand(2, 4)), "mask": mask.full()},
    "bias": lambda: {"score": score.bias(torch.randn(2, 4, 64, 64).bfloat16())},
    "bias for all": lambda: {"score": score.bias(torch.randn(64, 64))},
    "bias by key": lambda: {"score": score.bias(torch.randn(2, 1, 1, 64))},
    "softcap": lambda: {"score": score.softcap(30.0)},
    "relative_position": lambda: {"score": score.relative_position(torch.randn(32, 4))},
    "chain": lambda: {"score": softcapped_bias(), "mask": mask.document(ids()) & mask.causal()},
    "a function": lambda: {"score": times(2.0)},
    "sinks": lambda: {"sinks": torch.randn(4)},
    "dropout": lambda: {"dropout": Dropout(0.1, integers(3).long())},
}


def shape_for(options):
    """Return what ``tensors`` takes for a call with these options."""
    return {"batch": 1, "n": 128} if "seqlens" in options else {}


def named_in(options):
    """Return the tensors in a call's options, by names."""
    rules = Rules(SCALE, **{"mask": mask.causal()} | options)
    found = {t.data_ptr(): t for t in (*rules.learned(), *rules.others())}
    return {f"option {i}": t for i, t in enumerate(found.values())}


def forward_of(module):
    def run(t, **options):
        options = {"softmax_scale": SCALE, "mask": mask.causal()} | options
        o, lse = module.forward(t["q"], t["k"], t["v"], **options)
        return {"o": o, "lse": lse}

    return run


def backward_of(module):
    def run(t, **options):
        options = {"softmax_scale": SCALE, "mask": mask.causal()} | options
        grads = module.backward(t["do"], t["q"], t["k"], t["v"], t["o"], t["lse"], None, **options)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return run


run_forward = forward_of(forward)
RUNS = {
    "hopper-forward": run_forward,
    "hopper-backward": backward_of(backward),
    "forward": forward_of(flash_attention_triton),
    "backward": backward_of(flash_attention_backward),
}
PASSES = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def serves(name, options):
    if "deterministic" in options:
        return name == "hopper-backward"
    return not ("backward" in name and "sinks" in options) and not ("hopper" in name and "dropout" in options)


KINDS_OF_PASSES = [(name, kind) for name in RUNS for kind in KINDS if serves(name, KINDS[kind]())]
EVERY_KIND = pytest.mark.parametrize(
    ("run", "options"),
    [pytest.param(RUNS[name], KINDS[kind], id=f"{name}-{kind}") for name, kind in KINDS_OF_PASSES],
)


def was_again(launches, monkeypatch, run, t, **options):
    """Run a pass, and return whether its launches were made again from notes."""
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "run", lambda *_: worked_out.append(1))
        worked_out = []
        run(t, **options)
    launches.made.clear()
    return not worked_out


@PASSES
def test_the_same_launches_with_other_addresses(run, launches, monkeypatch):
    for _ in range(2):
        run(tensors())
    fresh = tensors()
    launches.made.clear()
    results = run(fresh)
    assert was_again(launches, monkeypatch, run, fresh)
    launches.made.clear()
    results = run(fresh)
    got = launches.named(fresh | results)
    monkeypatch.setattr(replay, "_calls", {})
    results = run(fresh)
    assert got == launches.named(fresh | results)
    assert any("q" in str(arg) for launch in got for arg in launch)


@EVERY_KIND
def test_every_kind_of_call_is_made_again(run, options, launches, monkeypatch):
    """The launches are those that would be worked out, to the last argument, where every tensor lies elsewhere."""
    kept = []  # so that the next ones lie elsewhere
    for _ in range(3):
        given = options()
        t = tensors(**shape_for(given))
        launches.made.clear()
        kept.append((t, given, run(t, **given)))
    t, given, results = kept[-1]
    again = launches.named(t | named_in(given) | results)
    assert was_again(launches, monkeypatch, run, t, **given)
    monkeypatch.setattr(replay, "_calls", {})
    results = run(t, **given)
    assert again == launches.named(t | named_in(given) | results)
    for name in named_in(given):
        assert name in str(again)


CHANGES = {
    "sequences": (lambda: {"seqlens": lengths()}, lambda: {"seqlens": lengths(sequences=4)}),
    "not packed": (lambda: {"seqlens": lengths()}, dict),
    "seqused_q": (lambda: {"seqlens": lengths()}, lambda: {"seqlens": lengths("q")}),
    "seqused_k": (lambda: {"seqlens": lengths("q")}, lambda: {"seqlens": lengths("q", "k")}),
    "q or k": (lambda: {"seqlens": lengths("q")}, lambda: {"seqlens": lengths("k")}),
    "one cu_seqlens": (lambda: {"seqlens": lengths(alike=True)}, lambda: {"seqlens": lengths()}),
    "two cu_seqlens": (lambda: {"seqlens": lengths()}, lambda: {"seqlens": lengths(alike=True)}),
    "ids": (lambda: {"mask": mask.document(ids())}, lambda: {"mask": mask.document(ids(2))}),
    "no ids": (lambda: {"mask": mask.document(ids()) & mask.causal()}, dict),
    "order of masks": (
        lambda: {"mask": mask.document(ids()) & mask.causal()}, lambda: {"mask": mask.causal() & mask.document(ids())},
    ),
    "sign": (
        lambda: {"mask": mask.document(ids()) & mask.causal()}, lambda: {"mask": mask.document(ids()) | mask.causal()},
    ),
    "width": (
        lambda: {"mask": mask.window(8, 0) | mask.document(ids())},
        lambda: {"mask": mask.window(9, 0) | mask.document(ids())},
    ),
    "without ranges": (
        lambda: {"mask": mask.document(ids())}, lambda: {"mask": mask.document(ids()).without_ranges()},
    ),
    "no score": (lambda: {"score": score.identity()}, dict),
    "cap": (lambda: {"score": score.softcap(30.0)}, lambda: {"score": score.softcap(31.0)}),
    "parts": (KINDS["bias"], lambda: {"score": replace(KINDS["bias"]()["score"], parts=None)}),
    "derivative": (lambda: {"score": times(2.0)}, lambda: {"score": replace(times(2.0), derivative=slowly)}),
    "forward": (lambda: {"score": times(2.0)}, lambda: {"score": replace(times(2.0), forward=slope)}),
    "predicate": (dict, lambda: {"mask": replace(mask.causal(), predicate=mask.causal("top_left").predicate)}),
    "range of keys": (dict, lambda: {"mask": replace(mask.causal(), key_range=mask.full().key_range)}),
    "range of queries": (dict, lambda: {"mask": replace(mask.causal(), query_range=mask.full().query_range)}),
    "another score": (lambda: {"score": score.temperature(2.0)}, lambda: {"score": times(0.5)}),
    "int": (lambda: {"score": times(1)}, lambda: {"score": times(1.0)}),
    "float": (lambda: {"score": times(1.0)}, lambda: {"score": times(1)}),
    "bool": (lambda: {"score": times(1)}, lambda: {"score": times(True)}),
    "minus": (lambda: {"score": times(0.0)}, lambda: {"score": times(-0.0)}),
    "order of scores": (
        lambda: {"score": score.softcap(30.0).then(score.alibi(torch.rand(4)))},
        lambda: {"score": score.alibi(torch.rand(4)).then(score.softcap(30.0))},
    ),
    "slopes": (
        lambda: {"score": score.alibi(torch.rand(4))}, lambda: {"score": score.alibi(torch.rand(2, 4))},
    ),
    "dtype": (
        lambda: {"score": score.alibi(torch.rand(4))}, lambda: {"score": score.alibi(torch.rand(4).bfloat16())},
    ),
    "alignment": (
        lambda: {"score": score.alibi(torch.rand(4))}, lambda: {"score": score.alibi(torch.rand(5)[1:])},
    ),
    "broadcast": (
        lambda: {"score": score.bias(torch.randn(2, 4, 64, 64))}, lambda: {"score": score.bias(torch.randn(4, 64, 64))},
    ),
    "strides": (
        lambda: {"score": score.bias(torch.randn(4, 64, 64))}, lambda: {"score": score.bias(torch.randn(4, 64, 64).mT)},
    ),
    "sinks": (lambda: {"sinks": torch.randn(4)}, dict),
    "p": (KINDS["dropout"], lambda: {"dropout": Dropout(0.2, integers(3).long())}),
    "no dropout": (KINDS["dropout"], dict),
    "in turn": (lambda: {"deterministic": True}, dict),
}  # fmt: skip
CHANGES_OF_PASSES = [
    pytest.param(RUNS[name], *CHANGES[change], id=f"{name}-{change}")
    for name in RUNS
    for change in CHANGES
    if serves(name, CHANGES[change][0]())
]


@pytest.mark.parametrize(("run", "before", "after"), CHANGES_OF_PASSES)
def test_another_ingredient_is_worked_out(run, before, after, launches, monkeypatch):
    t = tensors(**shape_for(before()))
    for _ in range(3):
        run(t, **before())
    assert was_again(launches, monkeypatch, run, t, **before())
    with monkeypatch.context() as patch:  # tile lists are torch's work on what a kernel wrote
        patch.setattr(tile_lists, "tile_lists", lambda *_: None)
        assert not was_again(launches, monkeypatch, run, t, **after())


@PASSES
@pytest.mark.parametrize(
    "change",
    [{"softmax_scale": 0.25}, {"mask": mask.full()}, {"mask": mask.window(8, 0)}, {"n": 65}, {"heads": (4, 4)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_anything_else_different_is_worked_out(run, change, launches, monkeypatch):
    shape = {name: change[name] for name in change if name in ("n", "heads")}
    options = {name: change[name] for name in change if name not in shape}
    for _ in range(3):
        run(tensors())
    assert not was_again(launches, monkeypatch, run, tensors(**shape), **options)


@PASSES
def test_strides_and_alignment_are_part_of_the_call(run, launches, monkeypatch):
    t = tensors()
    for _ in range(3):
        run(t)
    other = t["q"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not was_again(launches, monkeypatch, run, t | {"q": other})


@PASSES
def test_tensors_at_one_address_are_never_mixed_up(run, launches, monkeypatch):
    """Where q is k, notes cannot say which of them an address belongs to: they serve only where q is k again."""
    kept = []  # so that the next ones lie elsewhere
    for _ in range(3):
        t = tensors(heads=(2, 2))
        t["k"] = t["q"]
        launches.made.clear()
        kept.append((t, run(t)))
    t, results = kept[-1]
    again = launches.named(t | results)
    assert was_again(launches, monkeypatch, run, t)
    other = tensors(heads=(2, 2))
    assert not was_again(launches, monkeypatch, run, other)
    assert not was_again(launches, monkeypatch, run, t | {"q": other["q"], "v": other["q"]})
    monkeypatch.setattr(replay, "_calls", {})
    assert again == launches.named(t | run(t))


def test_a_place_is_a_tensor_of_the_same_dtype(monkeypatch):
    """A tensor map is made for the tensor that is there, and counts its bytes in that one's entries."""
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: True)
    whole = torch.zeros(64)
    half, part, outside = whole.view(torch.bfloat16), whole[8:], torch.zeros(64)
    call = replay.Call("test", torch.device("cpu"), (None, whole, half), mask.full())
    assert call._place(whole) == (1, 0)
    assert call._place(half) == (2, 0)
    assert call._place(part) is None  # in both
    assert replay.Call("test", torch.device("cpu"), (None, whole), mask.full())._place(part) == (1, 32)
    assert call._place(outside) is None


@EVERY_KIND
def test_notes_keep_no_tensor_alive(run, options, launches, monkeypatch):
    monkeypatch.setattr(kinds, "_bucket_of_distance", kinds._bucket_of_distance.__wrapped__)  # which keeps its tables
    given = options()
    t = tensors(**shape_for(given))
    run(t, **given)
    results = run(t, **given)
    assert all(replay._calls.values())
    gone = [weakref.ref(x) for x in (t | results | named_in(given)).values()]
    launches.made.clear()
    del given, t, results
    gc.collect()
    assert not any(ref() is not None for ref in gone)


@PASSES
def test_hints_are_no_part_of_the_call(run, launches, monkeypatch):
    t = tensors(batch=1)
    for longest in (10, 20, 30):
        run(t, seqlens=lengths(max_seqlen_q=longest, max_seqlen_k=longest))
    assert was_again(launches, monkeypatch, run, t, seqlens=lengths())


@PASSES
def test_rows_that_no_program_writes_are_filled_every_time(run, launches, monkeypatch):
    t = tensors(batch=1)
    for _ in range(3):
        run(t, seqlens=lengths("q", "k"))
    results = run(t, seqlens=lengths("q", "k"))  # in memory that was NaN
    assert was_again(launches, monkeypatch, run, t, seqlens=lengths("q", "k"))
    for name, result in results.items():
        assert (result == (-torch.inf if name == "lse" else 0)).all()


@PASSES
def test_the_context_comes_before_tensor_maps(run, launches, monkeypatch):
    """A thread of autograd's may make its first launch from notes."""
    kept = [(t, run(t)) for t in (tensors(), tensors())]  # alive, so that the next ones lie elsewhere
    order, encode = [], launcher._encode
    monkeypatch.setattr(launcher, "prepare", lambda device: order.append("prepare"))
    monkeypatch.setattr(launcher, "_encode", lambda *what: order.append("encode") or encode(*what))
    run(tensors())
    assert order[0] == "prepare"
    assert "encode" in order
    assert len(kept) == 2


def test_what_is_worked_out_every_time(launches, monkeypatch):
    """Masks whose tile lists are made for each call, and calls on GPUs without the direct launch."""
    device = torch.device("cpu")

    def notes(of):
        return replay.Call("test", device, (), of)._key is not None

    assert notes(mask.document(ids()) & mask.window(8, 0))
    assert not notes(mask.causal().without_ranges())
    assert not notes(mask.dense(torch.ones(64, 64, dtype=torch.bool)) & mask.causal())
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: False)
    assert not notes(mask.causal())


def test_a_profiler_sees_every_launch(launches, monkeypatch):
    t = tensors()
    for _ in range(3):
        run_forward(t)
    monkeypatch.setattr(launcher, "hooked", lambda: True)
    assert not was_again(launches, monkeypatch, run_forward, t)


def test_a_call_is_noted_when_it_comes_again(launches, monkeypatch):
    """Noting takes time: not for the first of a kind, nor for more kinds than are remembered."""
    monkeypatch.setattr(replay, "_MOST_REMEMBERED", 2)
    for n in (64, 65):
        run_forward(tensors(n))
        assert not any(replay._calls.values())
    run_forward(tensors(65))
    assert list(map(len, replay._calls.values())) == [0, 1]
    run_forward(tensors(66))
    assert list(map(len, replay._calls.values())) == [0]


def is_noted(launch, monkeypatch):
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: True)
    monkeypatch.setattr(replay, "_calls", {})
    call = replay.Call("test", torch.device("cpu"), (HERE,), mask.full())
    with call.noted():
        pass
    assert not any(replay._calls.values())
    with call.noted():
        launcher._thread.made += [(COMPILED, 1, (HERE,), [HERE]), launch]
    return any(replay._calls.values())


HERE, ELSEWHERE, COMPILED = torch.zeros(4), torch.zeros(4), SimpleNamespace(encodings=[{}])


def test_the_first_launch_of_a_kind_is_not_noted(monkeypatch):
    """It goes through Triton, which compiles."""
    assert is_noted((COMPILED, 1, (HERE,), [HERE]), monkeypatch)
    assert not is_noted((None, 1, (HERE,), []), monkeypatch)


def test_tensors_of_unknown_places_are_not_noted(monkeypatch):
    """A copy that was made for this call would not be there for the next one."""
    for args in ((ELSEWHERE,), ((ELSEWHERE,),), (HERE, (2, (HERE, ELSEWHERE)))):
        assert not is_noted((COMPILED, 1, args, list(args)), monkeypatch)
    descriptor = launcher.Descriptor(ELSEWHERE, (4,), (1,), (4,))
    assert not is_noted((COMPILED, 1, (descriptor,), ["map", 4, 1]), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_a_gpu(kind, backend, monkeypatch):
    """Calls with fresh tensors against the same ones worked out; a descriptor's map or an address gone wrong shows."""
    device = torch.device("cuda")
    if launch.arch_of(device) != "sm_90" or (backend == "hopper" and kind == "dropout"):
        pytest.skip("needs a GPU of compute capability 9.0, and a backend that serves this")

    def results(seed):
        torch.manual_seed(seed)
        with torch.device(device):
            options = KINDS[kind]()
            shape = shape_for(options)
            t = tensors(**shape)
        torch.manual_seed(seed)  # of dropout
        if "dropout" in options:
            options["dropout_p"] = options.pop("dropout").p
        seqlens = options.pop("seqlens", None)
        q, k, v = (t[name].requires_grad_() for name in "qkv")
        options = {"mask": mask.causal(), "backend": backend, "deterministic": True} | options
        if seqlens is None:
            o = flash_attention(q, k, v, **options)
            return o, *torch.autograd.grad(o, (q, k, v), t["do"])
        q, k, v, do = (x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v, t["do"]))
        o = flash_attention_varlen(q, k, v, **seqlens._asdict(), **options)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    got = [results(seed) for seed in range(4)]
    monkeypatch.setattr(replay.Call, "again", lambda call: False)
    for seed, found in enumerate(got):
        for ours, worked_out in zip(found, results(seed), strict=True):
            assert torch.equal(ours, worked_out)
