"""Importing the package: at once, with no GPU, and with no Triton."""

import os
import subprocess
import sys

import pytest

import flashtile

NO_TRITON = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def python(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **variables}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_loads_nothing_heavy():
    code = "import sys, flashtile; print([n for n in ('torch', 'triton', 'einx', 'numpy') if n in sys.modules])"
    assert python(code) == "[]"


def test_attention_needs_neither_triton_nor_dynamo():
    code = (
        "import sys, flashtile; flashtile.flash_attention; flashtile.FlashAttention; flashtile.explain;"
        "print([n for n in ('triton', 'einx', 'torch._dynamo', 'torch._inductor') if n in sys.modules])"
    )
    assert python(code) == "[]"


@pytest.mark.parametrize("before", ["", NO_TRITON], ids=["no-gpu", "no-triton"])
def test_cpu_tensors_are_served(before):
    code = before + (
        "import torch, flashtile\n"
        "q = torch.randn(1, 2, 9, 8, requires_grad=True)\n"
        "o, lse = flashtile.flash_attention(q, q, q, is_causal=True, return_lse=True)\n"
        "(o.sum() + lse.sum()).backward()\n"
        "want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)\n"
        "torch.testing.assert_close(o, want)\n"
        "flashtile.FlashAttention.apply(q[0], q[0], q[0], True).sum().backward()\n"
        "print(flashtile.explain(q, q, q).splitlines()[1].split()[2], q.grad.isfinite().all().item())"
    )
    assert python(code, CUDA_VISIBLE_DEVICES="") == "cpu: True"


def test_asking_for_triton_without_it_says_so():
    code = NO_TRITON + (
        "import torch, flashtile\n"
        "q = torch.randn(1, 2, 9, 8)\n"
        "import os; from flashtile.dispatch import select\n"
        "for environment in ({}, {'TRITON_INTERPRET': '1'}):\n"
        "    os.environ.update(environment); select.cache_clear()\n"
        "    try: flashtile.flash_attention(q, q, q, backend='triton')\n"
        "    except (ValueError, ImportError) as error: print(type(error).__name__, error)\n"
    )
    first, second = python(code, CUDA_VISIBLE_DEVICES="").splitlines()
    assert first.startswith("ValueError backend 'triton' serves GPU tensors")
    assert second.startswith("ModuleNotFoundError backend 'triton' needs the package triton")


def test_names():
    assert set(flashtile.__all__) <= set(dir(flashtile))
    for name in flashtile.__all__:
        assert getattr(flashtile, name) is not None
    assert flashtile.mask.causal().name == "causal"
    assert flashtile.score.Score.__name__ == "Score"
    assert flashtile.__version__.count(".") == 2


def test_star_import():
    code = "from flashtile import *; print(flash_attention.__name__, FlashAttention.__name__, mask.full().name)"
    assert python(code) == "flash_attention FlashAttention full"


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"no attribute 'attention_flash'; it has .*flash_attention"):
        _ = flashtile.attention_flash
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flashtile.kernel.nothing


def test_version_is_the_installed_one():
    from importlib.metadata import version

    assert flashtile.__version__ == version("flashtile")
