"""What runs on Megatron-Bridge, in an environment of its own: `make test-bridge`."""
