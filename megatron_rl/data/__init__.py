"""Prompts: data sets, chat templates and the tokenizer."""
