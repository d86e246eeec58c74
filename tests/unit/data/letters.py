"""Tokenizers of one token per character, for tests of prompts."""

from types import SimpleNamespace


class LetterTokenizer:
    """One token per character; asserts that no special tokens are asked for."""

    def __init__(self, chat_template: str | None = None, eos_token_id: int | None = 0) -> None:
        self.chat_template = chat_template
        self.eos_token_id = eos_token_id
        self.all_special_tokens, self.added_tokens_decoder, self.get_added_vocab = ["\0"], {}, dict

    def __call__(self, text, add_special_tokens):
        assert add_special_tokens is False
        if isinstance(text, str):
            return SimpleNamespace(input_ids=[ord(c) for c in text])
        return SimpleNamespace(input_ids=[[ord(c) for c in one] for one in text])

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert not tokenize
        said = "".join(f"<{m['role']}>{m['content']}" + "\0" * (m["role"] == "assistant") for m in messages)
        return said + "<assistant>" * add_generation_prompt


class CountingTokenizer(LetterTokenizer):
    name_or_path = "some/folder"
    vocabulary = ("a", "b" * 40)

    def __init__(self) -> None:
        super().__init__()
        self.characters = 0

    def __call__(self, text, add_special_tokens):
        self.characters += sum(map(len, text))
        return super().__call__(text, add_special_tokens)

    def get_vocab(self):
        return dict.fromkeys(self.vocabulary, 0)
