"""Prompts and responses: data sets, chat templates and the tokenizer."""
