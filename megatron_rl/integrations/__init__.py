"""What other trainers load of this package: the skip inside verl's Megatron engine, and inside slime and miles."""
