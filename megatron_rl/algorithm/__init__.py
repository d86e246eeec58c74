"""Advantages, signal, importance weights and the loss terms. A loss term takes sums, returns sums and divides nothing.

Every normalisation is part of the reduction's weights (semantics §1).
"""
