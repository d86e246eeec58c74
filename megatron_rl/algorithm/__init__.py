"""Loss terms: sums in, sums out. Nothing here divides; every normalisation came in with the weights (semantics §1)."""
