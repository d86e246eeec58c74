"""Checks the responses that supervised steps train: conversations, pairs, and rows that do not fit."""

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.solution import read_at_end
from megatron_rl.errors import ConfigError
from tests.unit.data.templates import CHATML, tokenizer_of

CHAT = DataConfig(template="chat", messages_key="messages", shuffle=False)


def say(*turns: str) -> list[dict]:
    """Return messages of the roles that stand before each text, as in ``u:hello``."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def source(rows, data=CHAT, **given) -> PromptDataset:
    return PromptDataset(rows, tokenizer_of(CHATML), data, 0, **given)


def text_of(ids) -> str:
    return tokenizer_of(CHATML).decode(ids)


def test_the_templates_marks_give_the_turns_that_rendering_finds() -> None:
    said = "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>"
    plain = CHATML.replace("{{ m.content }}<|im_end|>", said)
    marked = f"{{% generation %}}{said}{{% endgeneration %}}"
    own = f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{said}{{% endif %}}{{{{ '' }}}}"
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    row = {"messages": [*say("s:be kind", "u:hi"), call, *say("t:7", "a:seven", "u:and?", "a:bye", "u:thanks")]}
    found = []
    behind = "{% generation %}<|endoftext|>{% endgeneration %}"  # as TRL's for Phi-3, which is no turn of its own
    for template in (plain, plain.replace(said, own), plain.replace(said, own) + behind):
        found += PromptDataset([row], tokenizer_of(template), CHAT, 0).next_solutions(1)
    one, other, third = ((x.prompt.token_ids, x.response_ids, x.loss_mask) for x in found)
    assert one == other == third
    assert text_of([i for i, own in zip(*one[1:], strict=True) if own]).count("<|im_end|>") == 3
    with pytest.raises(ConfigError, match="row 0: .*tool_calls, which a chat template writes; set data.template=chat"):
        source([{"prompt": "x", "solution": [call]}], DataConfig()).next_solutions(1)
    with pytest.raises(ConfigError, match="row 0: .*writes no special token behind message 1"):
        turns = "{% for m in messages %}{{ m.content or m.tool_calls }};{% endfor %}"
        PromptDataset([row | {"messages": row["messages"][1:]}], tokenizer_of(turns), CHAT, 0).next_solutions(1)


def test_messages_behind_the_assistants_last_are_left_out_and_no_turn_to_train_is_named() -> None:
    (found,) = source([{"messages": say("u:hi", "a:hello", "u:thanks")}]).next_solutions(1)
    assert text_of(found.response_ids) == "hello<|im_end|>"
    for messages, said in (
        (say("u:hi"), "has messages of the roles user; a conversation begins"),
        (say("a:hi", "u:yes"), "has messages of the roles assistant, user; a conversation begins"),
        (say("u:hi", "a:one", "a:two"), "two assistant messages in a row"),
        ([{"role": "user"}], "message 0 is"),
    ):
        with pytest.raises(ConfigError, match=said):
            source([{"messages": messages}], responses=(("solution", "data.solution_key"),))


def test_pairs_take_texts_and_messages_that_may_repeat_the_prompt() -> None:
    rows = [{"prompt": "hi", "chosen": "good", "rejected": "bad"},
            {"prompt": "hi", "chosen": say("u:hi", "a:good"), "rejected": say("u:hi", "a:bad")},
            {"prompt": say("u:hi"), "chosen": say("a:good"), "rejected": say("u:hi", "a:bad")}]
    pairs = source(rows, DataConfig(template="chat", shuffle=False)).next_pairs(3, "chosen", "rejected")
    assert {text_of(chosen.response_ids) for chosen, _ in pairs} == {"good<|im_end|>"}
    assert {text_of(rejected.response_ids) for _, rejected in pairs} == {"bad<|im_end|>"}
    assert len({chosen.prompt.token_ids for chosen, _ in pairs}) == 1


def test_a_response_beyond_the_context_is_named_at_the_start_or_dropped() -> None:
    rows = [{"prompt": "p", "chosen": "short", "rejected": "x" * n} for n in (1, 60, 2)]
    keys = (("chosen", "preference.chosen_key"), ("rejected", "preference.rejected_key"))
    data = DataConfig(shuffle=False)
    with pytest.raises(ConfigError, match="row 1: prompt and rejected have 62 tokens .*on_long_prompt=drop"):
        source(rows, data, context_tokens=40, responses=keys)
    kept = source(rows, DataConfig(shuffle=False, on_long_prompt="drop"), context_tokens=40, responses=keys)
    assert len(kept) == 2 and kept.num_dropped == 1
    assert [len(rejected.response_ids) for _, rejected in kept.next_pairs(2, "chosen", "rejected")] == [2, 3]


def test_a_score_is_read_from_the_responses_last_token() -> None:
    pairs = source([{"prompt": "p", "chosen": "ab", "rejected": "c"}], DataConfig())
    ((chosen, _),) = pairs.next_pairs(1, "chosen", "rejected")
    found = read_at_end(chosen)
    assert found.response_ids[:-1] == chosen.response_ids and found.loss_mask == (False, False, False, True)
