"""Log-probs and entropies from hidden states, in chunks of the vocabulary-parallel logits."""
