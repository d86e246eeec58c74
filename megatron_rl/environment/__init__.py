"""Environments between the policy's turns: their protocol, their making by name, and the threads of their steps."""

from megatron_rl.environment.protocol import Environment, Step, environment_maker

__all__ = ["Environment", "Step", "environment_maker"]
