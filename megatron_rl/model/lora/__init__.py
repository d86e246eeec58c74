"""LoRA adapters: their layers, and functions that add, fill, turn off and merge a model's adapters."""
