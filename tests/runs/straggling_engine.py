"""An engine for whole runs that stands in for vLLM with weights in flight: some groups come late.

It samples with the embedded engine, in the thread of each call, and holds back the groups of every ``EVERY``-th row of
the data for ``LATE_S`` seconds, while further calls and new weights pass.
"""

from __future__ import annotations

import threading
import time

from megatron_rl.rollout import build
from megatron_rl.rollout.transformers_engine import TransformersEngine
from tests.runs.command import command_line

EVERY, LATE_S = 5, 0.5


class StragglingEngine(TransformersEngine):
    is_elsewhere = True

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self._one_at_a_time = threading.Lock()

    def load_weights(self, tensors, version):
        with self._one_at_a_time:
            return super().load_weights(tensors, version)

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        with self._one_at_a_time:
            rollouts = super().generate(prompts, samples_per_prompt, temperature=temperature, max_tokens=max_tokens)
        late = [int(prompt.prompt_id.partition("@")[0]) % EVERY == 0 for prompt in prompts]
        for comes_late in (False, True):
            if comes_late and any(late):
                time.sleep(LATE_S)
            for index in range(len(prompts)):
                if late[index] == comes_late and on_finished is not None:
                    on_finished(index, rollouts[index * samples_per_prompt : (index + 1) * samples_per_prompt])
        return rollouts


def straggling(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    """Run the command line with this engine in the place of vLLM's, whose settings the configuration has."""

    def build_engine(config, tokenizer, *, location, role, device, dtype, vocab_size):
        return StragglingEngine(
            config.model.hf_path, tokenizer, config.rollout, seed=config.run.seed, dtype=dtype, device=device
        )

    kept, build.build_engine = build.build_engine, build_engine
    try:
        return command_line(rank, world, given)
    finally:
        build.build_engine = kept
