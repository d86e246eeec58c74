"""The profile of a few steps of a run, for torch.profiler's viewers or Nsight Systems, and a summary of its times."""
