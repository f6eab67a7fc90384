"""A small language-model stack that trains and generates on flashtile's attention."""

from flashtile.llm.checkpoint import load_checkpoint, load_model, save_checkpoint, save_model
from flashtile.llm.config import PRESETS, Attention, ModelConfig, SamplingConfig, TrainingConfig
from flashtile.llm.data import TokenDataset, get_batch, prepare_data
from flashtile.llm.functional import cross_entropy, silu, softmax
from flashtile.llm.generation import generate, generate_tokens, stream
from flashtile.llm.kv_cache import KVCache
from flashtile.llm.metrics import History
from flashtile.llm.optimizer import AdamW, clip_gradients, cosine_lr
from flashtile.llm.rope import RotaryPositionalEmbedding
from flashtile.llm.tokenizer import Tokenizer
from flashtile.llm.training import train
from flashtile.llm.transformer import (
    Embedding,
    Linear,
    MultiHeadAttention,
    MultiHeadAttentionWithRoPE,
    RMSNorm,
    ScaledDotProductAttention,
    SwiGLU,
    TransformerBlock,
    TransformerLM,
    scaled_dot_product_attention,
)

__all__ = [
    "PRESETS",
    "AdamW",
    "Attention",
    "Embedding",
    "History",
    "KVCache",
    "Linear",
    "ModelConfig",
    "MultiHeadAttention",
    "MultiHeadAttentionWithRoPE",
    "RMSNorm",
    "RotaryPositionalEmbedding",
    "SamplingConfig",
    "ScaledDotProductAttention",
    "SwiGLU",
    "TokenDataset",
    "Tokenizer",
    "TrainingConfig",
    "TransformerBlock",
    "TransformerLM",
    "clip_gradients",
    "cosine_lr",
    "cross_entropy",
    "generate",
    "generate_tokens",
    "get_batch",
    "load_checkpoint",
    "load_model",
    "prepare_data",
    "save_checkpoint",
    "save_model",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
    "stream",
    "train",
]
