"""Row-invariant operations, attention and layers: a row's result has the same bits in any batch (docs/bitwise.md)."""
