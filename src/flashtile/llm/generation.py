"""Text from a trained model, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from flashtile.llm.config import SamplingConfig
from flashtile.llm.kv_cache import KVCache
from flashtile.llm.tokenizer import Tokenizer
from flashtile.llm.transformer import TransformerLM


def generate(model: TransformerLM, tokenizer: Tokenizer, prompt: str, sampling: SamplingConfig | None = None) -> str:
    """Return the text that the model adds to the prompt."""
    return "".join(stream(model, tokenizer, prompt, sampling))


def stream(
    model: TransformerLM, tokenizer: Tokenizer, prompt: str, sampling: SamplingConfig | None = None
) -> Iterator[str]:
    """Yield the text that the model adds to the prompt, piece by piece as it is made.

    A piece is made of whole characters, however the tokens cut their bytes. Nothing that may turn out to be the
    beginning of a stop string is yielded before that is decided. An empty prompt begins a new document.
    """
    sampling = sampling or SamplingConfig()
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    new_ids = generate_tokens(
        model, prompt_ids, sampling, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text
    )
    yield from until_stop(decode_stream(tokenizer, new_ids), sampling.stop)


def decode_stream(tokenizer: Tokenizer, token_ids: Iterator[int]) -> Iterator[str]:
    """Yield the text of a stream of tokens; bytes wait until their character is complete."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token_id in token_ids:
        if text := decoder.decode(tokenizer.token_bytes(token_id)):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def until_stop(pieces: Iterator[str], stop: Sequence[str]) -> Iterator[str]:
    """Yield the pieces up to the first stop string, holding back what may yet become one."""
    held = ""
    for piece in pieces:
        held += piece
        ends = [place for place in (held.find(s) for s in stop) if place >= 0]
        if ends:
            if held[: min(ends)]:
                yield held[: min(ends)]
            return
        beginnings = (n for s in stop for n in range(1, len(s)) if held.endswith(s[:n]))
        safe = len(held) - max(beginnings, default=0)
        if safe:
            yield held[:safe]
            held = held[safe:]
    if held:
        yield held


@torch.no_grad()
def generate_tokens(
    model: TransformerLM,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig | None = None,
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    use_cache: bool = True,
) -> Generator[int, None, None]:
    """Yield up to `max_new_tokens` tokens that continue the prompt.

    The model sees the last `context_length` tokens at most. When they no longer fit it goes on from the later half of
    the context, read anew: keys carry the position they were first read at, so a cache cannot simply be shifted.

    Args:
        prompt_ids: at least one token.
        vocab_size: draw from the first so many tokens only; a model may have more rows than its tokenizer has tokens.
        end_of_text: a token that ends the text; it is not yielded.
        use_cache: keep keys and values of what was read. Without it every step reads the whole context again and finds
            the same.

    Raises:
        ValueError: if the prompt is empty, or the model's logits are not finite.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids must hold at least one token")
    sampling = sampling or SamplingConfig()
    weight = model.lm_head.weight
    context_length = model.config.context_length
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    tokens = list(prompt_ids)
    start = max(0, len(tokens) - context_length)
    cache = KVCache(model.config, 1, weight.device, weight.dtype) if use_cache else None
    was_training = model.training
    model.eval()
    try:
        for _ in range(sampling.max_new_tokens):
            if len(tokens) - start > context_length:
                start = len(tokens) - max(1, context_length // 2)
                if cache is not None:
                    cache.clear()
            unread = tokens[start + (0 if cache is None else cache.length) :]
            hidden = model.hidden(torch.tensor([unread], device=weight.device), cache=cache)
            logits = model.lm_head(hidden[0, -1])
            token = sample(logits[:vocab_size], sampling, generator)
            if token == end_of_text:
                return
            tokens.append(token)
            yield token
    finally:
        model.train(was_training)


def sample(logits: Tensor, sampling: SamplingConfig, generator: torch.Generator | None = None) -> int:
    """Draw a token from `softmax(logits / temperature)`, narrowed to the top k and then to the top p of them.

    Args:
        logits: `(vocab)`. The draw itself happens on the CPU, so a seed means the same on every device.
        sampling: temperature 0 takes the likeliest token.

    Raises:
        ValueError: if a logit is NaN or all are -inf.
    """
    logits = logits.float().cpu()
    largest = logits.max()
    if not torch.isfinite(largest):
        raise ValueError(f"the model's logits must be finite, their maximum is {largest.item()}")
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Subtracting first keeps a tiny temperature from dividing finite logits to inf - inf.
    logits = (logits - largest) / sampling.temperature
    logits, order = logits.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        logits = logits[: sampling.top_k]
    probabilities = torch.softmax(logits, dim=0)
    if sampling.top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < sampling.top_p]
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
