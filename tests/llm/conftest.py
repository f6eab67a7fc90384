"""What the language-model tests share: attention on the CPU's own path, tiny configs, a tiny corpus."""

from pathlib import Path

import pytest
from rich.console import Console

from flashtile import dispatch
from flashtile.llm import ModelConfig, TokenDataset, TrainingConfig, prepare_data

TINY = ModelConfig(vocab_size=300, context_length=16, d_model=32, num_layers=2, num_heads=4, num_heads_kv=2)
QUICK = TrainingConfig(
    steps=6,
    batch_size=4,
    max_lr=1e-2,
    min_lr=1e-3,
    warmup_steps=2,
    eval_interval=4,
    eval_sequences=4,
    log_interval=2,
    checkpoint_interval=3,
    device="cpu",
    tensorboard=False,
)


@pytest.fixture(scope="package", autouse=True)
def cpu_path():
    """CPU tensors get what they get without TRITON_INTERPRET: a model's worth of interpreted kernels takes too long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        dispatch.select.cache_clear()
        yield
    dispatch.select.cache_clear()


@pytest.fixture(scope="package")
def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture(scope="package")
def corpus(tmp_path_factory) -> Path:
    """A folder of small texts, with things beside them that are no text."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        lines = [f"def f{number}_{i}(x):\n    return x * {i * number} + {i}\n" for i in range(20)]
        (folder / f"part_{number:02}.py").write_text("\n".join(lines))
    (folder / "image.png").write_bytes(b"\x89PNG\0\0\xff\xfe")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "empty.txt").touch()
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "secret.txt").write_text("nothing to learn here")
    return folder


@pytest.fixture(scope="package")
def dataset(corpus, tmp_path_factory) -> TokenDataset:
    return prepare_data(corpus, vocab_size=300, val_fraction=0.1, cache_dir=tmp_path_factory.mktemp("cache"))
