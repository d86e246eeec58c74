"""Advantages, signal, importance weights and loss terms. Loss terms are sums over tokens and divide nothing.

Every normalisation is part of the reduction's weights (semantics §1).
"""
