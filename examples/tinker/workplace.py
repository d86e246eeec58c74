"""Makes a folder in which the cookbook's recipes find all they ask a hub for: a model, its tokenizer, data sets.

Without a network ``datasets`` and ``transformers`` resolve a name to a folder in the working directory, so the recipes
run as they are. The model is tiny and random; the data sets are a few made rows in the columns of the real ones.
"""

from __future__ import annotations

import json
import pathlib

import torch

BASE, CHAT = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_workplace(folder: pathlib.Path, *, layers: int = 2, hidden: int = 64, boxed: bool = False) -> pathlib.Path:
    """Write model, tokenizers and data sets into ``folder``; return it.

    boxed: whether the chats are those of the recipe math_rl, with its own example before and a boxed answer.
    """
    make_model(folder / CHAT, layers=layers, hidden=hidden)
    tokenizer_of(folder / BASE)
    make_data(folder, boxed=boxed)
    return folder


def tokenizer_of(folder: pathlib.Path):
    """Write a tokenizer of single bytes and Qwen's special tokens, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.chat_template = TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return fast


def make_model(folder: pathlib.Path, *, layers: int, hidden: int) -> None:
    """Write a random Qwen3 over the tokenizer's bytes."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    tokenizer = tokenizer_of(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            intermediate_size=hidden * 3 // 2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _rows(path: pathlib.Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_data(folder: pathlib.Path, *, boxed: bool) -> None:
    """Write the data sets that the recipes load, by the names that they load them by."""
    sums = [(i % 7, i % 5) for i in range(64)] if not boxed else [(i % 3, i // 3 % 3) for i in range(9 * 400)]
    gsm8k = [{"question": f"What is {a}+{b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in sums]
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    _rows(folder / "openai/gsm8k/train.jsonl", gsm8k)
    _rows(folder / "openai/gsm8k/test.jsonl", gsm8k[:8])
    (folder / "openai/gsm8k/README.md").write_text(f"{card}  - split: test\n    path: test.jsonl\n---\n")
    chats = [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"{a + b}"}]}
        for a, b in sums
    ]
    if boxed:
        chats = [{"messages": _boxed_chat(a, b)} for a, b in sums]
    _rows(folder / "HuggingFaceH4/no_robots/train.jsonl", chats)
    _rows(folder / "HuggingFaceH4/no_robots/test.jsonl", chats[:8])
    talk = "\n\nHuman: {}+{}?\n\nAssistant: {}"
    pairs = [{"chosen": talk.format(a, b, a + b), "rejected": talk.format(a, b, "no")} for a, b in sums]
    _rows(folder / "Anthropic/hh-rlhf/train.jsonl", pairs)
    _rows(folder / "Anthropic/hh-rlhf/test.jsonl", pairs[:8])
    _rows(
        folder / "zwhe99/DeepMath-103K/train.jsonl",
        [{"question": f"{a}+{b}?", "final_answer": str(a + b)} for a, b in sums],
    )


def _boxed_chat(a: int, b: int) -> list[dict[str, str]]:
    """Return the chat that math_rl begins, with its answer."""
    from tinker_cookbook.recipes.math_rl.math_env import MathEnv

    question = f"What is {a}+{b}?{MathEnv.question_suffix()}"
    answer = {"role": "assistant", "content": f"\\boxed{{{a + b}}}"}
    return [*MathEnv.standard_fewshot_prefix(), {"role": "user", "content": question}, answer]
