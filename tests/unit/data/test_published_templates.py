"""Our tokens of a conversation equal the published templates' rendering of it: supervised, multi-turn, the endpoint."""

import contextlib

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.chat import Observations
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.endpoint.bodies import chat_request
from megatron_rl.rollout.endpoint.recorder import Turn
from megatron_rl.rollout.endpoint.rendering import Rendering
from megatron_rl.rollout.endpoint.requests import Refused
from tests.unit.data.families import FAMILIES, ID, TOOLS, calling, parts_of, said, trained


def check(family: str, messages: list[dict], wanted: list[str], **columns) -> None:
    """Hold tokens against the template's rendering of the whole, and the loss against the turns' texts."""
    tokenizer, ends, _ = parts_of(family)
    _, runs, ids = trained(tokenizer, messages, **columns)
    whole, text = tokenizer.apply_chat_template(messages, tokenize=False, **columns), tokenizer.decode(ids)
    if family == "glm4_moe":  # which ends a turn by what follows
        text = text.removesuffix(ends["tool" if messages[-1].get("tool_calls") else "user"])
    assert whole.removeprefix(text) in ("", "\n", "\n<|endoftext|>")  # Phi-3 writes the last one behind its turns' end
    assert [turn for own, turn in runs if own] == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_one_and_of_several_turns(family: str) -> None:
    _, ends, before = parts_of(family)
    last = f"{before}bye{ends[None]}"
    check(family, [said("user", "hi"), said("assistant", "bye")], [last])
    first = "" if family == "qwen3" else before
    messages = [said("user", "hi"), said("assistant", "yo <|x|>"), said("user", "and?"), said("assistant", "bye")]
    check(family, messages, [f"{first}yo <|x|>{ends['user']}", last])


@pytest.mark.parametrize("family", [name for name, parts in FAMILIES.items() if parts[3]])
def test_calls_of_tools(family: str) -> None:
    """Every call is trained, up to the end that the template writes behind a call, and the tools are in the prompt."""
    tokenizer, ends, _ = parts_of(family)
    result = said("tool", "sunny", tool_call_id=ID, name="look")
    messages = [said("user", "w?"), calling(family, "Rome"), result, said("assistant", "ok"), said("user", "w?")]
    both = [*messages, calling(family, "Oslo")]
    columns = {} if family == "mistral" else {"tools": TOOLS}  # which writes them before the last user's message
    prompt, runs, _ = trained(tokenizer, both, **columns)
    turns = [turn for own, turn in runs if own]
    check(family, both, turns, **columns)
    assert [turn.endswith(ends["tool"]) and turn.count("look") == 1 for turn in turns] == [True, False, True]
    assert "Rome" in turns[0] and "Oslo" in turns[2] and turns[1].endswith("ok" + ends["user"])
    assert "sunny" in runs[1][1] and ("look" in prompt.text) is (family not in ("mistral", "deepseek_v3"))


def test_calls_that_a_template_does_not_write_are_refused() -> None:
    one = calling("deepseek_r1", "Rome")  # whose template writes them beside null alone, and no end behind a single one
    both = [said("user", "w?"), {**one, "tool_calls": one["tool_calls"] * 2}]
    (_, turn) = trained(parts_of("deepseek_r1")[0], both)[1][0]
    check("deepseek_r1", both, [turn])
    assert turn.count("Rome") == 2, turn
    for family, like, words, more in (
        ("phi3", "qwen2", r"column 'messages' .* does not write the calls of message 1 .*look", {}),
        ("deepseek_r1", "deepseek_v3", "does not write the calls of message 1 .*null", {}),
        ("deepseek_r1", "deepseek_r1", "message 1 does not show where its turn ends", {}),
        ("gpt_oss", "gpt_oss", "the first alone", {"tool_calls": calling("gpt_oss", "Rome")["tool_calls"] * 2}),
        ("glm4_moe", "glm4_moe", "writes the word None for a content that is null", {"content": None}),
        ("deepseek_v3", "qwen2", "an object to most templates, a JSON text to DeepSeek", {}),
        ("llama", "llama", "'hm' of message 1 is not in .*; empty it", {"content": "hm"}),
    ):
        with pytest.raises(ConfigError, match=f"row 0: .*{words}"):
            trained(parts_of(family)[0], [said("user", "w?"), {**calling(like, "Rome"), **more}])


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "gpt_oss"])
def test_thoughts(family: str, caplog) -> None:
    """Thoughts are trained where the template writes them: not those of turns that a user's message follows."""
    both = {"reasoning_content": "hm", "thinking": "hm"}
    result = said("tool", "sunny", tool_call_id=ID, name="look")
    messages = [said("user", "w?"), calling(family, "Rome", **both), result, said("assistant", "ok", **both)]
    for conversation in (messages, [*messages, said("user", "w?"), said("assistant", "ok", **both)]):
        _, runs, _ = trained(parts_of(family)[0], conversation)
        turns = [turn for own, turn in runs if own]
        check(family, conversation, turns)
        assert "hm" in turns[-1] and len(turns) == sum(x["role"] == "assistant" for x in conversation)
        warned = [record.getMessage() for record in caplog.records]
        assert all("writes a thought" in x for x in warned) and bool(warned) is not all("think>" in x for x in turns)


def extension(tokenizer, messages: list[dict], stop: int, **more) -> str:
    """Return what the endpoint writes behind a conversation's turn, its last message but one."""
    asked = chat_request({"messages": messages, **more}, 1.0)
    parent = dict(frame=asked.frame, parent=None, known=(len(messages) - 1, b""), new_ids=(), ids=(stop,))
    turn = Turn(**parent, logprobs=(0.0,), weight_versions=((0, 1),), finish_reason="stop")
    return tokenizer.decode(Rendering(tokenizer).new_ids(asked, turn))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_sampled_turn_equals_the_conversations_rendering(family: str) -> None:
    """No end is written twice, whichever of a turn's ends the policy sampled, by multi-turn and by the endpoint."""
    tokenizer, ends, _ = parts_of(family)
    answer, before = said("user", "and?"), [said("user", "hi"), said("assistant", "yo")]
    _, runs, _ = trained(tokenizer, [*before, answer, said("assistant", "bye")])
    # The end of two generation prompts, which the templates do not write before a turn without a thought.
    wanted = runs[1][1] + {"olmo3": "<think>", "deepseek_v3": "<think>\n", "deepseek_r1": "<think>\n"}.get(family, "")
    for end in {ends["user"], ends[None]}:
        stop = tokenizer.convert_tokens_to_ids(end)
        assert tokenizer.decode(Observations(tokenizer, "chat", "user").token_ids("and?", stop)) == wanted
        assert extension(tokenizer, [*before, answer], stop) == wanted
    if family == "glm4_moe":  # a call's end
        observed = Observations(tokenizer, "chat").token_ids("7", tokenizer.convert_tokens_to_ids("<|observation|>"))
        assert tokenizer.decode(observed) == "\n<tool_response>\n7\n</tool_response><|assistant|>"


def test_a_prompt_that_a_template_moves_once_others_follow_is_refused() -> None:
    """Mistral's template moves tools and system message to the user's last message, DeepSeek's every system message."""
    asked, turn, tools = [said("user", "hi")], said("assistant", "yo"), {"tools": TOOLS}
    result, system = said("tool", "7", tool_call_id=ID), said("system", "be")
    for family, prompt, more, then, refused in (
        ("mistral", asked, tools, said("user", "and?"), True),
        ("mistral", [system, *asked], {}, said("user", "and?"), True),
        ("mistral", asked, tools, result, False),
        ("mistral", asked, {}, said("user", "and?"), False),
        ("deepseek_v3", asked, {}, system, True),
        ("llama", [system, *asked], tools, result, False),
    ):
        tokenizer, ends, _ = parts_of(family)
        stop = tokenizer.convert_tokens_to_ids(ends["tool"])
        with pytest.raises(Refused, match="changes the prompt ") if refused else contextlib.nullcontext():
            extension(tokenizer, [*prompt, turn, then], stop, **more)
        rows, chat = [{"prompt": asked}, {"prompt": prompt, **more}], DataConfig(template="chat")
        if then is not result:  # an observation's message has no call's id, which Mistral's template asks for
            words = rf"row [01] \(environment.role={then['role']}\): .*changes the prompt"
            with pytest.raises(ConfigError, match=words) if refused else contextlib.nullcontext():
                PromptDataset(rows, tokenizer, chat, 0, followed_by=then["role"])


def test_the_endpoint_gives_calls_in_the_form_that_the_template_writes() -> None:
    for family in ("qwen3", "deepseek_v3", "gpt_oss", "deepseek_r1"):
        tokenizer, _, _ = parts_of(family)
        messages = [said("user", "w?"), calling(family, "Rome"), said("tool", "7", tool_call_id=ID)]
        calls = [{**messages[1]["tool_calls"][0], "function": {"name": "look", "arguments": '{"city": "Rome"}'}}]
        asked = chat_request({"messages": [messages[0], {**messages[1], "tool_calls": calls}, messages[2]]}, 1.0)
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(Rendering(tokenizer).new_ids(asked, None)) == whole and "Rome" in whole
