"""What every test starts from: the interpreter without a GPU, seeds, fresh memory full of NaN, one thread a worker."""

import importlib.util
import os
import random

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; subprocesses inherit this
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode asks for it, before CUDA starts
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # read by Triton when it is imported, so it comes first
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    from tests import interpreter_bf16

    interpreter_bf16.install()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# A machine lent for its GPU may have torch and pytest but no command-line parser: the kernels can be tested there.
collect_ignore = [] if importlib.util.find_spec("tyro") else ["test_cli.py"]

hypothesis.settings.register_profile("flashtile", deadline=None, derandomize=True)
hypothesis.settings.load_profile("flashtile")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--portable", action="store_true", help="run the GPU tests on the portable kernels on sm_90 too")


def pytest_configure(config: pytest.Config) -> None:
    """With ``--portable``, have dispatch take the portable kernels where those for Hopper could serve."""
    if config.getoption("--portable"):
        from flashtile.kernel import hopper

        hopper.refusal = lambda *_: "is switched off by --portable"


@pytest.fixture(autouse=True)
def same_start(monkeypatch):
    """Seed every generator, and poison: in deterministic mode torch fills fresh memory with NaN (integers: maximum)."""
    # The mode is on for the filling alone: the kernels that it would rule out are to be tested too.
    monkeypatch.setattr("flashtile.kernel.autograd._told_deterministic", lambda: False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # warn_only: we want the filling, not an error for every operator without a deterministic variant.
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def cpu_path(monkeypatch):
    """CPU tensors get what they get without TRITON_INTERPRET. Choices are remembered: forget them before and after."""
    from flashtile import dispatch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch.select.cache_clear()
    yield
    dispatch.select.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End a worker whose GPU has faulted, once the failure is told: every later call in that process fails too."""
    if "PYTEST_XDIST_WORKER" in os.environ and report.failed and "AcceleratorError" in report.longreprtext:
        os._exit(1)
