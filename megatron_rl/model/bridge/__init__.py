"""Models that NVIDIA's Megatron-Bridge describes and builds (docs/models.md)."""
