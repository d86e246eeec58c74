"""Records a few steps of a run for torch.profiler's viewers or Nsight Systems, and sums up what was recorded."""
