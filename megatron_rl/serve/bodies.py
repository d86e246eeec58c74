"""The schemas of Tinker's JSON bodies: each field with its type and bounds, checked before anything else.

Names and types are the same as in the SDK's requests (tinker 0.34 to 0.38, ``tinker.types``). Fields
that are not declared are ignored, since new releases add some. Unknown fields of AdamParams are
refused, since without them the training would differ from the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megatron_rl.errors import quoted, shortened
from megatron_rl.json_text import MOST_LEVELS, levels
from megatron_rl.serve.values import RequestError

MOST_NUMBER = 2**31 - 1  # the largest number of a model, a sampler or a request: an int32 in the protocol
MOST_QUESTION = 64 * 2**10  # bytes of a body that asks for a result
TOKEN_BYTES = 16  # bytes allowed for a prompt's token in JSON, blanks included
MOST_METADATA = 64 * 1024  # characters of a request's metadata as JSON
LEAST_EPS = 1e-20  # with a smaller eps, m / (sqrt(v) + eps) of a float32 gradient that was always 0 may be 0 / 0
LEAST_TEMPERATURE = 0.01  # vLLM raises smaller temperatures to this number (vllm 0.32.0, SamplingParams)
MOST_TTL_S = 10 * 366 * 24 * 3600  # ten years, the SDK's own limit
MOST_SAMPLES, MOST_TOP = 4096, 1024
MOST_CHUNKS = 4096
MOST_STOPS, MOST_STOP_TEXT = 64, 1000
# The releases of the SDK that are served. Both ends are tested (`make test-tinker`).
OLDEST_SDK, NEWEST_SDK = (0, 34), (0, 38)


def _plain(value: object) -> object:
    """Return a JSON value unchanged. Raises ValueError if it is nested too deep, too long, or holds NaN or infinity."""
    if levels(value) > MOST_LEVELS:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels")
    text = json.dumps(value, allow_nan=False)  # ValueError: NaN and infinity
    if len(text) > MOST_METADATA:
        raise ValueError(f"{len(text):,} characters of JSON, and at most {MOST_METADATA:,} are kept")
    return value


def _text_or_tokens(value: object) -> object:
    """Return a sample's stop sequences unchanged. Raises ValueError if there are too many, or one is empty or too long.

    The same error is raised if texts and tokens are mixed.
    """
    stops = value if isinstance(value, list) else [] if value is None else [value]
    if len(stops) > MOST_STOPS:
        raise ValueError(f"{len(stops)} stops, and at most {MOST_STOPS} are read")
    if any(isinstance(part, str) and len(part) > MOST_STOP_TEXT for part in stops):
        raise ValueError(f"a text is longer than {MOST_STOP_TEXT} characters")
    if not all(isinstance(part, str) and part for part in stops) and not all(type(part) is int for part in stops):
        raise ValueError("give texts that are not empty, or tokens, not both")
    return value


Name = Annotated[str, Field(min_length=1, max_length=500)]
Words = Annotated[str, Field(max_length=MOST_METADATA)]
Number = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
Seq = Annotated[int, Field(ge=1, le=MOST_NUMBER)]
Metadata = Annotated[dict[str, Any] | None, AfterValidator(_plain)]
Ttl = Annotated[float, Field(gt=0, le=MOST_TTL_S)]


class Body(BaseModel):
    """Holds the JSON object of a request's body; a subclass declares its fields."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class LoraConfig(Body):
    rank: Annotated[int, Field(ge=1, le=MOST_NUMBER)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class OptimizerConfig(Body):
    type: Words = "adamw"


class AdamParams(Body):
    model_config = ConfigDict(extra="forbid")

    type: Words = "adamw"
    learning_rate: Annotated[float, Field(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, Field(ge=0, le=1 - 1e-12)] = 0.9
    beta2: Annotated[float, Field(ge=0, le=1 - 1e-12)] = 0.95
    eps: Annotated[float, Field(ge=LEAST_EPS, le=1e3)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class ClientConfig(Body):
    sdk_version: Words


class CreateSession(Body):
    sdk_version: Words
    tags: Annotated[list[Words], Field(max_length=1000), AfterValidator(_plain)] | None = None
    user_metadata: Metadata = None
    display_name: Words | None = None


class SessionHeartbeat(Body):
    session_id: Name


class CreateModel(Body):
    session_id: Name
    model_seq_id: Number
    base_model: Name
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None


class OfModel(Body):
    """Holds a body whose field ``model_id`` names a model."""

    model_id: Name


class Numbered(OfModel):
    """Holds a body that names a model, and the request's number ``seq_id`` among that model's requests.

    If another field is faulty, the request fails, and its number still counts as used.
    """

    seq_id: Seq


class OptimStep(Numbered):
    adam_params: AdamParams | None = None
    optimizer_params: AdamParams | None = None
    optim_params: AdamParams | None = None


class SaveWeights(Numbered):
    path: Words | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool | None = None
    user_metadata: Metadata = None


class SaveWeightsForSampler(SaveWeights):
    sampling_session_seq_id: Number | None = None
    kind: Words | None = None


class LoadWeights(Body):
    path: Words
    optimizer: bool
    model_id: Name | None = None
    seq_id: Seq | None = None
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None


class CreateSamplingSession(Body):
    session_id: Name
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Words | None = None


class Chunk(Body):
    type: Words = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class Prompt(Body):
    chunks: Annotated[list[Chunk], Field(min_length=1, max_length=MOST_CHUNKS)]


class SamplingParams(Body):
    max_tokens: Annotated[int, Field(ge=1, le=MOST_NUMBER)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str | list[str | int] | None, AfterValidator(_text_or_tokens)] = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST_NUMBER)] = -1
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0


class Sample(Body):
    sampling_session_id: Name
    seq_id: Number
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    prompt_alt_tokens_k: Number | None = None
    target_prompt_logprobs: Any = None
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    request_id: Name


class WeightsInfo(Body):
    tinker_path: Words


class Anything(Body):
    """Holds a body from which no field is read."""


AnyBody = TypeVar("AnyBody", bound=Body)


def most_bytes(longest: int) -> int:
    """Return how many bytes a JSON body may have if prompts have at most ``longest`` tokens.

    The limit is needed since values in memory take up to 150 times the bytes of their JSON.
    """
    return 2**20 + TOKEN_BYTES * longest


def read(kind: type[AnyBody], content: bytes, *, most: int) -> AnyBody:
    """Return a body's values by the schema ``kind``. An empty body counts as {}.

    content: the body's bytes.
    most: how many bytes the body may have.

    Raises RequestError with the faulty field and its value.
    """
    if len(content) > most:
        raise RequestError(f"the body has {len(content):,} bytes, and at most {most:,} of JSON are read", status=413)
    try:
        return kind.model_validate_json(content or b"{}")
    except ValidationError as error:
        raise RequestError(words_of(error)) from None


def words_of(error: ValidationError) -> str:
    """Return one sentence on the first faulty field of a body."""
    fault = error.errors(include_url=False, include_context=False)[0]
    reason = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "json_invalid":
        return shortened(f"the body is not valid JSON: {reason}", 300)
    parts = [part for part in fault["loc"] if isinstance(part, int) or part.isidentifier() and part != "str"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if fault["type"] == "missing":
        return f"the body has no {field}, which is needed"
    if fault["type"] == "extra_forbidden":
        return f"{quoted('.'.join(map(str, fault['loc'])), 100)} is not known; leave it out"
    return f"{field or 'the body'}={quoted(fault['input'])} is refused: {reason}"


def stop_conditions(
    stop: str | Sequence[str] | Sequence[int] | None, own: Sequence[int], vocab_size: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return (tokens, texts), each of which ends a sample.

    stop: the request's stops. None means the model's own end-of-sequence tokens, and [] means none.
        Otherwise only the given texts or tokens end a sample.
    own: the model's end-of-sequence tokens.
    vocab_size: the size of the vocabulary; a token of ``stop`` outside it raises RequestError.

    Example: ``["\\n\\n"]`` → ``((), ("\\n\\n",))``. An end-of-sequence token does not end the sample
    then.
    """
    if stop is None:
        return tuple(own), ()
    if isinstance(stop, str):
        return (), (stop,)
    if any(isinstance(part, str) for part in stop):
        return (), tuple(stop)
    if outside := [token for token in stop if not 0 <= token < vocab_size]:
        raise RequestError(f"stop holds token {quoted(outside[0])}, and the vocabulary has {vocab_size} tokens")
    return tuple(stop), ()


def check_sdk(version: object) -> None:
    """Raise RequestError if the SDK's release is not served. The message names the release and the served range."""
    release = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if release is None or not OLDEST_SDK <= (int(release[1]), int(release[2])) <= NEWEST_SDK:
        low, high = (".".join(map(str, end)) for end in (OLDEST_SDK, NEWEST_SDK))
        raise RequestError(
            f"sdk_version={quoted(version)} is not served: this server speaks to tinker {low} to {high}; install one "
            f"of them (pip install 'tinker>={low},<{NEWEST_SDK[0]}.{NEWEST_SDK[1] + 1}')"
        )
