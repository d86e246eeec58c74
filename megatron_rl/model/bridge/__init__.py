"""Models that NVIDIA's Megatron-Bridge describes and builds (docs/bridge.md)."""
