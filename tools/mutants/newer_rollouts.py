"""Lists the faults planted on the newer ways of a rollout: what changed of the weights, agents' sessions, the buffers
of groups, and the server of Tinker's API."""

from __future__ import annotations

from mutants.table import Mutant

CHANGES = (
    Mutant(
        name="changes-whatever-it-holds",
        file="megatron_rl/rollout/weight_sync/changed_encoder.py",
        line="if not self._full and receipt.version == self._base:",
        becomes="if not self._full:",
        fault="an engine that missed a sync gets the changes since a version that it does not hold",
        tests=("tests/unit/rollout/test_delta_sync.py::test_an_engine_that_missed_a_sync_gets_everything",),
    ),
    Mutant(
        name="gaps-of-two-bytes-are-signed",
        file="megatron_rl/weights/delta.py",
        line="codes = codes.to(torch.int64) & most",
        becomes="codes = codes.to(torch.int64)",
        fault="a changed weight behind a gap of 32,768 words or more is written elsewhere",
        tests=("tests/unit/weights/test_delta.py::test_every_gap_has_its_code",),
    ),
)

SESSIONS = (
    Mutant(
        name="draws-by-their-arrival",
        file="megatron_rl/rollout/endpoint/session.py",
        line='name = f"{self.name}/{digest}.{self._draws[digest]}"',
        becomes='name = f"{self.name}/{digest}.{self._draws.total()}"',
        fault="what an agent's request draws depends on how many others of its session came before it",
        tests=(
            "tests/unit/rollout/endpoint/test_recorder.py::test_a_draw_is_named_by_its_context_whatever_the_order_of_requests",
        ),
    ),
    Mutant(
        name="room-behind-the-latest-turn",
        file="megatron_rl/rollout/endpoint/session.py",
        line="used = len(context) - len(parent.path()[0].new_ids)",
        becomes="used = len(context) - len(parent.new_ids)",
        fault="a session's room is counted without what was new in its latest turn, not without its first request",
        tests=(
            "tests/unit/rollout/endpoint/test_agents.py::test_a_limit_ends_an_episode_and_fails_nothing[settings0-length]",
        ),
    ),
)

BUFFERS = (
    Mutant(
        name="replayed-and-remembered-anew",
        file="megatron_rl/rollout/groups/replay.py",
        line="if number not in replayed:",
        becomes="if True:",
        fault="a replayed group comes into the buffer again, unused, and is replayed for ever",
        tests=("tests/unit/rollout/test_queue.py::test_a_replayed_group_is_not_remembered_anew",),
    ),
    Mutant(
        name="stale-failures-are-rolled-again",
        file="megatron_rl/rollout/groups/reroll.py",
        line="failed = np.intersect1d(failed, list(fresh))",
        becomes="",
        fault="a failed group that is too old is asked again twice: put back, and by the re-roll buffer",
        tests=("tests/unit/rollout/test_queue.py::test_a_failed_group_that_is_too_old_waits_for_no_reroll",),
    ),
)

SERVED = (
    Mutant(
        name="least-advantage-of-one-sign",
        file="megatron_rl/serve/losses.py",
        line='return dataclasses.replace(datum, inputs={**datum.inputs, "advantages": '
        "np.where(abs(sent) <= least, 0, sent)})",
        becomes='return dataclasses.replace(datum, inputs={**datum.inputs, "advantages": '
        "np.where(sent <= least, 0, sent)})",
        fault="under `serve.least_advantage` no negative advantage trains",
        tests=("tests/unit/serve/test_losses.py::test_the_least_advantage_is_a_size_whatever_the_sign",),
    ),
    Mutant(
        name="forgotten-since-its-arrival",
        file="megatron_rl/serve/operations.py",
        line="return self._drop([x for x in self._all.values() if x.state == ENDED and x.asked_at < old])",
        becomes="return self._drop([x for x in self._all.values() if x.state == ENDED and x.arrived_at < old])",
        fault="an answer is forgotten while its client still asks for it, and at once where the operation was long",
        tests=("tests/unit/serve/test_operations.py::test_an_answer_is_kept_from_when_it_was_last_asked_for",),
    ),
    Mutant(
        name="saved-over-what-it-goes-on-from",
        file="megatron_rl/serve/coordinator.py",
        line="return folders[noted == str(folders[0])]",
        becomes="return folders[noted != str(folders[0])]",
        fault="a server that dies while it saves a model has written over the state that the model goes on from",
        tests=(
            "tests/unit/serve/test_store.py::test_a_models_own_save_never_overwrites_the_one_that_it_would_go_on_from",
        ),
    ),
)

SIZES = (
    Mutant(
        name="large-groups-weigh-more",
        file="megatron_rl/algorithm/advantage.py",
        line="return group_size / sizes[index.reshape(-1)]",
        becomes="return np.ones(len(groups))",
        fault="under adaptive sizes a prompt with many samples weighs more, so the gradient is biased",
        tests=("tests/unit/algorithm/test_unequal_groups.py",),
    ),
    Mutant(
        name="dr-grpo-by-its-own-size",
        file="megatron_rl/algorithm/advantage.py",
        line="return dr_grpo(total_rewards) if group_size is None else rloo(total_rewards) * (1 - 1 / group_size)",
        becomes="return dr_grpo(total_rewards)",
        fault="under adaptive sizes `dr_grpo` weighs small groups less than it would equal ones",
        tests=("tests/unit/algorithm/test_unequal_groups.py",),
    ),
    Mutant(
        name="mini-batches-cut-groups",
        file="megatron_rl/planning/plan.py",
        line="return [samples[mini_batch == index] for index in range(int(mini_batch.max()) + 1)]",
        becomes="pass",
        fault="under adaptive sizes mini-batches cut groups, and their number changes from rollout to rollout",
        tests=("tests/unit/algorithm/test_unequal_groups.py",),
    ),
    Mutant(
        name="sizes-forget-their-memory",
        file="megatron_rl/rollout/groups/queue_state.py",
        line='"sizes": parts.sizes.state(),',
        becomes='"sizes": {},',
        fault="a run that goes on from a checkpoint deals equal groups anew",
        tests=("tests/runs/test_group_sizes.py::test_sizes_go_on_from_a_checkpoint",),
    ),
)

DRAFTS = (
    Mutant(
        name="every-draft-is-kept",
        file="megatron_rl/rollout/speculation/decode.py",
        line="accepted = next((i for i, token in enumerate(draft) if token != own[i]), len(draft))",
        becomes="accepted, own = len(draft), [*draft, own[-1]]",
        fault="drafted tokens are kept without verification, so later tokens follow what the policy did not say",
        tests=("tests/unit/rollout/speculation/test_distribution.py",),
    ),
    Mutant(
        name="a-slow-way-is-never-left",
        file="megatron_rl/rollout/speculation/pace.py",
        line="return self._seconds[*kind, True] < self._seconds[*kind, False]",
        becomes="return True",
        fault="batches draft where that takes more time",
        tests=("tests/unit/rollout/speculation/test_pace.py",),
    ),
)

PREFIXES = (
    Mutant(
        name="one-row-for-two-tokens",
        file="megatron_rl/rollout/engines/prefix_rows.py",
        line="children, child = torch.unique(place * size + tokens, return_inverse=True)",
        becomes="children, child = torch.unique(tokens, return_inverse=True)",
        fault="samples of two prompts that drew the same token go on from one of them",
        tests=("tests/unit/rollout/test_prefix_rows.py",),
    ),
    Mutant(
        name="parted-rows-keep-their-parents-place",
        file="megatron_rl/rollout/engines/prefix_rows.py",
        line="self._position, self._mask = self._position[parents], self._mask[parents]",
        becomes="self._position = self._position[parents]",
        fault="where samples part, a row has the pads of another prompt",
        tests=("tests/unit/rollout/test_prefix_rows.py",),
    ),
    Mutant(
        name="grouped-queries-take-anothers-mask",
        file="megatron_rl/rollout/engines/grouped_queries.py",
        line="attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)",
        becomes="attention_mask = attention_mask.repeat_interleave(heads // groups, 2)",
        fault="a query of a grouped head sees the keys of the row's other queries",
        tests=("tests/unit/rollout/test_grouped_queries.py",),
    ),
)

NEWER_ROLLOUTS = (*CHANGES, *SESSIONS, *BUFFERS, *SERVED, *SIZES, *DRAFTS, *PREFIXES)
