"""Every exception that megatron_rl raises on purpose; each message names the thing, the value and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work: the message names the key, the value and the way out."""


class RunError(RuntimeError):
    """Ends a run: the command line prints its message, without a traceback, and exits with 1."""


class LockstepError(RunError):
    """Ranks disagree on what to run next; raised on every rank, naming who differs and in what."""


class NonFiniteGradient(RunError):
    """The global gradient norm is not finite and ``optimizer.on_nonfinite=fail``; raised on every rank."""


class RewardError(RunError):
    """A reward function failed on a sample; the message carries the sample's id and the traceback."""


class EpisodeError(RunError):
    """An environment failed, or took too long, on a sample; the message carries the sample's id, the turn and the
    traceback."""


class CheckpointError(RunError):
    """A checkpoint that is damaged, of another model or format, or that could not be written; the message names the
    file."""


class PeerError(RunError):
    """Another rank stopped; the message carries its rank and its error."""


class EngineError(RunError):
    """An inference engine answers, and wrongly: the message names the engine, the request and both numbers."""


class NoSignalError(RunError):
    """Dynamic sampling found no signal for every group of a batch, and
    ``rollout.dynamic_sampling.on_exhausted=fail``."""
