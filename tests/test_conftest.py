"""The ground the other tests stand on: poisoned memory, fixed seeds, bfloat16 in the interpreter."""

import os

import pytest
import torch

from tests import interpreter_bf16

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fresh_memory_is_nan(dtype, device):
    options = {"dtype": dtype, "device": device}
    like = torch.zeros(3, 5, **options)
    for fresh in (
        torch.empty(3, 5, **options),
        torch.empty_like(like),
        torch.empty_strided((3, 5), (1, 3), **options),
        torch.empty_permuted((3, 5), (1, 0), **options),
        like.new_empty(3, 5),
        like.new_empty_strided((3, 5), (5, 1)),
    ):
        assert fresh.isnan().all()


def test_same_start_a():
    assert torch.rand(()).item() == pytest.approx(0.4962566)


def test_same_start_b():
    assert torch.rand(()).item() == pytest.approx(0.4962566)


def test_interpreter_without_a_gpu():
    assert torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") is not None


def test_bfloat16_conversion():
    x = torch.cat([torch.randn(1000), torch.randn(1000) * 1e30, torch.randn(1000) * 1e-39])
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1.00390625])
    x = torch.cat([x, special])
    expected = x.bfloat16()
    got = torch.from_numpy(interpreter_bf16.from_float32(x.numpy()).view("int16")).view(torch.bfloat16)
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(got.isnan(), x.isnan())
    back = torch.from_numpy(interpreter_bf16.to_float32(expected.view(torch.int16).numpy().view("uint16")))
    assert torch.equal(back.nan_to_num(7.0), expected.float().nan_to_num(7.0))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="only the interpreter is repaired")
class TestInterpreterBfloat16:
    """Kernels with bfloat16 operands give what PyTorch gives."""

    def test_dot(self):
        kernels = pytest.importorskip("tests.bf16_kernels")
        a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
        out = torch.empty(16, 16)
        kernels.dot[(1,)](a, b, out, 16, 32)
        torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32], ids=str)
    def test_casts(self, dtype):
        kernels = pytest.importorskip("tests.bf16_kernels")
        x = (torch.randn(256) * 100).to(dtype)
        out = torch.empty(256, dtype=torch.bfloat16)
        kernels.copy[(1,)](x, out, 256)
        assert torch.equal(out, x.bfloat16())
        back = torch.empty(256, dtype=dtype)
        kernels.copy[(1,)](out, back, 256)
        assert torch.equal(back, out.to(dtype))

    def test_arithmetic(self):
        kernels = pytest.importorskip("tests.bf16_kernels")
        x, y = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
        out = torch.empty(6, 256, dtype=torch.bfloat16)
        kernels.arithmetic[(1,)](x, y, out, 256)
        expected = torch.stack([x + y, x - y, x * y, -x, torch.maximum(x, y), torch.where(x < y, x, y * 2)])
        assert torch.equal(out, expected)
