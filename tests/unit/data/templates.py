"""Holds the chat templates of the tests, and makes their tokenizers."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
STRICT = ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
          "{{ m.content }}{% endfor %}")


def tokenizer_of(template: str | None, *special: str, words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token per byte, one for each of the words, and special ones, of which the first is eos.

    Without any they are ChatML's two, either of which may end a turn.
    """
    special = special or ("<|im_end|>", "<|im_start|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index + 3 for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(word, special=True) for word in ("<|endoftext|>", *sorted(special, reverse=True))]
    )
    core.add_tokens([AddedToken(word) for word in words])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], pad_token="<|endoftext|>")
    made.chat_template = template
    return made
