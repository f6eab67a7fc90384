"""What can be chosen about a model, a training run and sampling: frozen values, checked when they are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Attention = Literal["flash", "flash_triton", "naive", "sdpa"]
"""Who computes attention: flashtile's kernels (the fastest that serve, or the portable ones), the readable dense
module, or torch's own function."""

Dtype = Literal["auto", "float32", "bfloat16"]
"""The autocast type; "auto" depends on the device."""


def check_attention(attention: str) -> None:
    """Raise ValueError unless `attention` names a known setting."""
    if attention not in get_args(Attention):
        raise ValueError(f"attention must be one of {_quoted(get_args(Attention))}, got {attention!r}")


def check_heads(d_model: int, num_heads: int, num_heads_kv: int) -> None:
    """Raise ValueError unless the heads divide the width and the query heads fall into equal groups."""
    if num_heads < 1 or d_model % num_heads:
        raise ValueError(f"num_heads is {num_heads}, but wants a divisor of d_model, which is {d_model}")
    if num_heads_kv < 1 or num_heads % num_heads_kv:
        raise ValueError(f"num_heads_kv is {num_heads_kv}, but wants a divisor of num_heads, which is {num_heads}")


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            wanted = "1 or more" if isinstance(value, int) else "more than 0"
            raise ValueError(f"{name} is {value}, but wants {wanted}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a TransformerLM; two models with equal values have interchangeable weights."""

    vocab_size: int = 2048
    """Number of rows of the embedding; the tokenizer may use fewer."""
    context_length: int = 256
    """Longest sequence the model attends over, in tokens."""
    d_model: int = 192
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of transformer blocks."""
    num_heads: int = 6
    """Query heads per block; d_model / num_heads is the head dimension."""
    num_heads_kv: int | None = None
    """Key/value heads per block (grouped-query attention); None means num_heads."""
    d_ff: int | None = None
    """Inner width of SwiGLU; None means 8/3 d_model, rounded up to a multiple of 64."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    tie_embeddings: bool = False
    """Whether lm_head shares the embedding's weight."""
    attention: Attention = "flash"
    """Who computes attention: "flash" (flashtile), "flash_triton" (its portable GPU kernels), "naive" (dense, readable)
    or "sdpa" (torch)."""

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "context_length", "d_model", "num_layers", "rope_theta")
        check_heads(self.d_model, self.num_heads, self.kv_heads)
        if self.d_ff is not None:
            _check_positive(self, "d_ff")
        if self.head_dim % 2:
            raise ValueError(
                f"d_model / num_heads is {self.d_model} / {self.num_heads} = {self.head_dim}, but rotary embeddings "
                f"want an even head dimension"
            )
        check_attention(self.attention)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads per block, resolved."""
        return self.num_heads if self.num_heads_kv is None else self.num_heads_kv

    @property
    def ffn_width(self) -> int:
        """Inner width of SwiGLU, resolved."""
        return default_d_ff(self.d_model) if self.d_ff is None else self.d_ff

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON and checkpoints."""
        return asdict(self)


def default_d_ff(d_model: int) -> int:
    """Return 8/3 d_model rounded up to a multiple of 64: three matrices then cost what two of 4 d_model do."""
    return -(-8 * d_model // 3 // 64) * 64


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained; together with a ModelConfig and the data it fixes every number on a CPU."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences per micro-batch."""
    grad_accumulation: int = 1
    """Micro-batches per optimizer step; every token weighs the same, whichever micro-batch it is in."""
    max_lr: float = 1e-3
    """Learning rate at the end of the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norm gains are not decayed."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-8
    """AdamW's guard against division by zero."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    val_fraction: float = 0.05
    """Share of the tokens kept for validation."""
    eval_interval: int = 100
    """Steps between validations (one more follows the last step)."""
    eval_sequences: int = 64
    """Sequences per validation, evenly spaced over the validation split and always the same."""
    log_interval: int = 10
    """Steps between metric flushes; every step's loss is recorded all the same."""
    checkpoint_interval: int = 500
    """Steps between checkpoints (one more follows the last step)."""
    device: str = "auto"
    """Torch device, or "auto": the GPU if there is one."""
    dtype: Dtype = "auto"
    """Autocast type; "auto" is bfloat16 on a GPU and float32 on a CPU. Weights stay float32."""
    compile: bool = False
    """Whether to run the model through torch.compile."""
    activation_checkpointing: bool = False
    """Whether to recompute each block's activations in the backward pass instead of keeping them."""
    tensorboard: bool = True
    """Whether to write TensorBoard events beside the JSONL metrics."""

    def __post_init__(self) -> None:
        _check_positive(self, "steps", "batch_size", "grad_accumulation", "max_lr", "max_grad_norm")
        _check_positive(self, "eval_interval", "eval_sequences", "log_interval", "checkpoint_interval")
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {_quoted(get_args(Dtype))}, got {self.dtype!r}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}, but wants a value between 0 and 1")
        if not 0 <= self.min_lr <= self.max_lr:
            raise ValueError(f"min_lr is {self.min_lr}, but wants a value from 0 to max_lr, which is {self.max_lr}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, but wants 0 or more")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON and checkpoints."""
        return asdict(self)


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn from the model's distribution."""

    max_new_tokens: int = 256
    """Most tokens to add to the prompt."""
    temperature: float = 0.8
    """Logits are divided by this; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = 0.95
    """Draw from the fewest likeliest tokens whose probabilities reach this sum."""
    seed: int | None = None
    """Seed of the draws; the same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, but wants 0 or more")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}, but wants 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, but wants 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but wants a value above 0, and 1 at most")
        if "" in self.stop:
            raise ValueError("stop must not hold the empty string, which would end every text at once")


PRESETS: dict[str, tuple[ModelConfig, TrainingConfig]] = {
    "demo": (
        ModelConfig(),
        TrainingConfig(steps=300, batch_size=8, max_lr=3e-3, min_lr=3e-4, warmup_steps=40, eval_interval=50),
    ),
    "gpt2-124m": (
        ModelConfig(
            vocab_size=50_304, context_length=1024, d_model=768, num_layers=12, num_heads=12, tie_embeddings=True
        ),
        TrainingConfig(
            steps=300, batch_size=32, grad_accumulation=1, max_lr=6e-4, min_lr=6e-5, warmup_steps=50, eval_interval=100
        ),
    ),
}
"""Named pairs of configs: "demo" learns on two CPU cores in minutes, "gpt2-124m" has GPT-2's size for one GPU."""
