"""The prompts and responses of a run: data sets, chat templates and the tokenizer."""
