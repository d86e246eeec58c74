"""Environments that answer the policy between its turns: protocol, built-in environments, threads for their steps."""

from megatron_rl.environment.protocol import Environment, Step, environment_maker

__all__ = ["Environment", "Step", "environment_maker"]
