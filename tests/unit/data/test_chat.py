"""An observation holds what a chat template writes behind a turn, less what the policy sampled itself."""

import pytest

from megatron_rl.data.chat import Observations, check_messages
from megatron_rl.errors import ConfigError
from tests.unit.data.templates import CHATML, STRICT, tokenizer_of

# As Llama 3's: no newline behind the end of a turn.
HEADERS = ("{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
           "{% if add_generation_prompt %}[assistant]\n\n{% endif %}")

SILENT = "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"


def text_between(template: str, observation, *, stop: str = "<|im_end|>", role: str = "tool") -> str:
    tokenizer = tokenizer_of(template)
    found = Observations(tokenizer, "chat", role).token_ids(observation, tokenizer.convert_tokens_to_ids(stop))
    return tokenizer.decode(list(found))


def test_what_is_appended() -> None:
    assert text_between(CHATML, "408") == "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
    # a last turn's own end, in a template that writes none between turns
    ends_once = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
    )
    assert text_between(ends_once, "408") == "[tool]408<|im_end|>"
    assert text_between(HEADERS, "408") == "[tool]\n\n408<|im_end|>[assistant]\n\n"
    # a turn that ended by another token keeps the template's end
    assert text_between(HEADERS, "408", stop="<|endoftext|>") == "<|im_end|>[tool]\n\n408<|im_end|>[assistant]\n\n"
    several = [{"role": "tool", "content": "1"}, {"role": "user", "content": "go on"}]
    assert text_between(HEADERS, several) == "[tool]\n\n1<|im_end|>[user]\n\ngo on<|im_end|>[assistant]\n\n"


def test_a_plain_template_takes_the_text_as_it_is() -> None:
    tokenizer = tokenizer_of(None)
    plain = Observations(tokenizer, "{prompt}", "tool")
    assert tokenizer.decode(list(plain.token_ids("=408\n", tokenizer.eos_token_id))) == "=408\n"
    assert plain.token_ids("", tokenizer.eos_token_id) == ()
    with pytest.raises(ConfigError, match="needs data.template=chat"):
        plain.token_ids([{"role": "tool", "content": "1"}], 0)


def test_templates_that_cannot_say_it_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.role=tool.*roles user, .*no tools here.*that it takes"):
        text_between(STRICT, "408")
    with pytest.raises(ConfigError, match="changes an assistant's content"):
        text_between(SILENT, "408")


def test_what_is_no_list_of_messages() -> None:
    for value, words in (
        (7, "here is 7; it must be a text, or a list of messages"),
        ([], "here is"),
        (["hello"], "message 0 is 'hello'"),
        ([{"role": "user"}], "message 0"),
        ([{"role": "user", "content": None}], "both texts"),
        ([{"role": "user", "content": [{"type": "image"}]}], "parts of the types image; models here read texts alone"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "message 0 has tool_calls=.*list of objects"),
        ([{"role": "robot", "content": "x"}], "role 'robot'; choose one of system"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_messages(value, "here")
