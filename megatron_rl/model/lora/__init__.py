"""LoRA adapters: their layers, and functions that add, load, turn off and merge a model's adapters."""
