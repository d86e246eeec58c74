"""Log-probs and entropies from hidden states; vocabulary-parallel logits exist for one chunk of tokens at a time."""
