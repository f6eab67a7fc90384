"""Where results go in memory, for real, fake and symbolic tensors."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from flashtile.kernel.layout import as_4d, empty_in_order_of

B, H, N, D = 2, 3, 5, 4
LAYOUTS = {  # name: (a (B, H, N, D) tensor, strides wanted of a new (B, H, N, 7) tensor)
    "bhnd": (torch.empty(B, H, N, D), (105, 35, 7, 1)),
    "bnhd": (torch.empty(B, N, H, D).transpose(1, 2), (105, 7, 21, 1)),
    "nbhd": (torch.empty(N, B, H, D).permute(1, 2, 0, 3), (21, 7, 42, 1)),
    "hbnd": (torch.empty(H, B, N, D).transpose(0, 1), (35, 70, 7, 1)),
    "fused-projection": (torch.empty(B, N, 3, H, D)[:, :, 1].transpose(1, 2), (105, 7, 21, 1)),
    "every-other-row": (torch.empty(B, H, 2 * N, D)[:, :, ::2], (105, 35, 7, 1)),
    "last-stride-2": (torch.empty(B, H, N, 2 * D)[..., ::2], (105, 35, 7, 1)),
    "last-dim-outermost": (torch.empty(D, B, N, H).permute(1, 3, 2, 0), (105, 7, 21, 1)),
    "expanded-heads": (torch.empty(B, 1, N, D).expand(B, H, N, D), (105, 35, 7, 1)),
    "expanded-last": (torch.empty(B, N, H, 1).expand(B, N, H, D).transpose(1, 2), (105, 7, 21, 1)),
    "overlapping": (torch.empty(100).as_strided((B, H, N, D), (1, 1, 1, 1)), (105, 35, 7, 1)),
}


@pytest.mark.parametrize(("t", "strides"), LAYOUTS.values(), ids=LAYOUTS)
def test_strides_follow_the_input(t, strides):
    new = empty_in_order_of(t, (B, H, N, 7))
    assert new.shape == (B, H, N, 7)
    assert new.stride() == strides
    assert new.dtype == t.dtype


@pytest.mark.parametrize(("t", "strides"), LAYOUTS.values(), ids=LAYOUTS)
def test_fake_strides_are_the_real_ones(t, strides):
    with FakeTensorMode() as mode:
        assert empty_in_order_of(mode.from_tensor(t), (B, H, N, 7)).stride() == strides


@pytest.mark.parametrize("name", ["bhnd", "bnhd", "nbhd", "fused-projection"])
def test_symbolic_sizes(name):
    t, strides = LAYOUTS[name]
    env = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 4)
    with FakeTensorMode(shape_env=env) as mode:
        fake = mode.from_tensor(t, symbolic_context=context)
        new = empty_in_order_of(fake, (*fake.shape[:3], 7))
    assert all(isinstance(size, torch.SymInt) for size in fake.shape)
    assert tuple(int(stride) for stride in new.stride()) == strides


def test_sizes_of_one_decide_nothing():
    t = torch.empty(1, 3, 1, 4).as_strided((1, 3, 1, 4), (1, 4, 999, 1))
    assert empty_in_order_of(t, (1, 3, 1, 4)).is_contiguous()


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 3, 0, 4), (2, 0, 5, 4)])
def test_empty_tensors(shape):
    t = torch.empty(shape).transpose(1, 2)
    assert empty_in_order_of(t, t.shape).shape == t.shape


def test_dtype_can_be_given():
    t = torch.empty(B, N, H, D, dtype=torch.bfloat16).transpose(1, 2)
    new = empty_in_order_of(t, t.shape, torch.float32)
    assert new.dtype == torch.float32
    assert new.stride() == t.stride()


@pytest.mark.parametrize(
    ("t", "shape"),
    [
        (torch.empty(3, 5, 4), (1, 3, 5, 4)),
        (torch.empty(2, 3, 5, 4), (2, 3, 5, 4)),
        (torch.empty(2, 6, 3, 5, 4), (12, 3, 5, 4)),
        (torch.empty(2, 6, 5, 3, 4).transpose(2, 3), (12, 3, 5, 4)),
        (torch.empty(2, 1, 6, 3, 5, 4), (12, 3, 5, 4)),
        (torch.empty(2, 0, 3, 5, 4), (0, 3, 5, 4)),
    ],
    ids=lambda value: "x".join(map(str, value.shape if isinstance(value, torch.Tensor) else value)),
)
def test_as_4d_is_a_view(t, shape):
    view = as_4d(t)
    assert view.shape == shape
    assert view.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()


def test_as_4d_copies_what_cannot_merge():
    t = torch.randn(6, 2, 3, 5, 4).transpose(0, 1)
    assert torch.equal(as_4d(t), t.reshape(12, 3, 5, 4))
