"""The profile of a few steps of a run, for torch.profiler's viewers or Nsight Systems, and its summary."""
