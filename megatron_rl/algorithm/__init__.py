"""The mathematics of training: advantages, importance weights, loss terms, and which samples have no gradient.

A loss term is an undivided sum over tokens. Every division, by tokens, samples or prompts, is in
the weight that multiplies a sample's tokens (docs/semantics.md §1).
"""
