"""One pod's part of a job on Kubernetes: `megatron-rl pod`."""
