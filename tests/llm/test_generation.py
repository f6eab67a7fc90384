"""Sampling, caches, stop strings, characters cut in pieces, and texts longer than the context."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from flashtile.llm import SamplingConfig, Tokenizer, TransformerLM, generate, generate_tokens, stream
from flashtile.llm.generation import decode_stream, sample, until_stop
from tests.llm.conftest import TINY

GREEDY = SamplingConfig(max_new_tokens=60, temperature=0)


@pytest.fixture(scope="module", params=["flash", "naive", "sdpa"])
def model(request):
    torch.manual_seed(3)
    return TransformerLM.from_config(replace(TINY, attention=request.param))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a text to learn from, a text to learn more from"], 270)


@pytest.mark.parametrize("prompt_length", [1, 5, 15, 16, 17, 40])
def test_greedy_with_a_cache_is_greedy_without(model, prompt_length):
    prompt = torch.randint(300, (prompt_length,)).tolist()
    cached = list(generate_tokens(model, prompt, GREEDY))
    assert cached == list(generate_tokens(model, prompt, GREEDY, use_cache=False))
    assert len(cached) == 60  # well past the context of 16
    assert len(set(cached)) > 1


def test_greedy_takes_the_likeliest_token(model):
    prompt = [5, 3, 8]
    tokens = prompt + list(generate_tokens(model, prompt, GREEDY))
    for n in range(3, 16):
        with torch.no_grad():
            assert tokens[n] == model(torch.tensor([tokens[:n]]))[0, -1].argmax()


def test_beyond_the_context_the_later_half_goes_on(model):
    prompt = list(range(16))
    sampling = SamplingConfig(max_new_tokens=2, temperature=0)
    first, second = generate_tokens(model, prompt, sampling)
    window = [*prompt, first][-8:]
    assert [second] == list(generate_tokens(model, window, SamplingConfig(max_new_tokens=1, temperature=0)))


def test_generating_leaves_the_mode_as_it_was(model):
    model.train()
    stream_of_tokens = generate_tokens(model, [1], GREEDY)
    next(stream_of_tokens)
    stream_of_tokens.close()
    assert model.training


def test_a_seed_fixes_the_text(model, tokenizer):
    texts = [generate(model, tokenizer, "a text", SamplingConfig(50, 1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_drawing_touches_no_global_generator(model):
    before = torch.get_rng_state()
    list(generate_tokens(model, [1], SamplingConfig(5, 1.0, seed=1)))
    list(generate_tokens(model, [1], SamplingConfig(5, 1.0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_the_tokenizer_lacks_are_never_drawn(model, tokenizer):
    tokens = list(generate_tokens(model, [1], SamplingConfig(200, 5.0, seed=0), vocab_size=tokenizer.vocab_size))
    assert max(tokens) < tokenizer.vocab_size < 300


def test_the_end_of_text_ends_it(model):
    tokens = list(generate_tokens(model, [1], GREEDY))
    end = tokens[3]
    assert list(generate_tokens(model, [1], GREEDY, end_of_text=end)) == tokens[: tokens.index(end)]


def test_an_empty_prompt_begins_a_document(model, tokenizer):
    text = generate(model, tokenizer, "", GREEDY)
    tokens = generate_tokens(
        model, [tokenizer.end_of_text], GREEDY, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text
    )
    assert text == tokenizer.decode(tokens)
    with pytest.raises(ValueError, match="prompt_ids must hold at least one token"):
        next(generate_tokens(model, []))


def test_streamed_pieces_join_to_the_text(model, tokenizer):
    sampling = SamplingConfig(60, 2.0, seed=4)
    pieces = list(stream(model, tokenizer, "a text", sampling))
    assert len(pieces) > 5
    assert "".join(pieces) == generate(model, tokenizer, "a text", sampling)


def test_characters_are_streamed_whole(tokenizer):
    text = "é漢🇨🇭!"
    pieces = list(decode_stream(tokenizer, iter(tokenizer.encode(text))))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    cut = tokenizer.encode("漢")[:-1]
    assert "".join(decode_stream(tokenizer, iter(cut))) == "\ufffd"


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["abc", "def"], [], "abcdef"),
        (["abc", "def"], ["cd"], "ab"),
        (["a", "b", "c", "d"], ["bcx", "cd"], "ab"),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["ab"], ["abc"], "ab"),
        (["stop"], ["stop"], ""),
        (["one two"], ["two", "one"], ""),
    ],
)
def test_stop_strings(pieces, stop, expected):
    assert "".join(until_stop(iter(pieces), stop)) == expected


def test_what_may_become_a_stop_string_is_held_back():
    pieces = until_stop(iter(["ab", "x", "ab", "c"]), ["abc"])
    assert list(pieces) == ["abx"]


def draws(logits, n=2000, **changes):
    generator = torch.Generator().manual_seed(0)
    sampling = SamplingConfig(temperature=changes.pop("temperature", 1.0), top_p=changes.pop("top_p", None), **changes)
    return Counter(sample(logits, sampling, generator) for _ in range(n))


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    for temperature in (1.0, 0.5):
        expected = 2000 * torch.softmax(logits / temperature, 0)
        counts = draws(logits, temperature=temperature)
        for token in range(4):
            assert abs(counts[token] - expected[token]) < 5 * expected[token] ** 0.5 + 1


def test_top_k_and_top_p_narrow_the_choice():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(draws(logits, top_k=1)) == {1}
    assert set(draws(logits, top_k=2)) == {1, 3}
    assert set(draws(logits, top_k=9)) == {0, 1, 2, 3}
    assert set(draws(logits, top_p=0.3)) == {1}
    assert set(draws(logits, top_p=0.6)) == {1, 3}
    assert set(draws(logits, top_p=1.0)) == {0, 1, 2, 3}
    assert set(draws(logits, top_k=3, top_p=0.95)) == {1, 2, 3}
    assert set(draws(torch.zeros(4), top_k=2)) == {0, 1}  # ties do not widen it


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-3])
def test_cold_draws_of_large_logits_take_the_largest(temperature):
    logits = 1000 * torch.tensor([1.0, 3.0, float("-inf"), 2.0])
    assert set(draws(logits, 50, temperature=temperature)) == {1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="the model's logits must be finite, their maximum is"):
        sample(torch.tensor([0.0, bad]), SamplingConfig())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, but wants 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan, but wants 0 or more"),
        ({"top_k": 0}, "top_k is 0, but wants 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0, but wants a value above 0, and 1 at most"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, but wants 0 or more"),
        ({"stop": ("a", "")}, "stop must not hold the empty string"),
    ],
)
def test_sampling_values_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**values)
