"""Configs hold sensible values and refuse the others by name."""

from dataclasses import FrozenInstanceError

import pytest

from flashtile.llm import PRESETS, ModelConfig, TrainingConfig


def test_flash_is_the_default_everywhere():
    assert ModelConfig().attention == "flash"
    assert all(model.attention == "flash" for model, _ in PRESETS.values())


def test_configs_are_frozen_and_round_trip():
    for config in (ModelConfig(num_heads_kv=2), TrainingConfig()):
        assert type(config)(**config.to_dict()) == config
        with pytest.raises(FrozenInstanceError):
            config.seed = 1  # pyright: ignore


def test_values_that_follow_from_others():
    config = ModelConfig(d_model=192, num_heads=6)
    assert (config.head_dim, config.kv_heads, config.ffn_width) == (32, 6, 512)
    assert ModelConfig(num_heads_kv=3, d_ff=7).kv_heads == 3
    assert ModelConfig(d_ff=7).ffn_width == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps is 0, but wants 1 or more"),
        ({"grad_accumulation": -1}, "grad_accumulation is -1, but wants 1 or more"),
        ({"max_lr": 0.0}, "max_lr is 0.0, but wants more than 0"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0, but wants a value between 0 and 1"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "min_lr is 1.0, but wants a value from 0 to max_lr, which is 0.1"),
        ({"warmup_steps": -1}, "warmup_steps is -1, but wants 0 or more"),
        ({"dtype": "float16"}, "dtype must be one of 'auto', 'float32', 'bfloat16', got 'float16'"),
    ],
)
def test_training_values_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**values)
