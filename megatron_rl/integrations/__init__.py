"""The zero-advantage skip inside other trainers: verl's own Megatron engine, slime and miles."""
