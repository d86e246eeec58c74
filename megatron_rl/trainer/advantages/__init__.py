"""The advantages of a rollout: one source for each kind of estimator (source.py), chosen in trainer/parts.py.

Every rank computes the advantages from the same numbers. exp and log may round differently on
another CPU. After them every rank takes rank 0's result, so that all ranks make the same plan.
"""
