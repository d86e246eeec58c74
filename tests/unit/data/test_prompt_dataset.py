"""Checks data/prompt_dataset.py: its words on a bad dataset; its order, a function of (seed, epoch), is resumed."""

import json
from types import SimpleNamespace

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import FilePart, Rows
from megatron_rl.errors import ConfigError
from tests.unit.data.letters import CountingTokenizer, LetterTokenizer


def make_rows(count: int) -> list[dict]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1), "solution": str(i + 1)} for i in range(count)]


def make_source(rows=None, *, tokenizer=None, seed=3, context_tokens=None, **data) -> PromptDataset:
    rows = make_rows(7) if rows is None else rows
    return PromptDataset(rows, tokenizer or LetterTokenizer(), DataConfig(**data), seed, context_tokens)


def ids(prompts) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_equal_seeds_draw_equal_prompts_however_cut():
    one, many = make_source(), make_source()
    assert ids(one.next(20)) == ids([p for count in (1, 5, 0, 14) for p in many.next(count)])
    assert ids(make_source(seed=3).next(7)) != ids(make_source(seed=4).next(7))
    assert len(ids(make_source(seed=-1).next(7))) == 7
    assert ids(make_source(shuffle=False).next(9)) == [*(f"{i}@0" for i in range(7)), "0@1", "1@1"]


def test_resumed_equals_uninterrupted():
    def draw(source: PromptDataset, prompts: int, solutions: int) -> tuple[list[str], list[str]]:
        return ids(source.next(prompts)), ids(found.prompt for found in source.next_solutions(solutions))

    whole, before, after = make_source(), make_source(), make_source()
    expected, first = draw(whole, 25, 9), draw(before, 10, 2)
    after.load_state(json.loads(json.dumps(before.state())))
    rest = draw(after, 15, 7)
    assert (first[0] + rest[0], first[1] + rest[1]) == expected


@pytest.mark.parametrize("place", [7, 14, 21])
def test_a_resume_at_an_epochs_end_skips_and_repeats_no_epoch(place: int):
    whole = [ids(make_source().next(21)[start : start + 7]) for start in (0, 7, 14)]
    for epoch, drawn in enumerate(whole):
        assert sorted(drawn) == [f"{row}@{epoch}" for row in range(7)]
    before, after = make_source(), make_source()
    first = ids(before.next(place, epochs=3))
    after.load_state(json.loads(json.dumps(before.state())))
    assert after.remain(3) == (place < 21) and after.share_drawn(3) == place / 21
    assert first + ids(after.next(100, epochs=3)) == sum(whole, [])


def test_cursor_of_another_order_is_refused():
    state = make_source().state()
    others = {"seed": make_source(seed=4), "shuffle": make_source(shuffle=False)}
    for name, source in (others | {"prompts_per_epoch": make_source(make_rows(6))}).items():
        with pytest.raises(ConfigError, match=f"taken with {name}="):
            source.load_state(state)


def test_template_replaces_prompt_and_leaves_other_braces():
    [prompt] = make_source(make_rows(1), template="{x} {prompt}!").next(1)
    assert prompt.text == "{x} 0+1=!" and prompt.token_ids == tuple(map(ord, prompt.text))
    assert prompt.columns == {"prompt": "0+1=", "answer": "1", "solution": "1"}


def test_a_chat_template_is_the_tokenizers_and_renders_messages_whole():
    [prompt] = make_source(make_rows(1), template="chat", tokenizer=LetterTokenizer("any")).next(1)
    assert prompt.text == "<user>0+1=<assistant>"
    with pytest.raises(ConfigError, match="no chat template"):
        make_source(template="chat")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "0+1="}]
    [prompt] = make_source([{"prompt": messages}], template="chat", tokenizer=LetterTokenizer("any")).next(1)
    assert prompt.text == "<system>be brief<user>0+1=<assistant>" and prompt.token_ids == tuple(map(ord, prompt.text))
    assert prompt.columns == {"prompt": messages}


def test_messages_that_are_none_name_row_and_column_and_a_renamed_answer_is_given():
    for template, value, words in (
        ("{prompt}", [{"role": "user", "content": "x"}], "is a list, .*; a list of messages needs data.template=chat"),
        ("chat", [{"role": "user", "text": "x"}], r"row 0: column 'prompt' \(data.prompt_key\): message 0 is"),
        ("chat", [], r"row 0: column 'prompt' .* is \[\]"),
        ("chat", [{"role": "assistant", "content": "x"}], "ends with an assistant message"),
        ("chat", {"role": "user", "content": "x"}, "is a dict"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_source([{"prompt": value}], template=template, tokenizer=LetterTokenizer("any"))
    # a renamed answer key is given as answer
    [prompt] = make_source([{"prompt": "x", "gold": "1", "answer": "long"}], answer_key="gold").next(1)
    assert prompt.columns == {"prompt": "x", "gold": "1", "answer": "1"}
    with pytest.raises(ConfigError, match="row 0 has no column 'gold' .data.answer_key.; its columns are 'prompt'"):
        make_source([{"prompt": "x"}], answer_key="gold")


def test_bad_rows_name_row_and_columns():
    for rows, message in (
        ([{"prompt": "x"}, {"question": "x", "answer": "1"}],
         "row 1 has no column 'prompt' .data.prompt_key.; its col"),
        ([{"prompt": 7}], "row 0: column 'prompt' .* is a int, 7; it must be text"),
        ([{"prompt": ""}], "row 0: .* 0 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_source(rows)


def test_long_prompt_fails_or_is_dropped():
    rows = [{"prompt": "ab"}, {"prompt": "abcde"}, {"prompt": "abc"}]
    with pytest.raises(ConfigError, match="row 1: the prompt has 5 tokens and at most 3 .*on_long_prompt=drop"):
        make_source(rows, max_prompt_tokens=3)
    source = make_source(rows, max_prompt_tokens=3, on_long_prompt="drop", shuffle=False)
    assert (len(source), source.num_dropped) == (2, 1) and ids(source.next(3)) == ["0@0", "2@0", "0@1"]
    with pytest.raises(ConfigError, match="all 3 rows are longer than 1 tokens"):
        make_source(rows, max_prompt_tokens=1, on_long_prompt="drop")
    # the context leaves room for a response
    assert len(make_source([{"prompt": "abc"}], context_tokens=4)) == 1
    with pytest.raises(ConfigError, match="has 3 tokens and at most 2 .*context of 3"):
        make_source([{"prompt": "abc"}], context_tokens=3)


def test_solution_is_tokenized_and_ended_or_refused():
    [found] = make_source([{"prompt": "9+1=", "solution": "10"}]).next_solutions(1)
    assert (found.prompt.token_ids, found.response_ids) == (tuple(map(ord, "9+1=")), (ord("1"), ord("0"), 0))
    assert found.loss_mask is None
    with pytest.raises(ConfigError, match="row 1 has no column 'solution' .data.solution_key."):
        make_source([{"prompt": "x", "solution": "1"}, {"prompt": "y"}]).next_solutions(1)
    with pytest.raises(ConfigError, match="no eos_token"):
        make_source(tokenizer=LetterTokenizer(eos_token_id=None)).next_solutions(1)
    with pytest.raises(ConfigError, match="row 0: prompt and solution have 6 tokens .* context 5"):
        make_source([{"prompt": "abc", "solution": "de"}], context_tokens=5).next_solutions(1)


SAID = (("assistant", "call"), ("tool", "4"), ("tool", "2"), ("assistant", "42"))
EPISODE = [{"role": role, "content": content} for role, content in SAID]


@pytest.mark.parametrize(("template", "between"), [("{prompt}", "42"), ("chat", "<tool>4<tool>2<assistant>")])
def test_an_episode_is_imitated_but_for_what_the_tool_says(template, between):
    source = make_source([{"prompt": "x", "solution": EPISODE}], template=template, tokenizer=LetterTokenizer("any"))
    [found] = source.next_solutions(1)
    assert found.response_ids == (*map(ord, "call"), 0, *map(ord, between), *map(ord, "42"), 0)
    assert found.loss_mask == (True,) * 5 + (False,) * len(between) + (True,) * 3


@pytest.mark.parametrize("cut", [EPISODE[1:], EPISODE[:-1], [{"role": "tool", "content": "4"}]])
def test_an_episode_begins_and_ends_with_the_assistant(cut):
    with pytest.raises(ConfigError, match="column 'solution' .*; it must begin and end with an assistant message"):
        make_source([{"prompt": "x", "solution": cut}]).next_solutions(1)


def two_files() -> Rows:
    parts = [
        FilePart(path=f"{name}.jsonl", rows=[{"prompt": name * (1 + i)} for i in range(size)], lines=range(1, size + 1))
        for name, size in (("a", 2), ("b", 6))
    ]
    return Rows([[part] for part in parts])


MIXTURE = {"train": ("a.jsonl", "b.jsonl"), "weights": (1, 1)}


def test_a_mixture_draws_its_shares_and_resumes_to_the_sample():
    whole, cut, rest = (make_source(two_files(), **MIXTURE) for _ in range(3))
    expected = ids(whole.next(30))
    assert [int(name.split("@")[0]) < 2 for name in expected[:8]] == [True, False] * 4
    first = ids(cut.next(11))
    rest.load_state(json.loads(json.dumps(cut.state())))
    assert first + ids(rest.next(19)) == expected and len({*expected}) == 30


def test_a_cursor_of_another_mixture_is_refused():
    state = make_source(two_files(), **MIXTURE).state()
    for other in (make_source(two_files()), make_source(two_files(), **{**MIXTURE, "weights": (1, 3)})):
        with pytest.raises(ConfigError, match="taken with sources="):
            other.load_state(state)
        with pytest.raises(ConfigError, match="taken with sources="):
            make_source(two_files(), **MIXTURE).load_state(other.state())


def test_a_row_of_a_file_and_a_source_that_would_never_be_drawn_are_named():
    with pytest.raises(ConfigError, match=r"row 7 \(b.jsonl:6\): the prompt has 6 tokens"):
        make_source(two_files(), max_prompt_tokens=5)
    with pytest.raises(ConfigError, match=r"data.train\[0\]='a.jsonl' would never be drawn: its share .* of 8 prompts"):
        make_source(two_files(), **{**MIXTURE, "weights": (1, 1000)})
    rows = Rows([[FilePart(path="a", rows=[{"prompt": "x" * 9}])], [FilePart(path="b", rows=[{"prompt": "x"}])]])
    with pytest.raises(ConfigError, match=r"data.train\[0\]='a.jsonl' would never be drawn: all its prompts are too"):
        make_source(rows, **MIXTURE, max_prompt_tokens=5, on_long_prompt="drop")


def test_a_prompt_without_end_is_refused_before_it_is_tokenized():
    rows = [{"prompt": "ab"}, {"prompt": "x" * 10_000_000}]
    tokenizer = CountingTokenizer()
    with pytest.raises(ConfigError, match="row 1: the prompt has 10000000 characters and at most 100 tokens are allow"):
        make_source(rows, tokenizer=tokenizer, max_prompt_tokens=100)
    source = make_source(rows, tokenizer=tokenizer, max_prompt_tokens=100, on_long_prompt="drop")
    assert (len(source), source.num_dropped, tokenizer.characters) == (1, 1, 2)
    # 40 characters may be one token: a text that the limit's tokens could hold is tokenized
    with pytest.raises(ConfigError, match="has 3900 tokens"):
        make_source([{"prompt": "x" * 3900}], tokenizer=CountingTokenizer(), max_prompt_tokens=100)


def test_a_solution_without_end_is_refused_before_it_is_tokenized():
    tokenizer = CountingTokenizer()
    for solution in ("x" * 10_000_000, [{"role": "assistant", "content": "x" * 10_000_000}]):
        source = make_source([{"prompt": "ab", "solution": solution}], tokenizer=tokenizer, context_tokens=100)
        with pytest.raises(ConfigError, match="row 0: prompt and solution have more than 10000000 char.* context 100"):
            source.next_solutions(1)
    assert tokenizer.characters == 4


def test_tokens_that_the_model_does_not_know_are_refused():
    def source(rows):
        return PromptDataset(rows, CountingTokenizer(), DataConfig(), seed=0, vocab_size=100)

    known = {"prompt": "abc", "solution": "abc"}
    assert len(source([known]).next_solutions(1)) == 1
    with pytest.raises(ConfigError, match="row 1: the prompt has the token 100, and .* ends at 99: .*'some/folder' is"):
        source([known, {"prompt": "ad", "solution": "a"}])
    with pytest.raises(ConfigError, match="row 0: solution has the token 122"):
        source([{"prompt": "abc", "solution": "z"}]).next_solutions(1)


def test_a_prompt_of_no_tokens_names_the_tokenizer():
    class Empty(CountingTokenizer):
        def __call__(self, text, add_special_tokens):
            return SimpleNamespace(input_ids=[[] for _ in text])

    with pytest.raises(ConfigError, match="row 0: .*0 tokens; the tokenizer of 'some/folder' knows nothing of 'hello'"):
        make_source([{"prompt": "hello"}], tokenizer=Empty())


def test_a_system_message_comes_before_the_others_but_where_a_row_has_its_own():
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "q"}, {"prompt": own[1:]}, {"prompt": own}]
    settings = {"template": "chat", "system_prompt": "be brief", "shuffle": False}
    assert [prompt.text for prompt in make_source(rows, tokenizer=LetterTokenizer("any"), **settings).next(3)] == [
        "<system>be brief<user>q<assistant>",
        "<system>be brief<user>u<assistant>",
        "<system>S<user>u<assistant>",
    ]


def test_settings_that_contradict_one_another():
    for data, message in (
        ({"system_prompt": "be brief", "template": "{prompt}"}, "data.system_prompt='be brief' is a chat message, and"),
        ({"train": ("a", "b"), "weights": (1,)}, "data.weights has 1 numbers and data.train 2 paths"),
        ({"train": "a"}, r"data.train='a' is a text; give a list of paths, \['a'\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataConfig(**data)


def test_held_out_rows_are_never_drawn_and_are_the_same_for_every_order() -> None:
    def source(**data) -> PromptDataset:
        return PromptDataset(make_rows(20), LetterTokenizer(), DataConfig(**data), 3, held_out_share=0.25)

    def rows(drawn) -> set[int]:
        return {int(each.split("@")[0]) for each in ids(drawn)}

    dataset = source()
    held_out = rows(solution.prompt for solution in dataset.held_out_solutions())
    drawn = rows(dataset.next(30)) | rows(solution.prompt for solution in dataset.next_solutions(30))
    assert len(held_out) == 5 and len(dataset) == 15 and drawn == set(range(20)) - held_out
    assert rows(solution.prompt for solution in source(shuffle=False).held_out_solutions()) == held_out
    with pytest.raises(ConfigError, match="holds out 1 of 1 rows"):
        PromptDataset(make_rows(1), LetterTokenizer(), DataConfig(), 3, held_out_share=0.1)
