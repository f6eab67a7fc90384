"""Launches made again: the same ones, with other addresses, and only where nothing else is different."""

from types import SimpleNamespace

import pytest
import torch

from flashtile import mask

pytest.importorskip("triton")

from flashtile.kernel import flash_attention_backward, flash_attention_triton, launch, launcher, replay
from flashtile.kernel.hopper import backward, forward, schedule

SCALE = 0.125


class Launches:
    """What reached the C launcher: for each launch, every argument."""

    def __init__(self):
        self.made, self.counter = [], torch.zeros(1, dtype=torch.int32)

    def named(self, tensors):
        """Return the launches so far with names instead of addresses; other addresses count from the lowest one."""
        names = {t.data_ptr(): name for name, t in (tensors | {"counter": self.counter}).items()}
        made, self.made = self.made, []
        others = [a for args in made for a in map(self._address, args) if a is not None and a not in names]

        def named(arg):
            address = self._address(arg)
            place = arg if address is None else names.get(address, address - min(others, default=0))
            return ("map", place, arg.block) if isinstance(arg, SimpleNamespace) else place

        return [[named(arg) for arg in args] for args in made]

    @staticmethod
    def _address(arg):
        if isinstance(arg, torch.Tensor):
            return arg.data_ptr()
        if isinstance(arg, SimpleNamespace):
            return arg.address
        return arg if isinstance(arg, int) and arg > 2**32 else None


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


def tensors(n=64, head_dim=64, heads=(4, 2)):
    make = lambda h: torch.randn(2, h, n, head_dim).to(torch.bfloat16)  # noqa: E731
    q, do, o, k, v = (make(h) for h in (heads[0], heads[0], heads[0], heads[1], heads[1]))
    return {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": torch.randn(2, heads[0], n)}


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
PASSES = pytest.mark.parametrize(
    "run",
    [run_forward, backward_of(backward), forward_of(flash_attention_triton), backward_of(flash_attention_backward)],
    ids=["hopper-forward", "hopper-backward", "forward", "backward"],
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
    """Where q and k are one tensor, notes could not say which of them an address belongs to."""
    t = tensors(heads=(2, 2))
    t["k"] = t["q"]
    for _ in range(3):
        run(t)
    assert not replay._calls
    assert not was_again(launches, monkeypatch, run, t)


@PASSES
def test_notes_keep_no_tensor_alive(run, launches):
    t = tensors()
    for _ in range(3):
        run(t)
    (noted,) = replay._calls.values()
    assert not any(isinstance(arg, torch.Tensor) for launch in noted for arg in launch.args)


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


def test_a_whole_number_is_not_a_float():
    number, real = (replay._kinds((value, (value,))) for value in (2, 2.0))
    assert number != real


def test_what_is_worked_out_every_time(monkeypatch):
    """Masks that hold tensors, anything but plain attention, and GPUs without the direct launch."""
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: True)
    device = torch.device("cpu")
    assert replay.options("forward", device, mask.window(8, 0), (), None)
    assert not replay.options("forward", device, mask.document(torch.zeros(64, dtype=torch.int32)), (), None)
    document = mask.document(torch.zeros(64, dtype=torch.int32)) & mask.causal()
    assert not replay.options("forward", device, document, (), None)
    assert not replay.options("forward", device, mask.causal().without_ranges(), (), None)
    assert not replay.options("forward", device, mask.causal(), (), object())
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: False)
    assert not replay.options("forward", device, mask.causal(), (), None)


def test_a_profiler_sees_every_launch(launches, monkeypatch):
    t = tensors()
    for _ in range(3):
        run_forward(t)
    monkeypatch.setattr(launcher, "hooked", lambda: True)
    assert not was_again(launches, monkeypatch, run_forward, t)


def test_the_first_launch_of_a_kind_is_not_noted(monkeypatch):
    """It goes through Triton, which compiles."""
    monkeypatch.setattr(replay, "_calls", {})
    call = replay.Call(("test",), (torch.zeros(4),), torch.device("cpu"))
    with call.noted():
        launcher._thread.made.append((None, 1, (), []))
    assert not replay._calls
    assert not call.again()
