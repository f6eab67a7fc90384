"""Which backend serves what, and what explain() says about it."""

import dataclasses
import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
import torch

import flashtile
from flashtile import dispatch
from flashtile.dispatch import Problem, explain, select
from flashtile.kernel import backend as backends
from flashtile.kernel import hopper, launch
from flashtile.kernel.layout import copied_in_blocks

TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="triton is not installed")


@pytest.fixture(autouse=True)
def fresh():
    """Forget plans: some tests change the environment that they come from."""
    select.cache_clear()
    yield
    select.cache_clear()


other_triton = hopper._other_triton


@pytest.fixture
def plain_cpu(monkeypatch):
    """No interpreter; and the Triton whose Gluon the kernels for Hopper are written in, whichever is installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(hopper, "_other_triton", lambda: None)


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)


def problem(device_type="cpu", arch="cpu", dtype=torch.float32, **changes):
    return Problem(device_type, arch, dtype, 2, 6, 2, 33, 70, 64, 32, True)._replace(**changes)


H200 = problem("cuda", "sm_90", torch.bfloat16, head_dim=128, head_dim_v=128)


def test_problem_is_read_off_tensors():
    q, k, v = torch.empty(2, 6, 33, 64), torch.empty(2, 2, 70, 64), torch.empty(2, 2, 70, 32)
    assert Problem.of(q, k, v, True) == problem()


def test_cpu_tensors_go_to_pytorch(plain_cpu):
    plan = select(problem())
    assert (plan.backend, plan.launch) == ("cpu", {})
    assert "TRITON_INTERPRET=1" in plan.rejected["triton"]


@needs_triton
def test_cpu_tensors_go_to_the_interpreter_when_told(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plan = select(problem())
    assert plan.backend == "triton"
    assert plan.launch["forward"] == launch.lookup("forward", "interpreter", 64, 32, torch.float32)
    assert "could serve this too" in plan.rejected["cpu"]
    assert select(problem(), "cpu").backend == "cpu"
    assert select(problem(dtype=torch.float64)).backend == "cpu"


@needs_triton
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_gpu_tensors_go_to_triton_with_the_table_s_configurations(plain_cpu, arch):
    plan = select(H200._replace(arch=arch), "triton")
    assert (plan.backend, plan.backward) == ("triton", "triton")
    assert set(plan.launch) == set(launch.KERNELS)
    for kernel, config in plan.launch.items():
        assert config == launch.lookup(kernel, arch, 128, 128, torch.bfloat16)
    assert select(H200._replace(arch="sm_80")).backend == "triton"


@needs_triton
def test_hopper_gpus_have_kernels_of_their_own(plain_cpu):
    plan = select(H200)
    assert plan == dataclasses.replace(select(H200, "hopper"), reason=plan.reason, rejected=plan.rejected)
    assert "compute capability 9.0" in plan.reason
    assert (plan.backend, plan.backward) == ("hopper", "hopper")
    assert set(plan.launch) == {"hopper_forward", "hopper_backward"}
    for kernel, config in plan.launch.items():
        assert config == launch.lookup_hopper(kernel, 128, 128, torch.bfloat16)
    assert "could serve this too" in plan.rejected["triton"]


LEFT_TO_TRITON = {  # name: (what is different, what the reason holds)
    "another-gpu": ({"arch": "sm_100"}, "not for sm_100"),
    "float32": ({"dtype": torch.float32}, "not in float32"),
    "wide": ({"head_dim": 512, "head_dim_v": 512}, "head_dim up to 256"),
    "odd": ({"head_dim_v": 60}, "multiple of 8"),
    "strides": ({"copied_in_blocks": False}, "multiples of 16 bytes"),
    "dropout": ({"asks": ("dropout",)}, "dropout"),
    "max-logits": ({"asks": ("max_logits",)}, "largest logits"),
}


@needs_triton
@pytest.mark.parametrize(("changes", "reason"), LEFT_TO_TRITON.values(), ids=LEFT_TO_TRITON)
def test_what_the_hopper_kernels_leave_to_the_portable_ones(plain_cpu, changes, reason):
    plan = select(H200._replace(**changes))
    assert (plan.backend, plan.backward) == ("triton", "triton")
    assert reason in plan.rejected["hopper"]
    with pytest.raises(ValueError, match="backend 'hopper'"):
        select(H200._replace(**changes), "hopper")


@needs_triton
def test_deterministic_gradients_keep_the_kernels(plain_cpu):
    plan = select(H200._replace(asks=("deterministic gradients",)))
    assert (plan.backend, plan.backward) == ("hopper", "hopper")


@needs_triton
def test_another_triton_has_another_gluon(plain_cpu, monkeypatch):
    monkeypatch.setattr(hopper, "TRITON", "2.0")
    monkeypatch.setattr(hopper, "_other_triton", other_triton.__wrapped__)
    plan = select(H200)
    assert (plan.backend, "Gluon of Triton 2.0" in plan.rejected["hopper"]) == ("triton", True)


def test_what_the_copy_engine_can_read():
    t = torch.empty(2, 3, 8, 16, dtype=torch.bfloat16)
    assert copied_in_blocks(t)
    assert copied_in_blocks(t.transpose(1, 2))
    assert copied_in_blocks(t[:, :, ::2])
    assert copied_in_blocks(t[:, :1].expand(2, 3, 8, 16))
    assert copied_in_blocks(torch.empty(1, 1, 5, 20, dtype=torch.bfloat16)[..., :16]) is False  # rows of 40 bytes
    assert copied_in_blocks(t.mT) is False
    assert copied_in_blocks(t[..., 1:9]) is False
    assert copied_in_blocks(t[:0]) is False


REFUSED = {  # name: (problem, backend, error, what its text holds)
    "cpu-for-gpu": (H200, "cpu", ValueError, ("'cpu'", "CPU tensors", "cuda")),
    "triton-for-cpu": (problem(), "triton", ValueError, ("'triton'", "GPU tensors", "TRITON_INTERPRET=1")),
    "unknown": (problem(), "hip", ValueError, ("backend is 'hip'", "'hopper', 'triton', 'cpu'")),
    "triton-for-float64": (problem(dtype=torch.float64), "triton", TypeError, ("float32 at most", "float64")),
    "float64-on-gpu": (problem("cuda", "sm_90", torch.float64), None, TypeError, ("float64", "triton", "cpu")),
    "device": (problem("mps", "mps"), None, ValueError, ("no backend serves", "not on mps")),
}


@pytest.mark.parametrize(("request_", "backend", "error", "texts"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_what_is_missing(plain_cpu, request_, backend, error, texts):
    with pytest.raises(error) as met:
        select(request_, backend)
    for text in texts:
        assert text in str(met.value)
    assert "not served" in explain(request_, backend=backend)


@pytest.mark.parametrize("backend", [None, "triton", "hopper"])
def test_without_triton_a_gpu_request_names_the_package(no_triton, backend):
    with pytest.raises(ModuleNotFoundError, match="needs the package triton"):
        select(H200, backend)


def test_without_triton_cpu_tensors_are_served(no_triton, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select(problem()).backend == "cpu"


@needs_triton
def test_explain_of_a_gpu_that_need_not_be_here(plain_cpu):
    text = explain(H200, backend="hopper")
    config = launch.lookup_hopper("hopper_backward", 128, 128, torch.bfloat16)
    for piece in (
        "q (2, 6, 33, 128)",
        "bfloat16 on sm_90, causal",
        "served by     hopper: asked for",
        f"{config.block_m} queries x {config.block_n} keys, {config.consumers} consumer warpgroups",
        "not chosen    cpu: serves CPU tensors",
    ):
        assert piece in text
    assert all(len(line) < 140 for line in text.splitlines())


def test_explain_of_tensors(plain_cpu):
    q = torch.empty(2, 3, 4, 9, 16)
    text = flashtile.explain(q, q, q)
    assert "q (6, 4, 9, 16)" in text
    assert "served by     cpu" in text
    assert "asked for" in flashtile.explain(q, q, q, backend="cpu")


def test_explain_takes_every_option_of_attention(plain_cpu):
    given = inspect.signature(flashtile.flash_attention).parameters
    assert set(given) == set(inspect.signature(explain).parameters)
    q = torch.empty(2, 4, 9, 16)
    text = explain(q, q, q, softmax_scale=0.5, deterministic=True, return_lse=True, return_max_logits=True)
    assert "served by     cpu" in text
    assert "plain PyTorch operations" in explain(q, q, q, differentiable_twice=True)
    assert "not served" in explain(q, q, q, differentiable_twice=True, backend="cpu")
    with pytest.raises(TypeError, match="deterministic is 'no', but wants True or False"):
        explain(q, q, q, deterministic="no")  # pyright: ignore[reportArgumentType]


INTERPRETED = """
import torch, flashtile
q = torch.randn(1, 1, 8, 16, dtype=torch.bfloat16)
assert flashtile.explain(q, q, q).splitlines()[1].split()[2] == "cpu:"
try:
    flashtile.flash_attention(q, q, q, backend="triton")
except TypeError as error:
    print(error)
"""


@needs_triton
def test_bfloat16_is_not_left_to_an_interpreter_that_reads_it_wrongly():
    """In a process whose interpreter nobody repaired, unlike this one."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "serves float32 and float16 in Triton's interpreter (TRITON_INTERPRET=1), not bfloat16" in run.stdout


@needs_triton
def test_a_repaired_interpreter_serves_bfloat16():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: the interpreter is off")
    assert select(problem(dtype=torch.bfloat16), "triton").backend == "triton"


def test_explain_names_what_a_request_carries(plain_cpu):
    q = torch.empty(2, 4, 9, 16)
    softcap = flashtile.score.softcap(30.0)
    text = explain(q, q, q, is_causal=True, mask=flashtile.mask.window(3, 0), score=softcap, dropout_p=0.1)
    assert "float32 on cpu, mask window(3, 0), causal, score softcap, dropout 0.1" in text
    assert "causal, sinks" in explain(q, q, q, is_causal=True, sinks=torch.zeros(4))
    assert "a mask of (9, 9)" in explain(q, q, q, mask=torch.ones(9, 9, dtype=torch.bool))


@needs_triton
def test_wide_heads_have_a_forward_launch_only(plain_cpu):
    assert set(select(problem("cuda", "sm_90", torch.bfloat16, head_dim=512, head_dim_v=512)).launch) == {"forward"}


def test_explain_checks_its_tensors():
    q = torch.empty(2, 4, 9, 16)
    with pytest.raises(ValueError, match="head_dim"):
        explain(q, q[..., :8], q)


@needs_triton
def test_an_architecture_without_a_row_is_explained(plain_cpu):
    assert "no launch configuration" in explain(problem("cuda", "sm_10", torch.float16))


def test_choosing_is_cheap(plain_cpu):
    before = select.cache_info()
    q = torch.empty(1, 2, 8, 16)
    for _ in range(3):
        flashtile.flash_attention(q, q, q)
    after = select.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 2)


@pytest.mark.parametrize("name", backends.NAMES)
def test_backends_have_both_passes(name):
    if name != "cpu" and not TRITON:
        pytest.skip("triton is not installed")
    loaded = backends.load(name)
    assert loaded.name == name
    assert callable(loaded.forward)
    assert callable(loaded.backward)
    assert backends.load(name) is loaded


def test_error_reaches_the_caller_of_attention():
    code = "import torch, flashtile; q = torch.ones(1, 2, 4, 8); flashtile.flash_attention(q, q, q, backend='triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "ValueError: backend 'triton' serves GPU tensors" in run.stderr


@pytest.mark.gpu
def test_on_this_gpu():
    q = torch.empty(2, 4, 64, 128, device="cuda", dtype=torch.bfloat16)
    arch = launch.arch_of(q.device)
    plan = select(Problem.of(q, q, q))
    assert plan.backend == plan.backward == ("hopper" if arch == "sm_90" else "triton")
    assert arch in explain(q, q, q)


def test_deterministic_algorithms_are_asked_for_by_either_switch(monkeypatch):
    asked = []
    monkeypatch.setattr("flashtile.kernel.autograd._told_deterministic", torch.are_deterministic_algorithms_enabled)
    monkeypatch.setattr(
        "flashtile.kernel.autograd.select",
        lambda problem, backend: asked.append(problem.asks) or select(problem, "cpu"),
    )
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode, warn_only=True)
        for deterministic in (False, True):
            flashtile.flash_attention(q, q, q, deterministic=deterministic, backend="cpu").sum().backward()
            assert asked[-1] == (("deterministic gradients",) if mode or deterministic else ())
