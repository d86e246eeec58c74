"""Routed experts on their way from an engine to a sample: read, checked, merged over turns, saved and loaded."""

from __future__ import annotations

import base64
import dataclasses
import io
import random
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.config import EnvironmentConfig, RolloutConfig, load_config
from megatron_rl.data.chat import Observations
from megatron_rl.distributed import frames
from megatron_rl.environment import environment_maker
from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.rollout.build import engine_arguments
from megatron_rl.rollout.multi_turn import MultiTurnEngine
from megatron_rl.rollout.serialization import SavedGroup, check_packed, pack_groups, unpack_groups
from megatron_rl.rollout.transformers_engine import TransformersEngine
from megatron_rl.rollout.vllm import routed_experts
from megatron_rl.rollout.vllm.answers import Answers
from megatron_rl.rollout.vllm.replica import Completion, ReplicaFacts, check_facts
from megatron_rl.rollout.worker import to_sample
from megatron_rl.types import Prompt, Rollout
from megatron_rl.validate import validate_config
from megatron_rl.weights.fused import file_tensors
from tests.unit.data.templates import tokenizer_of
from tests.unit.rollout.tiny_model import SIZES, VOCAB, _model, _tokenizer

LAYERS, TOP_K, EXPERTS = 3, 2, 8
TOKENIZER = tokenizer_of(None)
PROMPT = Prompt(prompt_id="7@0", text="", token_ids=(4, 5, 6), columns={})
REPLAY = RolloutConfig(routing_replay="rollout")


def experts_of(tokens: int, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    """Return [tokens, layers, top_k], as vLLM 0.32 gives them: unsigned, and no row of the last token."""
    return np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(dtype)


def completion_of(tokens: int, experts: np.ndarray | None) -> Completion:
    return Completion(
        token_ids=np.array([*[5] * (tokens - 1), 0]),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        finish_reason="stop",
        weight_versions=((3, tokens),),
        routed_experts=experts,
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_come_through_a_frame_as_they_were(dtype: type) -> None:
    given = [experts_of(5, dtype), experts_of(3, dtype, seed=1)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, {}, routed_experts.frame_of([SimpleNamespace(routed_experts=x) for x in given]))
        _, arrays = frames.receive(theirs)
    found = routed_experts.of_frame(arrays, 2)
    assert len(found) == 2 and all(
        np.array_equal(a, b) and a.dtype == np.int16 for a, b in zip(found, given, strict=True)
    )


def test_an_engine_without_experts_sends_none() -> None:
    assert routed_experts.frame_of([SimpleNamespace(routed_experts=None)]) == {}
    assert routed_experts.of_frame({}, 2) == [None, None]


def as_text(array: np.ndarray, **given: bool) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, **given)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_servers_text_is_read_and_nothing_is_unpickled() -> None:
    given = experts_of(4)
    assert np.array_equal(routed_experts.of_choice({"routed_experts": as_text(given)}), given)
    assert routed_experts.of_choice({}) is None and routed_experts.of_choice({"routed_experts": None}) is None
    for text in ("no base64!", as_text(np.array([{}], dtype=object), allow_pickle=True)):
        with pytest.raises(ValueError):
            routed_experts.of_choice({"routed_experts": text})


def test_a_sample_gets_a_row_for_each_token() -> None:
    given = experts_of(6)  # 3 tokens of the prompt, 4 of the response, the last one's row less
    answers = Answers(_tokenizer(), len(VOCAB), needs_experts=True)
    (rollout,) = answers.rollouts(PROMPT, [completion_of(4, given)], 1, (0,))
    row = to_sample(rollout, included=True).routed_experts
    assert row.dtype == np.int16 and row.shape == (7, LAYERS, TOP_K)
    assert np.array_equal(row[:6], given) and (row[6] == -1).all()
    (without,) = Answers(_tokenizer(), len(VOCAB)).rollouts(PROMPT, [completion_of(4, given)], 1, (0,))
    assert without.routed_experts is None


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, "sample 7@0#0 came without its experts"),
        (experts_of(7), r"sample 7@0#0 of 3 prompt and 4 response tokens came with experts of shape \[7, 3, 2\]"),
        (experts_of(3), r"experts of shape \[3, 3, 2\]; rollout.routing_replay=rollout wants \[6, layers"),
        (experts_of(6)[..., 0], r"experts of shape \[6, 3\]"),
    ],
)
def test_experts_that_misfit_their_sample_are_refused(experts: np.ndarray | None, said: str) -> None:
    answers = Answers(_tokenizer(), len(VOCAB), needs_experts=True)
    with pytest.raises(EngineError, match=said) as raised:
        answers.rollouts(PROMPT, [completion_of(4, experts)], 1, (0,))
    assert "start the engine with --enable-return-routed-experts" in str(raised.value)


def test_an_engine_that_returns_no_experts_is_refused_at_its_start() -> None:
    facts = ReplicaFacts(vllm_version="0.32.0", vocab_size=9, max_model_tokens=8, logprobs_mode="processed_logprobs")
    check_facts("http://h:1", facts, 9, 8, RolloutConfig())
    check_facts("http://h:1", dataclasses.replace(facts, routed_experts=True), 9, 8, REPLAY)
    with pytest.raises(ConfigError, match="http://h:1 is vLLM 0.32.0 without --enable-return-routed-experts"):
        check_facts("http://h:1", facts, 9, 8, REPLAY)


def test_an_engine_of_the_runs_own_is_asked_for_experts_and_not_on_a_cpu() -> None:
    config = load_config(None, ["rollout.engine=vllm", "rollout.routing_replay=rollout", "rollout.sleep=never"])
    assert engine_arguments(config, torch.device("cuda", 0))["enable_return_routed_experts"] is True
    off = load_config(None, ["rollout.engine=vllm", "rollout.routing_replay=old_logprobs"])
    assert engine_arguments(off, torch.device("cpu"))["enable_return_routed_experts"] is False
    with pytest.raises(ConfigError, match="whose builds for the CPU return none .0.32: Model Runner V2"):
        engine_arguments(config, torch.device("cpu"))


def test_off_is_a_word_without_quotes() -> None:
    assert load_config(None, ["rollout.routing_replay=off"]).rollout.routing_replay == "off"
    with pytest.raises(ConfigError, match="rollout.routing_replay='on' .*off, old_logprobs, rollout"):
        RolloutConfig(routing_replay="on")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["correction.old_logprobs=rollout"], "under correction.old_logprobs=rollout there is none"),
        (["replay.capacity_groups=4", "replay.recompute_logprobs=false"], "under replay.recompute_logprobs=false"),
    ],
)
def test_replay_of_a_pass_that_is_not_made_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate_config(load_config(None, ["rollout.routing_replay=old_logprobs", *settings]))


def saved(rollouts: list) -> bytes:
    return pack_groups({"a": SavedGroup(prompt=PROMPT, rollouts=rollouts, scores=None)})


def test_saved_groups_keep_their_experts() -> None:
    answers = Answers(_tokenizer(), len(VOCAB), needs_experts=True)
    given = [
        *answers.rollouts(PROMPT, [completion_of(4, experts_of(6))], 1, (0,)),
        *Answers(_tokenizer(), len(VOCAB)).rollouts(PROMPT, [completion_of(2, None)], 1, (0,)),
        *answers.rollouts(PROMPT, [completion_of(5, experts_of(7, seed=2))], 1, (0,)),
    ]
    found = unpack_groups(saved(given), lambda *_: PROMPT)["a"].rollouts
    assert found == given and found[1].routed_experts is None
    for i in (0, 2):
        assert np.array_equal(found[i].routed_experts, given[i].routed_experts)
        assert found[i].routed_experts.dtype == np.int16
    with np.load(io.BytesIO(saved(given))) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["experts"] = arrays["experts"][:-1]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    with pytest.raises(ValueError):
        check_packed(buffer.getvalue())


class NotingEngine:
    """Samples a few letters a turn; gives each token of its n-th call the experts (n, its place), its last one none."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        number, self.calls = self.calls, self.calls + 1
        for k, prompt in enumerate(prompts):
            group = []
            for sample in range(samples_per_prompt):
                draw = random.Random(f"{prompt.name}/{sample}/{len(prompt.token_ids)}")
                text = "".join(draw.choice("abcdef") for _ in range(draw.randint(1, 5)))
                ids = (*TOKENIZER(text, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id)
                tokens = len(prompt.token_ids) + len(ids)
                experts = np.stack([np.full(tokens, number), np.arange(tokens)], axis=1)[:, None].astype(np.int16)
                experts[-1] = -1
                turn = dict(text=text, finish_reason="stop", weight_versions=((3, len(ids)),), routed_experts=experts)
                logprobs = (-1.0,) * len(ids)
                group.append(Rollout(prompt=prompt, sample_index=sample, response_ids=ids, logprobs=logprobs, **turn))
            on_finished(k, group)

    def close(self) -> None: ...


def test_a_turns_tokens_keep_the_experts_that_sampled_them() -> None:
    """Of an episode each token has the experts of the first call that knows them, in its own place."""
    config = EnvironmentConfig(name="tests.unit.rollout.test_multi_turn:Echo", max_turns=4)
    maker, observations = environment_maker(config), Observations(TOKENIZER, "{prompt}", config.role)
    engine = MultiTurnEngine(NotingEngine(), maker, observations, TOKENIZER, config, max_response_tokens=60)
    ids = tuple(TOKENIZER("p4", add_special_tokens=False).input_ids)
    rollouts = engine.generate([Prompt(prompt_id=f"{i}@0", text="", token_ids=ids, columns={}) for i in range(6)], 3)
    engine.close()
    assert max(rollout.num_turns for rollout in rollouts) > 2
    for rollout in rollouts:
        rows, start = rollout.routed_experts[:, 0], len(rollout.prompt.token_ids)
        assert len(rows) == start + len(rollout.response_ids) and (rows[-1] == -1).all()
        assert rows[:-1, 1].tolist() == list(range(len(rows) - 1))
        mask = (True,) * len(rollout.response_ids) if rollout.loss_mask is None else rollout.loss_mask
        ends = [i for i, own in enumerate(mask) if own and (i + 1 == len(mask) or not mask[i + 1])]
        # the n-th call knows all tokens before the last one of its turn
        wanted = [sum(start + end <= token for end in ends) for token in range(len(rows) - 1)]
        assert rows[:-1, 0].tolist() == wanted


@pytest.fixture(scope="module")
def mixture() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, initializer_range=0.3
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Qwen3MoeForCausalLM(config).eval()


def test_the_embedded_engine_notes_where_its_tokens_went(mixture: Qwen3MoeForCausalLM, tmp_path) -> None:
    """The notes are transformers' own choice over each whole sample, at prompts that are padded and rows that end."""
    mixture.config.save_pretrained(tmp_path)
    rollout = RolloutConfig(max_response_tokens=12, routing_replay="rollout", max_batch_samples=6)
    engine = TransformersEngine(
        str(tmp_path), _tokenizer(), rollout, seed=3, dtype=torch.float32, device=torch.device("cpu")
    )
    engine.load_weights(iter(file_tensors(mixture.state_dict(), "qwen3_moe").items()), version=1)
    prompts = [Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(range(3, 5 + 2 * i)), columns={}) for i in range(4)]
    found = engine.generate(prompts, 5)
    assert len({len(x.response_ids) for x in found}) > 1  # rows leave the batch at different steps
    for sampled in found:
        tokens = torch.tensor([*sampled.prompt.token_ids, *sampled.response_ids])
        with torch.no_grad():
            logits = mixture(tokens[None], output_router_logits=True).router_logits
        wanted = torch.stack([x.topk(2, dim=-1).indices for x in logits], dim=1).sort(dim=-1).values.numpy()
        noted = np.sort(sampled.routed_experts, axis=2)
        assert sampled.routed_experts.dtype == np.int16 and len(noted) == len(tokens)
        assert np.array_equal(noted[:-1], wanted[:-1]) and (noted[-1] == -1).all()


def test_a_dense_model_has_no_experts_to_note(tmp_path) -> None:
    _model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a Qwen2ForCausalLM has none; set rollout.routing_replay=off"):
        TransformersEngine(str(tmp_path), _tokenizer(), REPLAY, seed=0, dtype=torch.float32, device=torch.device("cpu"))
