"""The training loop: draw batches, accumulate gradients, clip, step, report, save."""

from __future__ import annotations

import importlib
import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from flashtile import dispatch
from flashtile.kernel.check import MAX_HEAD_DIM
from flashtile.llm.atomic import replacing
from flashtile.llm.checkpoint import check_config, read_checkpoint, restore, save_checkpoint, save_model
from flashtile.llm.config import ModelConfig, TrainingConfig
from flashtile.llm.data import (
    TokenDataset,
    check_length,
    find_corpus,
    get_batch,
    open_data,
    prepare_data,
    token_key,
    windows,
)
from flashtile.llm.functional import IGNORE_INDEX, cross_entropy
from flashtile.llm.metrics import History, MetricLog, device_name, flops_per_token, peak_flops
from flashtile.llm.optimizer import clip_gradients, cosine_lr, make_optimizer
from flashtile.llm.transformer import TransformerLM

Batch = tuple[Tensor, Tensor]
# What a new run replaces in its folder; the plot is the demonstration's.
_LEFT_BY_A_RUN = ("checkpoint.pt", "model", "metrics.jsonl", "tensorboard", "loss.png")


def preload() -> None:
    """Import what a run would import at its start, torch's compiler and TensorBoard, as far as they are there."""
    for name in ("torch._dynamo", "torch.utils.tensorboard"):
        with suppress(ImportError):
            importlib.import_module(name)


class RunExistsError(FileExistsError):
    """A folder holds a run, and nothing says what to do with it."""


def train(
    model_config: ModelConfig,
    training_config: TrainingConfig,
    out_dir: Path | str,
    *,
    data: Path | str | TokenDataset | None = None,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> History:
    """Train a model and leave it in `out_dir`: `model/`, `checkpoint.pt`, `metrics.jsonl`, `tensorboard/`, `data/`.

    Args:
        data: text file or folder, None for the Python standard library's sources, or a dataset from `prepare_data`.
            A resumed run goes on with its own tokens, and None means those.
        resume: continue the run in `out_dir` from its checkpoint. On a CPU every later number is, bit for bit, what an
            uninterrupted run gives.
        overwrite: start afresh although `out_dir` holds a run. That one comes back if this one ends before its first
            checkpoint.
        console: where progress is shown; `Console(quiet=True)` for silence.

    Returns:
        the losses and speeds of all steps, those before a resumption included. Ctrl-C ends the run after the current
        step, with a checkpoint, and `interrupted` is set; a second Ctrl-C ends it at once, but never within a save.

    Raises:
        FileNotFoundError, ValueError: for missing data or checkpoints, and values that do not fit together.
        TypeError, ImportError, NotImplementedError: if flashtile is to compute attention and cannot here.
        RunExistsError: if `out_dir` holds a run and neither `resume` nor `overwrite` says what to do with it.
        FloatingPointError: if the loss is no longer finite.
    """
    console = console or Console()
    run = Path(out_dir)
    checkpoint_path = run / "checkpoint.pt"
    if checkpoint_path.exists() and not (resume or overwrite):
        raise RunExistsError(f"{run} holds a run already: resume it (resume=True) or start afresh (overwrite=True)")
    check_attention_runs(model_config, training_config)
    saved = read_checkpoint(checkpoint_path) if resume else None
    if saved is not None:
        check_config(saved["extra"]["model_config"], model_config)
        if saved["iteration"] > training_config.steps:
            raise ValueError(
                f"steps is {training_config.steps}, but the run in {run} is past that: it has done {saved['iteration']}"
            )
    dataset = _dataset(data, run, saved, model_config, training_config, console)
    if dataset.tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"vocab_size must hold the tokenizer's {dataset.tokenizer.vocab_size} tokens, got {model_config.vocab_size}"
        )
    check_length(dataset.train, model_config.context_length, "the training split")
    check_length(dataset.val, model_config.context_length, "the validation split")
    for leftover in run.glob(".*.tmp"):  # what a kill in the middle of a write has left
        leftover.unlink()
    # What an earlier run left must not be taken for this one's if this one is killed before it saves.
    try:
        with replacing(run, _LEFT_BY_A_RUN, checkpoint_path.name) if saved is None else nullcontext():
            return Trainer(model_config, training_config, dataset, run, saved).run(console)
    except KeyboardInterrupt:
        left = "is as at its last checkpoint" if checkpoint_path.exists() else "has no checkpoint yet"
        console.print(f"Stopped at once: {run} {left}.", soft_wrap=True, markup=False, highlight=False)
        raise


def _dataset(
    data: Path | str | TokenDataset | None,
    run: Path,
    saved: dict | None,
    model_config: ModelConfig,
    training_config: TrainingConfig,
    console: Console,
) -> TokenDataset:
    """Return the tokens to train on; where a run goes on its own, even if their text is not there any more."""
    if isinstance(data, TokenDataset):
        return data
    say = partial(console.print, soft_wrap=True, markup=False)
    if saved is not None:
        key = saved["extra"]["data_key"]
        own = run / "data" / key
        its_name = _name_of(own)
        if data is not None:
            corpus = find_corpus(data)
            if token_key(corpus, model_config.vocab_size) != key:
                what = "that has changed since" if corpus.name == its_name else f"not {corpus.name}"
                raise ValueError(
                    f"data: the run in {run} learns from {its_name or 'other text'}, {what}; it goes on with its own "
                    f"tokens if no data is named"
                )
        if its_name:
            say(f"Going on with {its_name}, tokenized earlier.")
            return open_data(own, val_fraction=training_config.val_fraction, say=say)
        if data is None:
            raise FileNotFoundError(f"data: the run's tokens are missing from {own}; name the data it was started with")
    return prepare_data(
        data,
        vocab_size=model_config.vocab_size,
        val_fraction=training_config.val_fraction,
        cache_dir=run / "data",
        context_length=model_config.context_length,
        say=say,
    )


def _name_of(folder: Path) -> str:
    """Return what the text in a folder of tokens is called, nothing if there are none."""
    meta = folder / "meta.json"
    return json.loads(meta.read_text())["corpus"] if meta.exists() else ""


class Trainer:
    """A run in progress: the model, its optimizer, the place in the data, and the log."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: TrainingConfig,
        dataset: TokenDataset,
        run: Path,
        saved: dict | None = None,
    ) -> None:
        """Build everything, at step 0 or where the checkpoint `saved` left off."""
        self.config, self.dataset, self.directory = config, dataset, run
        self.device = resolve_device(config.device)
        self.autocast_dtype = resolve_dtype(config.dtype, self.device)
        torch.manual_seed(config.seed)
        # Weights are drawn on the CPU, so one seed means one model on every device.
        self.model = TransformerLM.from_config(model_config).to(self.device)
        self.model.activation_checkpointing = config.activation_checkpointing
        if config.compile:
            self.model.compile()
        self.optimizer = make_optimizer(self.model, config)
        self.data_order = torch.Generator().manual_seed(config.seed)
        self.step = 0
        self.changed: dict[str, tuple] = {}
        if saved is not None:
            self._resume(saved)
        self.log = MetricLog(run, resume_step=self.step, tensorboard=config.tensorboard)
        self.tokens_per_step = config.batch_size * config.grad_accumulation * model_config.context_length
        peak = peak_flops(device_name(self.device)) if self.autocast_dtype == torch.bfloat16 else None
        self.mfu_per_token_rate = flops_per_token(model_config) / peak if peak else None
        self._pending: list[tuple[int, Tensor, float, Tensor]] = []

    def _resume(self, saved: dict) -> None:
        extra = saved["extra"]
        if extra["data_key"] != self.dataset.key:
            raise ValueError(
                f"data: the checkpoint was trained on other data or another tokenizer "
                f"(key {extra['data_key']}, now {self.dataset.key})"
            )
        now = self.config.to_dict()
        self.changed = {
            name: (old, now[name]) for name, old in extra["training_config"].items() if now.get(name, old) != old
        }
        restore(saved, self.model, self.optimizer)
        self.step = saved["iteration"]
        self.data_order.set_state(extra["data_order"])
        torch.set_rng_state(extra["rng"])
        if self.device.type == "cuda" and extra["cuda_rng"]:
            torch.cuda.set_rng_state_all(extra["cuda_rng"])

    def run(self, console: Console) -> History:
        """Train up to `config.steps` and return the history."""
        config = self.config
        if self.step == config.steps:
            done = f"Nothing to do: the run in {self.directory} has done all of its {self.step:,} steps."
            console.print(done, soft_wrap=True, markup=False, highlight=False)
            save_model(self.model, self.dataset.tokenizer, self.directory / "model")  # a kill may have come before it
            self.log.close()
            return self.log.history
        self._announce(console)
        progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
        )
        try:
            with progress, catch_interrupt() as interrupted:
                task = progress.add_task("", total=config.steps, completed=self.step, status="")
                self._restart_clock()
                while self.step < config.steps and not interrupted.is_set():
                    self.train_step()
                    last = self.step == config.steps
                    if last or self.step % config.log_interval == 0:
                        progress.update(task, status=self._flush())
                    if last or self.step % config.eval_interval == 0:
                        self._validate(progress.console)
                    if self.step % config.checkpoint_interval == 0:
                        with interrupted.held_back():
                            self.save()
                    progress.update(task, completed=self.step)
                with interrupted.held_back():
                    self.save()
                    save_model(self.model, self.dataset.tokenizer, self.directory / "model")
            self.log.history.interrupted = self.step < config.steps
        finally:
            self.log.close()
        if self.log.history.interrupted:
            console.print(f"Stopped after step {self.step} of {config.steps}; the checkpoint is saved.", soft_wrap=True)
        return self.log.history

    def _announce(self, console: Console) -> None:
        model = self.model.config
        size = self.model.num_parameters()
        console.print(
            f"{f'{size / 1e6:.1f} M' if size >= 1e5 else f'{size:,}'} parameters, attention {model.attention!r}, "
            f"{device_name(self.device)}, {str(self.autocast_dtype).removeprefix('torch.')}, "
            f"{self.tokens_per_step:,} tokens a step; a uniform guess has loss {math.log(model.vocab_size):.2f}.",
            soft_wrap=True,
        )
        if self.step:
            changed = "".join(f"; {name} {old} -> {new}" for name, (old, new) in self.changed.items())
            console.print(f"Resuming after step {self.step}{changed}.", soft_wrap=True)

    def train_step(self) -> None:
        """Do one optimizer step; its loss and gradient norm stay on the device until the next flush."""
        config = self.config
        context_length = self.model.config.context_length
        lr = cosine_lr(self.step + 1, config.max_lr, config.min_lr, config.warmup_steps, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = [
            get_batch(self.dataset.train, config.batch_size, context_length, self.device, self.data_order)
            for _ in range(config.grad_accumulation)
        ]
        self.model.train()
        loss = accumulate_gradients(self.model, batches, self.autocast_dtype)
        norm = clip_gradients(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._pending.append((self.step, loss, lr, norm))

    def _flush(self) -> str:
        """Write the pending steps to the log and return a line about the last one."""
        rows = [
            {"step": step, "loss": float(loss), "lr": lr, "grad_norm": float(norm)}
            for step, loss, lr, norm in self._pending
        ]
        self._pending.clear()
        if not rows:
            return ""
        speed = (self.step - self._clock_step) * self.tokens_per_step / (time.perf_counter() - self._clock)
        rows[-1]["tokens_per_second"] = speed
        status = f"loss {rows[-1]['loss']:.3f}  {speed:,.0f} tokens/s"
        if self.mfu_per_token_rate is not None:
            rows[-1]["mfu"] = speed * self.mfu_per_token_rate
            status += f"  MFU {rows[-1]['mfu']:.1%}"
        for row in rows:
            self.log.write(row)
        self.log.flush()
        for row in rows:
            # The norm is looked at too: its step has spoilt the weights, which must not reach a checkpoint.
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                raise FloatingPointError(
                    f"step {row['step']} has loss {row['loss']} and gradient norm {row['grad_norm']}; "
                    f"a lower max_lr than {self.config.max_lr} may help"
                )
        self._restart_clock()
        return status

    def _restart_clock(self) -> None:
        self._clock, self._clock_step = time.perf_counter(), self.step

    def _validate(self, console: Console) -> None:
        self._flush()
        loss = evaluate(
            self.model, self.dataset.val, self.config.eval_sequences, self.config.batch_size, self.autocast_dtype
        )
        self.log.write({"step": self.step, "val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))})
        self.log.flush()
        train_loss = self.log.history.train[-1]["loss"]
        console.print(
            f"step {self.step:>6}   training loss {train_loss:.3f}   "
            f"validation loss {loss:.3f}, perplexity {math.exp(min(loss, 700.0)):,.1f}"
        )
        self._restart_clock()

    def save(self) -> None:
        """Write `checkpoint.pt`: all that the next step depends on."""
        self._flush()  # the log must not lack a step that the checkpoint has
        self.log.sync()
        extra = {
            "model_config": self.model.config.to_dict(),
            "training_config": self.config.to_dict(),
            "data_key": self.dataset.key,
            "data_order": self.data_order.get_state(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }
        save_checkpoint(self.model, self.optimizer, self.step, self.directory / "checkpoint.pt", extra=extra)
        self._restart_clock()


def accumulate_gradients(
    model: nn.Module, batches: Sequence[Batch], autocast_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Add to the parameters' gradients that of the mean loss over all trained tokens of all batches; return that loss.

        loss = sum_b sum_t -log p(target_bt) / (number of trained tokens in all batches)

    A mean of the batches' means would weigh a token by how few others its batch has.

    Args:
        batches: `(inputs, targets)` pairs, each small enough for one forward and backward pass; targets equal to
            `IGNORE_INDEX` are not trained on.
        autocast_dtype: type of the matrix products; float32 switches autocast off.
    """
    num_tokens = torch.stack([(targets != IGNORE_INDEX).sum() for _, targets in batches]).sum().clamp_min(1)
    total = None
    for inputs, targets in batches:
        with autocast(inputs.device, autocast_dtype):
            logits = model(inputs)
        loss = cross_entropy(logits, targets, reduction="sum") / num_tokens
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    if total is None:
        raise ValueError("batches must not be empty")
    return total


@torch.no_grad()
def evaluate(
    model: TransformerLM,
    tokens: np.ndarray,
    num_sequences: int,
    batch_size: int,
    autocast_dtype: torch.dtype = torch.float32,
) -> float:
    """Return the mean loss per token, in nats, over `num_sequences` windows spread evenly over `tokens`."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    context_length = model.config.context_length
    last = len(tokens) - context_length - 1
    starts = np.unique(np.linspace(0, last, num_sequences).astype(np.int64))
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(starts), batch_size):
        inputs, targets = windows(tokens, starts[first : first + batch_size], context_length, device)
        with autocast(device, autocast_dtype):
            logits = model(inputs)
        total += cross_entropy(logits, targets, reduction="sum").double().cpu()
    model.train(was_training)
    return float(total) / (len(starts) * context_length)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which matrix products run in `dtype`; float32 means as they are."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the GPU if there is one. ValueError if it is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto' or a torch device such as 'cpu' or 'cuda:0', got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no GPU")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the autocast type; "auto" is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_attention_runs(model: ModelConfig, training: TrainingConfig) -> torch.device:
    """Return the device of a run; raise what says why if it is not here, or flashtile cannot serve the model on it."""
    device = resolve_device(training.device)
    if model.attention in ("flash", "flash_triton"):
        size = (training.batch_size, model.num_heads, model.context_length, model.head_dim)
        q = torch.empty(1, dtype=resolve_dtype(training.dtype, device), device=device).expand(size)
        keys = q[:, : model.kv_heads]
        problem = dispatch.Problem.of(q, keys, keys, is_causal=True)._replace(copied_in_blocks=True)
        if model.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"d_model / num_heads is {model.head_dim}, but attention {model.attention!r} trains heads of "
                f"{MAX_HEAD_DIM} at most"
            )
        try:
            dispatch.select(problem, "triton" if model.attention == "flash_triton" else None)
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            raise type(error)(f"attention is {model.attention}, but {error}") from error
    return device


class Interrupt(threading.Event):
    """Set by Ctrl-C."""

    holding = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Have no Ctrl-C end the block, however many there are: they set the event, and that is all."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into an event, so a step can finish; a second one interrupts at once as usual."""
    event = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: object) -> None:
        if event.is_set() and not event.holding:
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
