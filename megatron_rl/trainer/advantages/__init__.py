"""The computation of a rollout's advantages: one callable for each kind of estimator, chosen in trainer/parts.py.

Every rank computes the advantages from the same numbers. But exp and log may round differently on
another CPU. After an estimator that uses them, every rank takes rank 0's advantages. So all ranks
make the same plan of optimizer steps.
"""
