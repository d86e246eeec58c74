"""The sections ``run`` (name, folder), ``checkpoint``, ``metrics`` and ``profile``."""

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
    """Name of the run; its folder is `runs/<name>`, unless `run.dir` names another."""
    dir: str | None = None
    """Folder of the run; null: `runs/<name>`."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Seed of the data's order and of sampling, the same on every rank."""
    deterministic: bool = False
    """Whether GPU kernels add in a fixed order: slower, and a run repeats to the bit; on a CPU it always does."""
    deadline_s: Annotated[float, Range(1, 10**6)] = 1800.0
    """Longest time, in seconds, of a collective, of an engine without progress, and of a user's function in a rank."""
    slow_stage_s: Annotated[float, Range(0, 10**6)] = 60.0
    """Seconds in one stage until the log names each rank's, such as `update`; again at 2, 4, … times this. 0: never."""

    @property
    def path(self) -> pathlib.Path:
        return pathlib.Path(self.dir) if self.dir else pathlib.Path("runs") / self.name


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saves the whole state of a run under `checkpoint.dir`, and resumes from it (docs/checkpoints.md).

    A run saves before the first rollout, every `checkpoint.save_every_rollouts` rollouts, after the
    last, and when SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) arrives.
    """

    dir: str | None = None
    """Folder of the checkpoints, or a URL such as `s3://bucket/run`; null: `<run.dir>/checkpoints`."""
    answer_s: Annotated[float, Range(1, 10**6)] = 300.0
    """Seconds that an object store may take for a request, all tries included; then the checkpoint has failed."""
    save_every_rollouts: Annotated[int, Range(0)] = 0
    """Number of rollouts between checkpoints; 0: no checkpoint is written, and no signal saves one."""
    keep_last: Annotated[int, Range(1)] | None = 2
    """Number of newest checkpoints that are kept; null: all."""
    asynchronous: bool = True
    """Whether the run goes on while the files are written."""
    resume: str = "auto"
    """`auto`: resume from the newest good checkpoint; `never`: set an earlier run's checkpoints aside, start anew."""
    on_damage: str = "previous"
    """If a checkpoint is damaged: `previous`: resume from the one before it, and log that; `fail`: end the run."""
    on_error: str = "fail"
    """If a checkpoint cannot be written: `fail`: end the run; `continue`: go on without it."""

    def __post_init__(self) -> None:
        choose("checkpoint.resume", self.resume, ("auto", "never"))
        choose("checkpoint.on_damage", self.on_damage, ("previous", "fail"))
        choose("checkpoint.on_error", self.on_error, ("fail", "continue"))
        if self.dir is not None and not self.dir.strip():
            raise ConfigError(f"checkpoint.dir={quoted(self.dir)} names no folder; give a path or a URL, or null")
        self.root(pathlib.Path())

    def root(self, run_path: pathlib.Path) -> pathlib.Path | RemotePath:
        """Return the folder of the checkpoints. Raises ConfigError for a URL that cannot name a folder.

        run_path: the run's folder; it holds the checkpoints if ``dir`` is null.
        """
        if self.dir is None or "://" not in self.dir:
            return run_path / "checkpoints" if self.dir is None else pathlib.Path(self.dir)
        from megatron_rl.storage.location import location  # needed by runs with URLs alone

        return location(self.dir, "checkpoint.dir", answer_s=self.answer_s)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Chooses the records of a run, and where metrics and completions go beside metrics.jsonl (docs/monitoring.md)."""

    tensorboard: bool = False
    """Whether metrics are also written for TensorBoard, under `tensorboard/` in the run's folder."""
    wandb_project: str | None = None
    """Weights & Biases project that metrics, completions and the configuration are sent to; null: none."""
    mlflow_experiment: str | None = None
    """MLflow experiment, on the server of MLFLOW_TRACKING_URI, that gets the same as Weights & Biases; null: none."""
    otel: bool = False
    """Whether the first rank sends OpenTelemetry spans of rollouts, their stages and optimizer steps."""
    otel_endpoint: str | None = None
    """Collector that gets the spans by OTLP/HTTP, `http://host:port`; null: OpenTelemetry's environment variables."""
    prometheus_port: Annotated[int, Range(0, 65535)] | None = None
    """Port at which the first rank serves metrics to Prometheus (`GET /metrics`); 0: any free port; null: none."""
    prometheus_address: str = "127.0.0.1"
    """Address of the Prometheus server: by default this host alone; `0.0.0.0`: every interface, for a cluster."""
    prometheus_key_env: str | None = None
    """Environment variable with the bearer keys of Prometheus' clients, separated by commas; null: no key is needed."""
    log_completions: Annotated[int, Range(0, 10**6)] = 4
    """Number of completions, with prompt and reward, recorded of each rollout and evaluation set; 0: none."""
    completion_chars: Annotated[int, Range(2, 10**7)] = 2000
    """Largest number of characters of a recorded prompt, response or answer; longer texts lose their middle."""
    completions_every_rollouts: Annotated[int, Range(1)] = 1
    """Number of rollouts between recordings of completions; evaluations are always recorded."""
    print_completions_every_rollouts: Annotated[int, Range(0)] = 20
    """Every so many rollouts, and at each evaluation, the log shows two recorded completions; 0: at neither."""
    progress: bool = True
    """Whether the first rank shows a live progress bar."""
    dense_every_rollouts: Annotated[int, Range(0)] = 20
    """Every so many rollouts the log-prob pass includes some samples that `skip` drops, for metrics alone; 0: never."""
    dense_samples: Annotated[int, Range(0, 10**6)] = 4
    """Number of dropped samples that `metrics.dense_every_rollouts` adds to a rollout's log-prob pass; 0: none."""
    save_rollouts: bool = False
    """Whether one of n rollouts is saved whole for `megatron-rl watch`; n: `metrics.completions_every_rollouts`."""
    save_plans: bool = False
    """Whether each rollout's plan of steps and micro-batches is written as JSON to `plans/` in the run's folder."""
    untrained_warning_steps: Annotated[int, Range(1)] | None = 20
    """The log and the final table warn after so many steps in a row that train nothing; null: never."""

    def __post_init__(self) -> None:
        self._check_prometheus()
        if self.otel_endpoint is None:
            return
        if not self.otel:
            raise ConfigError(
                f"metrics.otel_endpoint={quoted(self.otel_endpoint)} names a collector and metrics.otel is false; set "
                "metrics.otel=true, or remove metrics.otel_endpoint"
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
                    f"metrics.{key}={quoted(value)} has no effect: metrics.prometheus_port=null starts no server; set "
                    "metrics.prometheus_port, or remove the setting"
                )


MOST_PROFILED_STEPS = 20
Step = Annotated[int, Range(1)]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Records the time and memory of a few optimizer steps under `<run.dir>/profile/` (docs/profiling.md).

    If a rollout's first step is recorded, the rollout's generation, rewards, log-prob passes and weight
    sync are recorded too.
    """

    steps: tuple[Step, Step] | None = None
    """First and last recorded optimizer step, both included, numbered as `step` in metrics.jsonl; null: none."""
    ranks: tuple[Annotated[int, Range(0, 10**6)], ...] = (0,)
    """Ranks of the policy that record; the others wait for them before and after the recorded steps."""
    tool: str = "torch"
    """`torch`: traces of torch.profiler; `nsys`: NVTX ranges and a capture range on a GPU, for Nsight Systems."""
    memory: bool = False
    """Whether memory is recorded: a snapshot on a GPU; on a CPU the main thread's peak in each named range."""
    stacks: bool = False
    """With the tool `torch`: whether Python's call stacks are recorded; files are then many times larger."""

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
                f"profile.steps=[{first}, {last}] are {last - first + 1} steps, a trace too large for viewers; give at "
                f"most {MOST_PROFILED_STEPS}, such as [{first}, {first + 1}]"
            )
