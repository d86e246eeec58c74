"""Lists the faults planted around the newer models: families' refusals and mappings, adapters, and checkpoints."""

from __future__ import annotations

from mutants.table import Mutant

FAMILIES = (
    Mutant(
        name="one-dropout-of-two",
        file="megatron_rl/weights/families/phi3.py",
        line='for name in ("resid_pdrop", "embd_pdrop"):',
        becomes='for name in ("resid_pdrop",):',
        fault="phi3's dropout of the embedding is neither refused nor computed",
        tests=("tests/unit/model/test_model_shape.py::test_each_dropout_of_phi3_is_refused_by_its_own_name",),
    ),
    Mutant(
        name="scaled-though-it-is-turned-off",
        file="megatron_rl/weights/families/llama4.py",
        line="scale=float(hf_config.attn_scale) if hf_config.attn_temperature_tuning else 0.0,",
        becomes="scale=float(hf_config.attn_scale),",
        fault="llama4's queries are scaled by position where attn_temperature_tuning is off",
        tests=(
            "tests/unit/model/test_model_shape.py::test_queries_of_llama_4_are_scaled_by_position_where_the_config_says_so",
        ),
    ),
)

ADAPTERS = (
    Mutant(
        name="adapters-start-by-their-rank",
        file="megatron_rl/model/lora/adapters.py",
        line="bound = 1 / math.sqrt(whole.shape[1])",
        becomes="bound = 1 / math.sqrt(whole.shape[0])",
        fault="an adapter's A starts within ±1/√rank, not within ±1/√in",
        tests=(
            "tests/unit/model/test_model_shape.py::test_untrained_adapters_of_experts_too_fill_the_range_of_their_inputs_whatever_the_rank",
        ),
    ),
    Mutant(
        name="experts-norm-by-tensor-rank",
        file="megatron_rl/model/lora/layer.py",
        line="set_tensor_model_parallel_attributes(parameter, topology.expert_tensor_rank == 0, -1, 1)",
        becomes="set_tensor_model_parallel_attributes(parameter, topology.tensor_rank == 0, -1, 1)",
        fault="the gradient norm counts the adapters of the first tensor rank's experts alone",
        tests=(
            "tests/equality/test_adapter.py::test_three_adamw_steps_of_adapters_equal_torchs[TP2-SP-ETP1 mixtral]",
        ),
    ),
)

CHECKPOINTS = (
    Mutant(
        name="rows-of-its-own-number-alone",
        file="megatron_rl/checkpoint/loader.py",
        line='return [folder / own_file(rank) for rank in range(topology.rank, state["world_size"], '
        "topology.world_size)]",
        becomes="return [folder / own_file(topology.rank)]",
        fault="a run that goes on with fewer ranks has lost the rollouts of the others",
        tests=("tests/unit/checkpoint/test_exports.py::test_every_saved_ranks_rollouts_are_taken_over_by_one_rank",),
    ),
    Mutant(
        name="export-of-this-step-set-aside",
        file="megatron_rl/checkpoint/exports.py",
        line="if step > after_step:",
        becomes="if step >= after_step:",
        fault="a run that goes on sets aside the export of the very step that it goes on from",
        tests=("tests/unit/checkpoint/test_exports.py::test_exports_of_later_steps_are_set_aside",),
    ),
)

NEWER_MODELS = (*FAMILIES, *ADAPTERS, *CHECKPOINTS)
