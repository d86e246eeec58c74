"""The turns of conversations under the published templates against the marks of TRL's training templates."""

import pathlib

import pytest

from tests.unit.data.families import FAMILIES, ID, calling, parts_of, said, trained

trl = pytest.importorskip("trl", reason="TRL is not installed; `make test-oracles` installs it")
FOLDER = pathlib.Path(trl.__file__).parent / "chat_templates"
THOUGHT = "<think>\n\n</think>\n\n"
MARKED = [family for family, (file, *_) in FAMILIES.items() if file and (FOLDER / f"{file}_training.jinja").exists()]


@pytest.mark.parametrize("family", MARKED)
def test_turns_equal_trls_masks(family: str) -> None:
    """But for the generation prompt, empty thoughts in earlier turns, and what TRL marks behind a turn's end."""
    texts = [said("user", "hi"), said("assistant", "yo"), said("user", "and?"), said("assistant", "bye")]
    result = said("tool", "sunny", tool_call_id=ID, name="look")
    calls = [said("user", "w?"), calling(family, "Rome"), result, said("assistant", "ok")]
    takes_calls = FAMILIES[family][3] and family != "deepseek_v3"  # whose arguments TRL's template writes otherwise
    for messages in (texts, calls) if takes_calls else (texts,):
        tokenizer, _, _ = parts_of(family)
        ours = [turn for own, turn in trained(tokenizer, messages)[1] if own]
        tokenizer.chat_template = (FOLDER / f"{FAMILIES[family][0]}_training.jinja").read_text()
        marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        text, theirs = "", []
        for token, own in zip(marked["input_ids"], [*marked["assistant_masks"]], strict=True):
            text += tokenizer.decode([token]) if own else "\0"
        theirs = [part.strip("\n") for part in text.split("\0") if part]
        around = [part.partition(turn.strip("\n")) for turn, part in zip(ours, theirs, strict=True)]
        assert {before for before, _, _ in around} <= {"", "<｜Assistant｜>", "<|start|>assistant", THOUGHT}
        assert {behind for _, _, behind in around} <= {"", "\n<|endoftext|>"} and all(turn for _, turn, _ in around)
