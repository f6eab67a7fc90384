"""Cases whose fault the tests of a part already look for: where they are."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    "b01": ["test_features.py::test_rows_that_see_nothing"],
    "b07": [
        "test_features.py::test_softcap_of_huge_logits",
        "kernel/test_score_kernels.py::test_softcap_of_huge_logits",
    ],
    "b26": ["test_attention.py::test_fused_projection"],
    "b28": ["kernel/test_autograd.py::test_mean_of_lse", "kernel/test_autograd.py::test_lse_is_differentiable"],
    "b31": ["test_features.py::test_slopes_get_their_gradient_when_nothing_else_does"],
    "b34": [
        "kernel/test_autograd.py::test_second_derivative_is_an_error",
        "test_features.py::test_a_second_derivative_of_the_fused_passes_is_an_error",
        "test_features.py::test_differentiable_twice",
    ],
    "b35": ["test_features.py::test_dropout_advances_the_generator"],
    "b37": ["test_features.py::test_dropout_drops_as_told_and_nothing_at_zero"],
    "b38": [
        "test_features.py::test_dropout_under_activation_checkpointing",
        "llm/test_transformer.py::test_activation_checkpointing_changes_no_bit",
    ],
    "b41": ["test_attention.py::test_autocast", "test_attention.py::test_mixed_dtypes_outside_autocast_name_all_three"],
    "b43": ["test_ops.py::test_opcheck_forward", "test_ops.py::test_opcheck_backward"],
    "b44": ["test_varlen.py::test_new_lengths_compile_nothing_new", "test_varlen.py::test_lengths_stay_on_the_device"],
    "b47": ["test_attention.py::test_runs_on_the_current_stream"],
    "b49": ["test_attention.py::test_new_lengths_compile_nothing_new"],
    "b52": ["test_import.py::test_cpu_tensors_are_served", "test_import.py::test_asking_for_triton_without_it_says_so"],
    "b56": ["test_varlen.py::test_a_padded_buffer_trains_a_layer_before_it"],
    "b58": ["test_varlen.py::test_empty_queries_beside_long_keys"],
    "b67": [
        "llm/test_training.py::test_accumulation_weighs_every_token_equally",
        "llm/test_training.py::test_each_trained_token_gets_one_part_of_the_gradient",
    ],
    "b68": ["llm/test_rope.py::test_tables_stay_fp32_when_the_model_is_cast"],
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_is_there(case):
    for place in ELSEWHERE[case]:
        file, name = place.split("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place
