"""The zero-advantage skip for other trainers: for verl's own Megatron engine, and for slime and miles."""
