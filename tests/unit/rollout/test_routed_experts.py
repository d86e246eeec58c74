"""Routed experts on their way from an engine to a sample: read, checked, merged over turns, saved and loaded."""

import base64
import dataclasses
import io
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.config import Config, RolloutConfig, load_config
from megatron_rl.distributed import frames
from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.rollout.engines.replica import Completion, ReplicaFacts, check_facts
from megatron_rl.rollout.groups.serialization import SavedGroup, check_packed, pack_groups, unpack_groups
from megatron_rl.rollout.job import to_sample
from megatron_rl.rollout.vllm import routed_experts
from megatron_rl.rollout.vllm.answers import Answers
from megatron_rl.rollout.vllm.arguments import engine_arguments
from megatron_rl.types import Rollout
from megatron_rl.validate import validate_config
from megatron_rl.weights.fused import file_tensors
from tests.unit.rollout.fake_engine import prompt_of
from tests.unit.rollout.letter_episodes import LetterEngine, episodes_of
from tests.unit.rollout.letter_episodes import prompt_of as episode_prompt_of
from tests.unit.rollout.tiny_model import SIZES, VOCAB, _tokenizer, engine_of

LAYERS, TOP_K, EXPERTS = 3, 2, 8
PROMPT = prompt_of(7, token_ids=(4, 5, 6))
REPLAY = RolloutConfig(routing_replay="rollout")


def experts_of(tokens: int, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    """Return [tokens, layers, top_k], as vLLM 0.32 gives them: unsigned, and no row of the last token."""
    return np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(dtype)


def rollouts_of(tokens: int, experts: np.ndarray | None, *, needed: bool = True) -> list[Rollout]:
    """Return the one rollout of an engine's answer, of so many response tokens, to PROMPT."""
    said = {"finish_reason": "stop", "weight_versions": ((3, tokens),), "routed_experts": experts}
    logprobs, ids = np.full(tokens, -0.5, dtype=np.float32), np.array([*[5] * (tokens - 1), 0])
    answers = Answers(_tokenizer(), len(VOCAB), needs_experts=needed)
    return answers.rollouts(PROMPT, [Completion(token_ids=ids, logprobs=logprobs, **said)], 1, (0,))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_come_through_a_frame_as_they_were(dtype: type) -> None:
    given = [experts_of(5, dtype), experts_of(3, dtype, seed=1)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, {}, routed_experts.frame_of([SimpleNamespace(routed_experts=x) for x in given]))
        _, arrays = frames.receive(theirs)
    found = routed_experts.of_frame(arrays, 2)
    assert all(np.array_equal(a, b) and a.dtype == np.int16 for a, b in zip(found, given, strict=True))
    # and one without experts sends none
    assert routed_experts.frame_of([SimpleNamespace(routed_experts=None)]) == {}
    assert routed_experts.of_frame({}, 2) == [None, None]


def as_text(array: np.ndarray, **given: bool) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, **given)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_servers_text_is_read_nothing_is_unpickled_and_a_sample_gets_a_row_for_each_token() -> None:
    given = experts_of(4)
    assert np.array_equal(routed_experts.of_choice({"routed_experts": as_text(given)}), given)
    assert routed_experts.of_choice({}) is None and routed_experts.of_choice({"routed_experts": None}) is None
    for text in ("no base64!", as_text(np.array([{}], dtype=object), allow_pickle=True)):
        with pytest.raises(ValueError):
            routed_experts.of_choice({"routed_experts": text})
    given = experts_of(6)  # 3 tokens of the prompt, 4 of the response, the last one's row less
    (rollout,) = rollouts_of(4, given)
    row = to_sample(rollout, included=True).routed_experts
    assert row.dtype == np.int16 and row.shape == (7, LAYERS, TOP_K)
    assert np.array_equal(row[:6], given) and (row[6] == -1).all()
    assert rollouts_of(4, given, needed=False)[0].routed_experts is None


@pytest.mark.parametrize(("experts", "said"), [
    (None, "sample 7@0#0 came without its experts"),
    (experts_of(7), r"sample 7@0#0 of 3 prompt and 4 response tokens came with experts of shape \[7, 3, 2\]"),
    (experts_of(3), r"experts of shape \[3, 3, 2\]; rollout.routing_replay=rollout wants \[6, layers"),
    (experts_of(6)[..., 0], r"experts of shape \[6, 3\]"),
])
def test_experts_that_misfit_their_sample_are_refused(experts: np.ndarray | None, said: str) -> None:
    with pytest.raises(EngineError, match=said) as raised:
        rollouts_of(4, experts)
    assert "start the engine with --enable-return-routed-experts" in str(raised.value)


def arguments_of(config: Config, device: torch.device) -> dict[str, object]:
    sections = config.model, config.rollout, config.weight_sync, config.lora
    return engine_arguments(*sections, max_prompt_tokens=config.data.max_prompt_tokens, seed=0, device=device)


def test_engines_are_asked_for_experts_and_one_that_returns_none_is_refused_at_its_start() -> None:
    facts = ReplicaFacts(vllm_version="0.32.0", vocab_size=9, max_model_tokens=8, logprobs_mode="processed_logprobs")
    check_facts("http://h:1", facts, 9, 8, RolloutConfig())
    check_facts("http://h:1", dataclasses.replace(facts, routed_experts=True), 9, 8, REPLAY)
    with pytest.raises(ConfigError, match="http://h:1 is vLLM 0.32.0 without --enable-return-routed-experts"):
        check_facts("http://h:1", facts, 9, 8, REPLAY)
    config = load_config(None, ["rollout.engine=vllm", "rollout.routing_replay=rollout", "rollout.sleep=never"])
    assert arguments_of(config, torch.device("cuda", 0))["enable_return_routed_experts"] is True
    off = load_config(None, ["rollout.engine=vllm", "rollout.routing_replay=old_logprobs"])
    assert arguments_of(off, torch.device("cpu"))["enable_return_routed_experts"] is False
    with pytest.raises(ConfigError, match="whose builds for the CPU return none .0.32: Model Runner V2"):
        arguments_of(config, torch.device("cpu"))


def test_off_is_a_word_and_replay_of_a_pass_that_is_not_made_or_of_a_dense_model_is_refused(hf_path) -> None:
    assert load_config(None, ["rollout.routing_replay=off"]).rollout.routing_replay == "off"
    with pytest.raises(ConfigError, match="rollout.routing_replay='on' .*off, old_logprobs, rollout"):
        RolloutConfig(routing_replay="on")
    for setting in ("correction.old_logprobs=rollout", "replay.recompute_logprobs=false"):
        given = ["rollout.routing_replay=old_logprobs", "replay.capacity_groups=4", setting]
        with pytest.raises(ConfigError, match=f"under {setting}"):
            validate_config(load_config(None, given))
    with pytest.raises(ConfigError, match="a Qwen2ForCausalLM has none; set rollout.routing_replay=off"):
        engine_of(hf_path, None, routing_replay="rollout")


def saved(rollouts: list) -> bytes:
    return pack_groups({"a": SavedGroup(prompt=PROMPT, rollouts=rollouts, scores=None)})


def test_saved_groups_keep_their_experts() -> None:
    bare = rollouts_of(2, None, needed=False)
    given = [*rollouts_of(4, experts_of(6)), *bare, *rollouts_of(5, experts_of(7, seed=2))]
    found = unpack_groups(saved(given), lambda *_: PROMPT)["a"].rollouts
    assert found == given and found[1].routed_experts is None
    for i in (0, 2):
        read, sent = found[i].routed_experts, given[i].routed_experts
        assert np.array_equal(read, sent) and read.dtype == np.int16
    with np.load(io.BytesIO(saved(given))) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["experts"] = arrays["experts"][:-1]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    with pytest.raises(ValueError):
        check_packed(buffer.getvalue())


class NotingEngine(LetterEngine):
    """Gives each token of its n-th call the experts (n, its place), its last one none."""

    def generate(self, prompts, samples_per_prompt, *, on_finished, **given):
        number = len(self.calls)

        def noted(rollout: Rollout) -> Rollout:
            tokens = len(rollout.prompt.token_ids) + len(rollout.response_ids)
            experts = np.stack([np.full(tokens, number), np.arange(tokens)], axis=1)[:, None].astype(np.int16)
            experts[-1] = -1
            return dataclasses.replace(rollout, routed_experts=experts)

        def finished(k: int, group: list[Rollout]) -> None:
            on_finished(k, [noted(rollout) for rollout in group])

        return super().generate(prompts, samples_per_prompt, on_finished=finished, **given)


def test_a_turns_tokens_keep_the_experts_that_sampled_them() -> None:
    """Of an episode each token has the experts of the first call that knows them, in its own place."""
    engine = episodes_of(NotingEngine(room=60), max_turns=4)
    rollouts = engine.generate([episode_prompt_of(i) for i in range(6)], 3)
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


def test_the_embedded_engine_notes_where_its_tokens_went(tmp_path) -> None:
    """The notes are transformers' own choice over each whole sample, at prompts that are padded and rows that end."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, initializer_range=0.3)).eval()
    mixture.config.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, None, temperature=1.0, routing_replay="rollout", max_batch_samples=6)
    engine.load_weights(iter(file_tensors(mixture.state_dict(), "qwen3_moe").items()), version=1)
    found = engine.generate([prompt_of(i, token_ids=tuple(range(3, 5 + 2 * i))) for i in range(4)], 5)
    assert len({len(x.response_ids) for x in found}) > 1  # rows leave the batch at different steps
    for sampled in found:
        tokens = torch.tensor([*sampled.prompt.token_ids, *sampled.response_ids])
        with torch.no_grad():
            logits = mixture(tokens[None], output_router_logits=True).router_logits
        wanted = torch.stack([x.topk(2, dim=-1).indices for x in logits], dim=1).sort(dim=-1).values.numpy()
        noted = np.sort(sampled.routed_experts, axis=2)
        assert sampled.routed_experts.dtype == np.int16 and len(noted) == len(tokens)
        assert np.array_equal(noted[:-1], wanted[:-1]) and (noted[-1] == -1).all()
