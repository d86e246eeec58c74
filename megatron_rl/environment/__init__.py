"""What stands between the policy's turns: the protocol, how one is named and made, and the threads that its steps run
in."""

from megatron_rl.environment.protocol import Environment, Step, environment_maker

__all__ = ["Environment", "Step", "environment_maker"]
