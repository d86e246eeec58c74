"""The command `megatron-rl pod`, which runs one pod's ranks of a job on Kubernetes."""
