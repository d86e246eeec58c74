"""The advantages of a rollout: a source for each kind of estimator (source.py), chosen in trainer/parts.py.

Every rank computes them from the same numbers. Where exp or log took part, every rank takes rank
0's result, so that another CPU's rounding cannot give another plan.
"""
