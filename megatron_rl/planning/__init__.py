"""The planning of optimizer steps: which samples each rank runs, in which micro-batches, and at what predicted cost.

Pure numpy, without process groups or devices.
"""
