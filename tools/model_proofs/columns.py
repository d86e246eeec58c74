"""Lists the columns of the table of families: which tests prove what of a family. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Names the tests that prove one thing.

    title: the column's head, in markdown.
    each:  tests, as file::function, of which a case is a family's where it names one of the family's variants.
    whole: tests that go over every variant of tests/reference.py in one case.
    vllm:  whether they need an environment with vLLM.
    """

    title: str
    each: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    vllm: bool = False

    @property
    def tests(self) -> tuple[str, ...]:
        return self.whole + self.each


WEIGHTS, CONVERT = "tests/equality/test_weights.py", "tests/tools/test_convert_checkpoint.py"
EXPERTS, GRADIENT = "tests/equality/test_experts.py", "tests/equality/test_gradient.py"
DELTA = "tests/equality/test_delta_net.py"
CHECKPOINT, FORECAST = "tests/equality/test_checkpoint.py", "tests/tools/test_simulate_cluster.py"
COLUMNS = (
    Column(
        title="log-probs and export: one process, TP, SP, PP",
        whole=(
            f"{WEIGHTS}::test_logprobs_equal_hugging_face_and_export_equals_import",
            f"{WEIGHTS}::test_logprobs_under_sequence_parallelism_equal_hugging_face",
            f"{WEIGHTS}::test_logprobs_under_interleaved_stages_equal_hugging_face",
        ),
    ),
    Column(
        title="gradients and steps: skip, dense, PP, EP, CP",
        each=(
            f"{GRADIENT}::test_skip_and_dense_equal_reference_for_every_reduction",
            f"{GRADIENT}::test_every_cut_into_microbatches_gives_the_reference_gradient",
            f"{EXPERTS}::test_mixtures_equal_reference",
            "tests/equality/test_context.py::test_sequences_shorter_than_their_chunks",
            f"{DELTA}::test_delta_nets_equal_transformers",
        ),
    ),
    Column(
        title="shared prompts",
        each=(
            "tests/equality/test_shared_prompts.py::test_shared_prompts_equal_the_plain_loop",
            f"{DELTA}::test_prompts_run_once_under_delta_nets_equal_the_plain_loop",
        ),
    ),
    Column(
        title="files and round trip",
        each=(
            f"{WEIGHTS}::test_files_load_in_slices_and_come_back",
            f"{WEIGHTS}::test_names_in_memory_become_those_of_files",
            f"{CONVERT}::test_a_round_trip_is_bitwise_and_log_probs_are_those_of_transformers",
        ),
    ),
    Column(
        title="checkpoint goes on",
        each=(
            f"{CHECKPOINT}::test_the_same_topology_goes_on_to_the_bit",
            f"{CHECKPOINT}::test_another_topology_goes_on_from_the_same_bits",
        ),
    ),
    Column(
        title="embedded engine",
        each=(
            f"{EXPERTS}::test_engine_samples_from_the_trainers_policy",
            "tests/equality/test_bitwise.py::test_engine_equals_trainer",
            "tests/unit/rollout/test_transformers_engine.py::test_states_of_delta_nets_are_those_of_each_row_alone",
            "tests/runs/test_run.py::test_two_epochs_equal_a_plain_adamw_loop",
            "tests/runs/test_train.py::test_a_family_of_other_tensors_trains_the_same_run",
        ),
    ),
    Column(
        title="forecast",
        each=(
            f"{FORECAST}::test_memory_and_plan_equal_the_backends",
            f"{FORECAST}::test_activations_are_what_autograd_saves",
        ),
    ),
    Column(
        title="released config",
        each=(
            "tests/unit/model/test_published_shapes.py::test_names_and_sizes_of_a_released_model_are_those_of_transformers",
            "tests/equality/test_published.py::test_logprobs_of_a_thin_copy_equal_hugging_faces",
        ),
    ),
    Column(
        title="vLLM's CPU build",
        each=(
            "tests/vllm/test_families.py::test_logprobs_of_a_family_equal_hugging_faces",
            "tests/vllm/test_run.py::test_a_family_of_other_tensors",
            "tests/vllm/test_delta_nets.py::test_logprobs_after_every_sync_are_as_near_as_qwen3s",
            "tests/vllm/test_embedded.py::test_after_every_sync_logprobs_equal_hugging_faces",
        ),
        vllm=True,
    ),
)
