"""Bring the zero-advantage skip to other trainers: to verl's own Megatron engine, and to slime and miles."""
