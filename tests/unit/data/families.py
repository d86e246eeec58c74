"""Holds the published templates of the families, and makes their tokenizers and conversations."""

import json
import pathlib
from itertools import groupby

from transformers.models.llama4.processing_llama4 import chat_template as LLAMA4

import tests.published
from megatron_rl.config import DataConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from tests.unit.data.templates import tokenizer_of

FOLDER = pathlib.Path(tests.published.__file__).parent / "chat_templates"
CHATML = "<|im_end|> <|im_start|>"
GLM = "<|endoftext|> <|user|> <|assistant|> <|system|> <|observation|>"
GPT_OSS = "<|return|> <|start|> <|end|> <|message|> <|channel|> <|call|>"
DEEPSEEK = "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"
# A family's template; its special tokens, the tokenizer's end of sequence first; the end of a turn that a user's
# message, a tool's, or nothing follows (None: it takes no such message); what it writes before a turn's content.
FAMILIES = {
    "qwen2": ("qwen2_5", CHATML, "<|im_end|>", "<|im_end|>", "<|im_end|>", ""),
    "qwen3": ("qwen3", CHATML, "<|im_end|>", "<|im_end|>", "<|im_end|>", "<think>\n\n</think>\n\n"),
    "qwen3_moe": ("qwen3_instruct_2507", CHATML, "<|im_end|>", "<|im_end|>", "<|im_end|>", ""),
    "llama": ("llama3_1", "<|eot_id|> <|start_header_id|> <|end_header_id|>", *["<|eot_id|>"] * 3, ""),
    "mistral": ("mistral", "</s> <s> [INST] [/INST] [TOOL_CALLS]", "</s>", "</s>", "</s>", " "),
    "mixtral": ("mixtral", "</s> <s>", "</s>", None, "</s>", ""),
    "phi3": ("phi3", "<|endoftext|> <|end|> <|user|> <|assistant|> <|system|>", "<|end|>", None, "<|end|>", ""),
    "olmo2": ("olmo2", "<|endoftext|>", "<|endoftext|>", None, "<|endoftext|>", ""),
    "olmo3": ("olmo3", f"<|endoftext|> {CHATML}", "<|im_end|>", None, "<|endoftext|>", ""),
    "gemma3_text": ("gemma3", "<eos> <start_of_turn> <end_of_turn>", "<end_of_turn>", None, "<end_of_turn>", ""),
    "glm4_moe": ("glm4moe", GLM, "<|user|>", "<|observation|>", "<|user|>", "\n<think></think>\n"),
    "deepseek_v3": ("deepseekv3", DEEPSEEK, *["<｜end▁of▁sentence｜>"] * 3, ""),
    "deepseek_r1": ("deepseek_r1_distill", DEEPSEEK, "<｜end▁of▁sentence｜>", None, "<｜end▁of▁sentence｜>", ""),
    "gpt_oss": ("gptoss", GPT_OSS, "<|end|>", "<|call|>", "<|return|>", "<|channel|>final<|message|>"),
    "llama4_text": ("", "<|eot|> <|header_start|> <|header_end|> <|python_start|>", *["<|eot|>"] * 3, ""),
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
ID = "call12345"


def parts_of(family: str):
    """Return the tokenizer of a family, the ends of its turns, and what it writes before a turn's content."""
    file, words, *ends, before = FAMILIES[family]
    template = (FOLDER / f"{file}.jinja").read_text() if file else LLAMA4
    tokenizer = tokenizer_of(template, *words.split(), words=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    return tokenizer, dict(zip(("user", "tool", None), ends, strict=True)), before


def said(role: str, content: str | None, **more) -> dict:
    return {"role": role, "content": content, **more}


def calling(family: str, city: str, **more) -> dict:
    arguments = {"city": city}
    function = {"name": "look", "arguments": json.dumps(arguments) if "deepseek" in family else arguments}
    calls = [{"type": "function", "id": ID, "function": function}]
    return said("assistant", None if family == "deepseek_r1" else "", tool_calls=calls, **more)


def trained(tokenizer, messages: list[dict], **columns):
    """Return a conversation's prompt, its response in runs (has a loss, text), and its tokens."""
    rows, data = ([{"messages": messages, **columns}],
                  DataConfig(template="chat", messages_key="messages", max_prompt_tokens=9999))
    (found,) = PromptDataset(rows, tokenizer, data, 0).next_solutions(1)
    pairs = groupby(zip(found.loss_mask, found.response_ids, strict=True), lambda pair: pair[0])
    runs = [(own, tokenizer.decode([token for _, token in run])) for own, run in pairs]
    return found.prompt, runs, [*found.prompt.token_ids, *found.response_ids]
