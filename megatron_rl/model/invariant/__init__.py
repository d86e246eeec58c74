"""Operations, attention and layers whose rows have the same bits in any batch (docs/bitwise.md)."""
