"""The choice of a rollout's groups: which are trained now, replayed, sampled again, or trained one rollout later.

A group is all samples of one prompt.
"""
