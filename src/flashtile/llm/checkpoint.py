"""Files that survive a crash: training checkpoints to resume from, model folders to generate from."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO

import safetensors.torch
import torch
from torch import nn

from flashtile.llm.atomic import atomic_write
from flashtile.llm.config import Attention, ModelConfig, TrainingConfig
from flashtile.llm.tokenizer import Tokenizer
from flashtile.llm.transformer import TransformerLM

Source = str | os.PathLike[str] | BinaryIO | IO[bytes]


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    iteration: int,
    out: Source,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write weights, optimizer state and iteration to a path (atomically) or an open binary file.

    `extra` may add tensors and plain values, such as generator states; `read_checkpoint` returns them.
    """
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "iteration": iteration,
        "extra": extra or {},
    }
    if isinstance(out, (str, os.PathLike)):
        with atomic_write(out) as file:
            torch.save(state, file)
    else:
        torch.save(state, out)


def read_checkpoint(src: Source, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the dictionary that `save_checkpoint` wrote: "model", "optimizer", "iteration" and "extra".

    Nothing but tensors and plain values is unpickled, so a checkpoint of unknown origin cannot run code.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a checkpoint.
    """
    if isinstance(src, (str, os.PathLike)) and not Path(src).exists():
        raise FileNotFoundError(f"there is no checkpoint at {Path(src)}")
    if not _is_zip(src):
        raise ValueError(f"{src} is not a checkpoint, or a damaged one: torch.save writes zip files, and it is none")
    try:
        state = torch.load(src, map_location=map_location, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{src} is not a checkpoint, or a damaged one: {error}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "iteration"} <= state.keys():
        raise ValueError(f"{src} is not a checkpoint: it lacks 'model', 'optimizer' or 'iteration'")
    return state


def saved_configs(run: str | os.PathLike[str]) -> tuple[ModelConfig, TrainingConfig]:
    """Return what the run in a folder was started with, read off its checkpoint; raises as `read_checkpoint` does."""
    extra = read_checkpoint(Path(run, "checkpoint.pt"))["extra"]
    return ModelConfig(**extra["model_config"]), TrainingConfig(**extra["training_config"])


def _is_zip(src: Source) -> bool:
    if isinstance(src, (str, os.PathLike)):
        return zipfile.is_zipfile(src)
    place = src.tell()
    try:
        return zipfile.is_zipfile(src)
    finally:
        src.seek(place)


def load_checkpoint(src: Source, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Restore weights and, if given, the optimizer from a path or open binary file; return the iteration.

    Raises:
        ValueError: if the weights' names or shapes are not the model's; the message lists them.
    """
    state = read_checkpoint(src)
    restore(state, model, optimizer)
    return state["iteration"]


def restore(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Put a read checkpoint's weights and optimizer state in place; ValueError if they are another model's."""
    check_state(state["model"], model)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def check_state(state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Raise ValueError unless `state` has exactly the model's names and shapes."""
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    have = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [
        f"{name}: {have.get(name, 'missing')} instead of {want.get(name, 'nothing')}"
        for name in [*want, *(name for name in have if name not in want)]
        if have.get(name) != want.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ValueError(f"the checkpoint is of another config: {'; '.join(wrong[:4])}{more}")


def check_config(have: dict[str, Any], want: ModelConfig) -> None:
    """Raise ValueError naming the fields in which a saved model differs from `want`; `attention` may differ."""
    wanted = want.to_dict()
    wrong = [
        f"{name} is {have.get(name)!r}, wanted {value!r}"
        for name, value in wanted.items()
        if name != "attention" and have.get(name) != value
    ]
    if wrong:
        raise ValueError(f"the checkpoint is of another config: {'; '.join(wrong)}")


def save_model(model: TransformerLM, tokenizer: Tokenizer, directory: str | os.PathLike[str]) -> None:
    """Write `model.safetensors`, `config.json` and `tokenizer.json`, each atomically."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["lm_head.weight"]  # the same tensor as the embedding's
    with atomic_write(Path(directory, "model.safetensors")) as file:
        file.write(safetensors.torch.save(weights))
    with atomic_write(Path(directory, "config.json")) as file:
        file.write(json.dumps(model.config.to_dict(), indent=2).encode())
    tokenizer.save(Path(directory, "tokenizer.json"))


def load_model(
    directory: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    attention: Attention | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[TransformerLM, Tokenizer]:
    """Read what `save_model` wrote, ready to generate (in eval mode).

    Args:
        directory: the model's folder, or that of the run which left it there under the name `model`.
        attention: overrides the setting that the model was trained with.
        dtype: of the weights; None keeps them as saved.

    Raises:
        FileNotFoundError: if one of the three files is missing.
        ValueError: if one of them is damaged, or does not go with the others.
    """
    folder = Path(directory)
    if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
        folder = folder / "model"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} holds no trained model: {name} is missing")
    config = _read_config(folder / "config.json")
    if attention is not None:
        config = replace(config, attention=attention)
    try:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / 'model.safetensors'} is damaged: {error}") from error
    if config.tie_embeddings and "token_embeddings.weight" in weights:
        weights["lm_head.weight"] = weights["token_embeddings.weight"]
    model = TransformerLM.from_config(config)
    check_state(weights, model)
    model.load_state_dict(weights)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'} is another model's: it has {tokenizer.vocab_size:,} tokens, "
            f"the model a vocab_size of {config.vocab_size:,}"
        )
    return model.to(device=device, dtype=dtype).eval(), tokenizer


def _read_config(path: Path) -> ModelConfig:
    try:
        return ModelConfig(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the configuration of a model: {error}") from error
