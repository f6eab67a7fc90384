"""The direct launch: what goes through Triton once, what does not, and what counts as a new kind of launch."""

from types import SimpleNamespace

import pytest
import torch

from flashtile import mask
from flashtile.kernel.launch import LaunchConfig
from flashtile.score import Score

pytest.importorskip("triton")

from flashtile.kernel import launcher
from flashtile.kernel.launcher import Descriptor, operand, row_operand, strides_of

CONFIG = LaunchConfig(64, 64, 4, 2)


def _forward(where, q_idx, k_idx, s, args):
    return s


def _derivative(where, q_idx, k_idx, s, args):
    return 1.0


class FakeKernel:
    """Stands in for a jitted function: notes every launch that goes through Triton, and every direct one."""

    arg_names = ("x_src", "strides", "scale", "seqlen", "mask", "BLOCK")
    do_not_specialize = ("seqlen",)

    def __init__(self):
        self.through_triton, self.direct = [], []
        self.fn = lambda: None

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.through_triton.append((grid, args, options))
            raw = lambda *final: self.direct.append(final)  # noqa: E731
            metadata = SimpleNamespace(tensordesc_meta=[{"swizzle": 3}])
            run = SimpleNamespace(launch=raw)
            return SimpleNamespace(run=run, metadata=metadata, function="function", packed_metadata="packed")

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: True)
    monkeypatch.setattr(launcher, "prepare", lambda device: None)
    monkeypatch.setattr(launcher, "_as_triton", lambda arg: arg)
    monkeypatch.setattr(launcher, "_encode", lambda descriptor, encoding: [f"map of {tuple(descriptor.shape)}"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "_tensor_maps", {})
    return FakeKernel()


def launch(kernel, x, *, strides=(64, 1), scale=0.5, seqlen=100, mask_value=None, config=CONFIG, programs=3):
    mask_value = mask.causal() if mask_value is None else mask_value
    device = torch.device("cuda", 0)
    args = (x, strides, scale, seqlen, mask_value.on_device())
    launcher.run(kernel, programs, device, args, {"BLOCK": 64}, config)


def descriptor(rows=128, dtype=torch.float16):
    t = torch.zeros(1, 1, rows, 64, dtype=dtype)
    return Descriptor(t, t.shape, t.stride(), (1, 1, 64, 64))


def test_the_second_launch_is_direct_with_the_same_arguments(kernel):
    x = descriptor()
    launch(kernel, x)
    launch(kernel, x, scale=0.25, seqlen=7777, programs=5)
    assert len(kernel.through_triton) == 1
    assert len(kernel.direct) == 1
    programs, _, _, stream, function, *_ = kernel.direct[0]
    assert (programs, stream, function) == (5, 7, "function")
    device_mask = mask.causal().on_device()
    assert kernel.direct[0][-6:] == ("map of (1, 1, 128, 64)", (64, 1), 0.25, 7777, device_mask, 64)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"strides": (64, 1)}, {"strides": (65, 1)}),
        ({"seqlen": 100}, {"seqlen": 2**31}),
        ({"mask_value": mask.causal()}, {"mask_value": mask.full()}),
        ({"config": CONFIG}, {"config": LaunchConfig(64, 32, 4, 2)}),
        ({"scale": 1.0}, {"scale": None}),
    ],
    ids=["strides", "64-bit length", "mask", "config", "type"],
)
def test_what_triton_may_compile_anew_goes_through_triton(kernel, first, second):
    launch(kernel, descriptor(), **first)
    launch(kernel, descriptor(), **second)
    assert len(kernel.through_triton) == 2
    launch(kernel, descriptor(), **first)
    launch(kernel, descriptor(), **second)
    assert len(kernel.through_triton) == 2


def test_dtype_and_alignment_of_a_tensor_count(kernel):
    x = torch.zeros(64, dtype=torch.float16)
    for t in (x, x.float(), x[1:], x[8:], x[16:]):
        launch(kernel, t)
    assert len(kernel.through_triton) == 3  # float16, float32, float16 off a 16-byte boundary


def test_no_tensor_is_kept_alive(kernel):
    import weakref

    x = torch.zeros(64)
    gone = weakref.ref(x)
    launch(kernel, x)
    launch(kernel, x)
    kernel.through_triton.clear()
    kernel.direct.clear()
    del x
    assert gone() is None


def test_arguments_of_values_count_by_kind():
    def key(*args):
        return launcher._key((Score("s", _forward, _derivative, args).on_device(),))

    assert key(2) != key(2.0)
    assert key(2.0) == key(3.0)
    assert key(torch.zeros(16)) == key(torch.ones(16))
    assert key((torch.zeros(16),)) != key((torch.zeros(16).half(),))


def test_a_profiler_sees_every_launch(kernel, monkeypatch):
    from triton import knobs

    launch(kernel, descriptor())
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    launch(kernel, descriptor())
    assert len(kernel.through_triton) == 2


def test_operands_become_descriptors_where_the_copy_engine_can_read_them(monkeypatch):
    monkeypatch.setattr(launcher, "has_copy_engine", lambda device: True)
    t = torch.zeros(2, 3, 40, 64, dtype=torch.bfloat16)
    source, strides = operand(t, 32)
    assert isinstance(source, Descriptor)
    assert (strides, source.block) == ((), (1, 1, 32, 64))
    odd = [
        t.float(),
        t[..., :48],
        t[..., ::2],
        t[..., 1:33],
        torch.zeros(2, 3, 40, 68, dtype=torch.bfloat16)[..., :64],
        torch.zeros(2, 3, 0, 64, dtype=torch.bfloat16),
    ]
    for other in odd:
        source, strides = operand(other, 32)
        assert source is other
        assert strides == strides_of(other)
    assert isinstance(operand(t[:, :, :, :32], 32)[0], Descriptor)
    assert isinstance(operand(t.transpose(1, 2), 2)[0], Descriptor)
    rows = torch.zeros(6, 40)
    assert row_operand(rows, 38, 16) == Descriptor(rows, (6, 38), (40, 1), (1, 16))


@pytest.mark.gpu
def test_a_direct_launch_gives_the_same_bits():
    from flashtile.kernel.flash_attention_triton import forward

    options = {"softmax_scale": 0.1, "mask": mask.causal()}
    for seqlen in (100, 101, 128):  # the same compiled kernel for all
        q, k, v = (torch.randn(2, 3, seqlen, 64, device="cuda", dtype=torch.float16) for _ in range(3))
        first, second = forward(q, k, v, **options), forward(q, k, v, **options)
        copies = forward(q.clone(), k.clone(), v.clone(), **options)
        for a, b, c in zip(first, second, copies, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.gpu
def test_a_fresh_thread_has_a_context():
    import threading

    from flashtile import flash_attention

    q = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.float16)
    want, got = flash_attention(q, q, q), []
    thread = threading.Thread(target=lambda: got.append(flash_attention(q, q, q)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], want)


def test_strides_in_units_of_16_bytes_where_rows_are_dense_and_aligned():
    t = torch.zeros(2, 3, 40, 72, dtype=torch.float16)
    assert strides_of(t) == tuple(stride // 8 for stride in t.stride()[:3])
    assert strides_of(t.float()) == tuple(stride // 4 for stride in t.stride()[:3])
    for other in (t[..., ::2], t[..., 1:], t[..., :71].contiguous(), t.transpose(2, 3)):
        assert strides_of(other) == other.stride()
