"""Episodes on the real embedded engine: their log-probs equal Hugging Face's where a token was sampled."""

import dataclasses
import io
import json

import numpy as np
import pytest

from megatron_rl.environment import Step
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.engines.multi_turn import MultiTurnEngine
from megatron_rl.rollout.groups.serialization import SavedGroup, pack_groups, unpack_groups
from megatron_rl.rollout.job import Group, to_sample
from megatron_rl.types import Prompt, Score
from tests.unit.rollout import letter_episodes
from tests.unit.rollout.tiny_model import (
    EOS,
    ROUNDING,
    _tokenizer,
    engine_of,
    forward_logprobs,
    merging_tokenizer,
)

ROOM = 24
PROMPTS = [Prompt(prompt_id=f"{k}@0", text="", token_ids=(2 + k, 5, 3)[: 1 + k % 3], columns={}) for k in range(7)]


class Counter:
    """An environment that answers with the last digit of a turn's length, three times at most."""

    def reset(self, prompt: Prompt) -> None:
        self.told = 0

    def step(self, action: str) -> Step:
        self.told += 1
        return Step(observation=f"={len(action) % 10}", reward=0.25, done=self.told == 3)


@pytest.fixture(scope="module")
def inner(model, hf_path) -> TransformersEngine:
    return engine_of(hf_path, model, max_response_tokens=ROOM, max_batch_samples=16)


def episodes_of(inner: TransformersEngine) -> MultiTurnEngine:
    environment = "tests.unit.rollout.test_multi_turn_engine:Counter"
    return letter_episodes.episodes_of(inner, environment, tokenizer=_tokenizer(), room=ROOM, max_turns=4)


@pytest.mark.parametrize("temperature", [None, 0.0])
def test_logprobs_equal_hugging_faces_where_a_token_was_sampled(model, inner, temperature) -> None:
    found = episodes_of(inner).generate(PROMPTS, 6 if temperature is None else 2, temperature=temperature)
    masked = 0
    for rollout in found:
        mask = np.ones(len(rollout.response_ids), bool) if rollout.loss_mask is None else np.array(rollout.loss_mask)
        assert np.abs(forward_logprobs(model, rollout).numpy() - rollout.logprobs)[mask].max() < ROUNDING
        assert not np.array(rollout.logprobs)[~mask].any()
        masked += (~mask).sum()
    assert masked > 10 and {x.num_turns for x in found} >= {1, 2}
    if temperature == 0.0:
        assert [x.response_ids for x in found[::2]] == [x.response_ids for x in found[1::2]]


class Ones:
    """An environment that answers every turn with 1."""

    def reset(self, prompt: Prompt) -> None:
        pass

    def step(self, action: str) -> Step:
        return Step(observation="1", reward=0.0)


def test_turns_whose_text_has_other_tokens_keep_the_sampled_ones(model, hf_path) -> None:
    """The tokenizer merges letters within a turn, and across its borders with the prompt and the observation."""
    tokenizer, calls = merging_tokenizer("12=*"), []

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    class Recording(TransformersEngine):
        def generate(self, *args, **given):
            found = super().generate(*args, **given)
            calls.extend(found)
            return found

    inner = engine_of(hf_path, model, tokenizer, Recording, max_response_tokens=ROOM, max_batch_samples=16)
    environment = "tests.unit.rollout.test_multi_turn_engine:Ones"
    episodes = letter_episodes.episodes_of(inner, environment, tokenizer=tokenizer, room=ROOM, max_turns=3)
    prompts = [Prompt(prompt_id=f"{k}@0", text="", token_ids=encode("=21"[k:]), columns={}) for k in range(3)]
    found, within, across = episodes.generate(prompts, 8), 0, 0
    for rollout in found:
        ids, logprobs, mask = [], [], []
        for turn in calls:
            if turn.sample_id != rollout.sample_id and not turn.sample_id.startswith(f"{rollout.sample_id}/"):
                continue
            if ids:
                ids, logprobs, mask = [*ids, *encode("1")], [*logprobs, 0.0], [*mask, False]
            assert turn.prompt.token_ids == (*rollout.prompt.token_ids, *ids)
            ids, logprobs = [*ids, *turn.response_ids], [*logprobs, *turn.logprobs]
            mask += [True] * len(turn.response_ids)
            within += encode(turn.text) != tuple(x for x in turn.response_ids if x != EOS)
            across += encode(f"1{turn.text}") != (*encode("1"), *encode(turn.text))
        assert (ids, logprobs) == (list(rollout.response_ids), list(rollout.logprobs))
        assert mask == ([True] * len(ids) if rollout.loss_mask is None else list(rollout.loss_mask))
        assert np.abs(forward_logprobs(model, rollout).numpy() - logprobs)[mask].max() < ROUNDING
    assert within > 10 and across > 10 and max(x.num_turns for x in found) == 3


def test_a_saved_group_comes_back_equal(inner) -> None:
    rollouts = episodes_of(inner).generate(PROMPTS[:2], 3)
    rollouts[1] = dataclasses.replace(rollouts[1], environment_reward=None, excluded="it hung")
    plain = inner.generate(PROMPTS[2:3], 3)
    scores = [Score(total=None, by_function=(None, 1.0)), Score(total=0.0, by_function=(None, 1.0), error="E: x")] * 2
    groups = {
        "a": SavedGroup(prompt=PROMPTS[0], rollouts=rollouts[:3], scores=scores[:3]),
        "b": SavedGroup(prompt=PROMPTS[1], rollouts=rollouts[3:], scores=None),
        "c": SavedGroup(prompt=PROMPTS[2], rollouts=plain, scores=None),
    }
    assert any(x.loss_mask is not None for x in rollouts) and all(x.loss_mask is None for x in plain)
    found = unpack_groups(pack_groups(groups), lambda prompt_id, attempt: {p.prompt_id: p for p in PROMPTS}[prompt_id])
    assert list(found) == list(groups)
    for key, group in groups.items():
        exact = [dataclasses.replace(x, logprobs=tuple(np.float32(x.logprobs).tolist())) for x in group.rollouts]
        assert found[key].rollouts == exact and found[key].scores == group.scores and found[key].prompt == group.prompt


def test_rows_carry_the_mask_and_a_group_of_before_masks_is_read(inner) -> None:
    rollout = next(x for x in episodes_of(inner).generate(PROMPTS, 4) if x.num_turns > 1)
    rollout = dataclasses.replace(rollout, finish_reason="stop")
    row = to_sample(rollout, included=True)
    assert row.loss_mask.tolist() == list(rollout.loss_mask) and int(row.loss_mask.sum()) == rollout.num_sampled
    assert not to_sample(rollout, included=False).loss_mask.any()
    cut = dataclasses.replace(rollout, finish_reason="length")
    group = Group(rollouts=(rollout, cut), scores=(Score(total=1.0, by_function=(1.0,)),) * 2)
    assert [s.loss_mask.any() for s in group.samples(mask_truncated=True)] == [True, False]
    with pytest.raises(ValueError, match=f"{rollout.sample_id} has .*, but its loss_mask has 1 entries"):
        to_sample(dataclasses.replace(rollout, loss_mask=(True,)), included=True)
    # a group that an earlier release wrote is read: it has five fields a sample and no array of masks
    plain = inner.generate(PROMPTS[:1], 2)
    packed = pack_groups({"a": SavedGroup(prompt=PROMPTS[0], rollouts=plain, scores=None)})
    with np.load(io.BytesIO(packed)) as file:
        arrays = {name: file[name] for name in ("header", "token_ids", "logprobs")}
    header = json.loads(arrays["header"].tobytes())
    header[0][3] = [sample[:5] for sample in header[0][3]]
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    found, wanted = (unpack_groups(x, lambda *_: PROMPTS[0])["a"].rollouts for x in (buffer.getvalue(), packed))
    assert found == wanted and all(x.loss_mask is None for x in found)
