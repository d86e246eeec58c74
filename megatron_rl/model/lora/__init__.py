"""LoRA adapters: their layers, and how a model gets, fills, turns off and merges them."""
