"""Lists the faults planted in what keeps one client of a server from ending, starving or garbling the others."""

from __future__ import annotations

from mutants.table import Mutant

_DOORS = "tests/unit/rollout/test_http_doors.py"
_SERVE = "tests/faults/test_serve_doors.py"

BEFORE_THE_BODY = (
    Mutant(
        name="key-is-not-asked-for",
        file="megatron_rl/rollout/http_doors.py",
        line="if not is_known(self.bounds.key_of(headers), self.bounds.keys):",
        becomes="if not is_known(self.bounds.key_of(headers), ()):",
        fault="a request without a key has its body read, and is served",
        tests=(f"{_DOORS}::test_a_request_that_is_not_let_in_has_no_body_read",),
    ),
    Mutant(
        name="any-name-is-this-hosts",
        file="megatron_rl/rollout/http_doors.py",
        line="if is_loopback(self.bounds.host) and not names_loopback(host):",
        becomes="if is_loopback(self.bounds.host) and not host:",
        fault="a server on loopback answers a page whose name was pointed at it",
        tests=(f"{_DOORS}::test_a_request_that_is_not_let_in_has_no_body_read",),
    ),
    Mutant(
        name="held-for-ever",
        file="megatron_rl/rollout/http_doors.py",
        line="self.held.give(self._key, self.counted)",
        becomes="self.held.give(self._key, 0)",
        fault="bodies whose client is gone count as held, until no other is taken",
        tests=(f"{_DOORS}::test_a_body_is_bounded_alone_and_all_of_them_together",),
    ),
    Mutant(
        name="newest-idle-connection-goes",
        file="megatron_rl/rollout/http_connections.py",
        line="min(idle, key=lambda x: x.idle_since, default=self).transport.abort()",
        becomes="max(idle, key=lambda x: x.idle_since, default=self).transport.abort()",
        fault="idle connections keep out those that come after them",
        tests=(f"{_DOORS}::test_the_oldest_idle_connection_makes_room",),
    ),
)

BEHIND_IT = (
    Mutant(
        name="one-request-fails-its-batch",
        file="megatron_rl/serve/samplers.py",
        line="if len(requests) > 1:",
        becomes="if len(requests) > 10**6:",
        fault="a sampling request that the engine cannot answer fails those that it is sampled with",
        tests=("tests/unit/rollout/test_sampling.py::test_a_request_that_the_engine_cannot_answer_fails_alone",),
    ),
    Mutant(
        name="goes-on-from-what-is-removed",
        file="megatron_rl/serve/coordinator.py",
        line="self.registry.note_saved(model, seq, own, with_adam=with_adam)",
        becomes="self.registry.note_saved(model, seq, folder, with_adam=with_adam)",
        fault="a model is lost at a restart where its client has removed the checkpoint that it goes on from",
        tests=("tests/faults/test_serve.py::test_a_killed_server_goes_on_from_what_was_saved_and_says_what_is_lost",),
    ),
    Mutant(
        name="booking-ends-the-server",
        file="megatron_rl/serve/coordinator.py",
        line="if self._ranks_failed:",
        becomes="if operations:",
        fault="an error while one request is booked ends the server for all",
        tests=(f"{_SERVE}::test_a_request_that_ran_and_cannot_be_booked_fails_alone",),
    ),
    Mutant(
        name="epsilon-of-zero",
        file="megatron_rl/serve/bodies.py",
        line="eps: Annotated[float, Field(ge=LEAST_EPS, le=1e3)] = 1e-12",
        becomes="eps: Annotated[float, Field(ge=0, le=1e3)] = 1e-12",
        fault="eps=0 is taken, and every log-prob is NaN after the step",
        tests=(f"{_SERVE}::test_a_request_whose_fields_are_wrong_fails_in_its_turn_by_name",),
    ),
    Mutant(
        name="newest-answer-goes-too",
        file="megatron_rl/serve/operations.py",
        line="own = sorted(own, key=lambda x: (not x.told, x.asked_at))[:-1]",
        becomes="own = sorted(own, key=lambda x: (not x.told, x.asked_at))",
        fault="an answer that nobody has read yet is forgotten for room",
        tests=(
            "tests/unit/serve/test_operations.py::test_a_line_is_begun_once_and_answers_take_no_more_than_their_bytes",
        ),
    ),
)

AGENTS_AND_FILES = (
    Mutant(
        name="any-token-id",
        file="megatron_rl/rollout/endpoint/bodies.py",
        line="if not 0 <= token < vocab_size:",
        becomes="if token < 0:",
        fault="a token id beyond the vocabulary reaches the engine",
        tests=(
            "tests/unit/rollout/endpoint/test_agents.py::test_keys_and_limits_are_refused_with_a_status_and_a_message",
        ),
    ),
    Mutant(
        name="one-request-ends-the-run",
        file="megatron_rl/rollout/endpoint/agents.py",
        line="if len(waiting) > 1:",
        becomes="if len(waiting) > 10**6:",
        fault="an agent's request that the engine cannot sample fails those of other agents",
        tests=(
            "tests/unit/rollout/endpoint/test_endpoint_fuzz.py"
            "::test_what_an_engine_raises_for_one_request_fails_that_request_alone",
        ),
    ),
    Mutant(
        name="factor-without-a-type",
        file="megatron_rl/commands/convert/gguf_keys.py",
        line='kind = single(file, f"{family}.rope.scaling.type", str, "linear")',
        becomes='kind = single(file, f"{family}.rope.scaling.type", str, "none")',
        fault="a GGUF file's rotary scaling without a type is dropped in silence",
        tests=("tests/tools/test_import_gguf.py::test_scalings_are_those_that_llama_cpp_reads",),
    ),
    Mutant(
        name="unknown-key-is-passed-over",
        file="megatron_rl/commands/convert/gguf_keys.py",
        line="elif key not in read and not key.startswith(PREFIXES):",
        becomes='elif key not in read and key.startswith("general.type"):',
        fault="a key of a GGUF file that nobody reads is passed over, whatever model it describes",
        tests=("tests/tools/test_import_gguf.py::test_models_that_are_not_built_are_refused_by_name",),
    ),
)

DOORS = (*BEFORE_THE_BODY, *BEHIND_IT, *AGENTS_AND_FILES)
