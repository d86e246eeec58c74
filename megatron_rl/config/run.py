"""The sections of a run as a whole: its folder, its checkpoints, its metrics and its profile."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Names the run and its folder, which holds metrics.jsonl, config.yaml, report.html and checkpoints/."""

    name: str = "run"
    """Name of the run; its folder is `runs/<name>`, unless `run.dir` names one."""
    dir: str | None = None
    """Folder of the run; null: `runs/<name>`."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Seed of the data's order and of sampling; it is never combined with a rank."""
    deterministic: bool = False
    """Whether a GPU's kernels add in one order, so that a run repeats to the bit, slower; a CPU's do so anyway."""
    deadline_s: Annotated[float, Range(1, 10**6)] = 1800.0
    """Seconds of a collective, of a wait for an engine without progress, and of a user's function in a rank."""
    slow_stage_s: Annotated[float, Range(0, 10**6)] = 60.0
    """Seconds in one stage after which the log names each rank's stage, and again at twice the time; 0: never."""

    @property
    def path(self) -> pathlib.Path:
        return pathlib.Path(self.dir) if self.dir else pathlib.Path("runs") / self.name


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saves all of a run under `checkpoint.dir`, and goes on from there (docs/checkpoints.md).

    A run saves every `checkpoint.save_every_rollouts` rollouts, before the first and after the last
    one, and when SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) arrives.
    """

    dir: str | None = None
    """Folder of the checkpoints, or a URL, as `s3://bucket/run`; null: `<run.dir>/checkpoints`."""
    answer_s: Annotated[float, Range(1, 10**6)] = 300.0
    """Seconds that an object store may take for one request, tries included, before the checkpoint counts as failed."""
    save_every_rollouts: Annotated[int, Range(0)] = 0
    """Rollouts between checkpoints; 0: no checkpoint is written, and no signal saves one."""
    keep_last: Annotated[int, Range(1)] | None = 2
    """Number of newest checkpoints that are kept; null: all."""
    asynchronous: bool = True
    """Whether files are written while the run goes on."""
    resume: str = "auto"
    """`auto`: the run goes on from the newest good checkpoint; `never`: those of an earlier run are set aside."""
    on_damage: str = "previous"
    """For a damaged checkpoint: `previous` takes the one before it and says so in the log; `fail` ends the run."""
    on_error: str = "fail"
    """For a checkpoint that cannot be written: `fail` ends the run; `continue` goes on without it."""

    def __post_init__(self) -> None:
        choose("checkpoint.resume", self.resume, ("auto", "never"))
        choose("checkpoint.on_damage", self.on_damage, ("previous", "fail"))
        choose("checkpoint.on_error", self.on_error, ("fail", "continue"))
        if self.dir is not None and not self.dir.strip():
            raise ConfigError(f"checkpoint.dir={quoted(self.dir)} names no folder; give a path or a URL, or null")
        self.root(pathlib.Path())

    def root(self, run_path: pathlib.Path) -> pathlib.Path | RemotePath:
        """Return the folder of the checkpoints. Raises ConfigError for a URL that cannot be one.

        run_path: the run's folder.
        """
        if self.dir is None or "://" not in self.dir:
            return run_path / "checkpoints" if self.dir is None else pathlib.Path(self.dir)
        from megatron_rl.storage.location import location  # which only a run with URLs needs

        return location(self.dir, "checkpoint.dir", answer_s=self.answer_s)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Chooses the places that metrics and sampled completions go to beside metrics.jsonl (docs/monitoring.md)."""

    tensorboard: bool = False
    """Whether metrics are also written for TensorBoard, under `tensorboard/` in the run's folder."""
    wandb_project: str | None = None
    """Weights & Biases project that metrics, completions and the configuration are sent to; null: none."""
    mlflow_experiment: str | None = None
    """MLflow experiment that they are sent to, on the server of MLFLOW_TRACKING_URI; null: none."""
    otel: bool = False
    """Whether OpenTelemetry spans of rollouts, their stages and optimizer steps are sent, from the first rank."""
    otel_endpoint: str | None = None
    """Collector that takes them by OTLP/HTTP, `http://host:port`; null: OpenTelemetry's own variables name it."""
    prometheus_port: Annotated[int, Range(0, 65535)] | None = None
    """Port at which the first rank serves metrics to Prometheus (`GET /metrics`); 0: any free one; null: none."""
    prometheus_address: str = "127.0.0.1"
    """Address that it listens at: this host alone by default; `0.0.0.0`: every interface, for a cluster."""
    prometheus_key_env: str | None = None
    """Environment variable that holds the bearer keys of its clients, between commas; null: no key is asked for."""
    log_completions: Annotated[int, Range(0, 10**6)] = 4
    """Completions, with prompt and reward, recorded of a rollout and of an evaluation set; 0: none, anywhere."""
    completion_chars: Annotated[int, Range(2, 10**7)] = 2000
    """Characters of a recorded prompt, response or answer; the middle of a longer one is left out."""
    completions_every_rollouts: Annotated[int, Range(1)] = 1
    """Rollouts between those whose completions are recorded; every evaluation's are."""
    print_completions_every_rollouts: Annotated[int, Range(0)] = 20
    """Rollouts between those of which two recorded completions are logged, as of every evaluation; 0: none."""
    progress: bool = True
    """Whether the first rank shows a live progress bar."""
    dense_every_rollouts: Annotated[int, Range(0)] = 20
    """Every so many rollouts some dropped samples get log-prob passes, for the metrics alone; 0: never."""
    dense_samples: Annotated[int, Range(0, 10**6)] = 4
    """Dropped samples that such a rollout passes; 0: none."""
    save_rollouts: bool = False
    """Whether the rollouts of completions_every_rollouts are saved whole under `rollouts/`, for `megatron-rl watch`."""
    save_plans: bool = False
    """Whether each rollout's plan is written as JSON under `plans/` in the run's folder."""
    untrained_warning_steps: Annotated[int, Range(1)] | None = 20
    """Optimizer steps in a row that train nothing, of which the log and the final table warn; null: never."""

    def __post_init__(self) -> None:
        self._check_prometheus()
        if self.otel_endpoint is None:
            return
        if not self.otel:
            raise ConfigError(
                f"metrics.otel_endpoint={quoted(self.otel_endpoint)} names a collector and metrics.otel is false; set "
                "metrics.otel=true, or drop it"
            )
        try:
            parts = urlsplit(self.otel_endpoint)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets without an end, a port that is no number
            is_url = False
        if not is_url or parts.query or parts.fragment:
            raise ConfigError(
                f"metrics.otel_endpoint={quoted(self.otel_endpoint)} is no address; a collector is http://host:port, "
                "to which /v1/traces is added"
            )

    def _check_prometheus(self) -> None:
        if not self.prometheus_address or self.prometheus_address != self.prometheus_address.strip():
            raise ConfigError(
                f"metrics.prometheus_address={quoted(self.prometheus_address)} is no address; name 127.0.0.1 for this "
                "host alone, 0.0.0.0 for every interface, or one of this host's own"
            )
        if self.prometheus_port is not None:
            return
        for key, value, default in (
            ("prometheus_address", self.prometheus_address, "127.0.0.1"),
            ("prometheus_key_env", self.prometheus_key_env, None),
        ):
            if value != default:
                raise ConfigError(
                    f"metrics.{key}={quoted(value)} is of a server that metrics.prometheus_port=null does not start; "
                    "name its port, or drop the setting"
                )


MOST_PROFILED_STEPS = 20
Step = Annotated[int, Range(1)]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Records the time and memory of a few optimizer steps under `<run.dir>/profile/` (docs/profiling.md).

    A recorded step brings along all that its rollout did before its first step: generation,
    rewards, log-probs and weight sync.
    """

    steps: tuple[Step, Step] | None = None
    """First and last optimizer step recorded, both included, numbered as `step` in metrics.jsonl; null: none."""
    ranks: tuple[Annotated[int, Range(0, 10**6)], ...] = (0,)
    """Ranks of the policy that record and write; the others wait for them before and after."""
    tool: str = "torch"
    """`torch`: traces by torch.profiler; `nsys`: NVTX ranges and a capture range on a GPU, for Nsight Systems."""
    memory: bool = False
    """Whether allocations are recorded: a snapshot on a GPU, else the peak of each range, of the main thread alone."""
    stacks: bool = False
    """Whether `torch` records Python's calls; the files grow many times larger."""

    def __post_init__(self) -> None:
        choose("profile.tool", self.tool, ("torch", "nsys"))
        if not self.ranks:
            raise ConfigError("profile.ranks=[] names no rank that records; give [0], or profile.steps=null")
        if self.steps is None:
            return
        first, last = self.steps
        if first > last:
            raise ConfigError(f"profile.steps=[{first}, {last}] ends before it begins; give [{last}, {first}]")
        if last - first >= MOST_PROFILED_STEPS:
            raise ConfigError(
                f"profile.steps=[{first}, {last}] are {last - first + 1} steps, whose trace no viewer opens; give at "
                f"most {MOST_PROFILED_STEPS}, such as [{first}, {first + 1}]"
            )
