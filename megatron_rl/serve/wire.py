"""Protobuf bodies of Tinker's API ↔ the server's own values. Nothing is trusted: each fault is a RequestError."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from megatron_rl.rollout.sampling import SampleResult, TopLogProbs
from megatron_rl.serve import messages
from megatron_rl.serve.values import Datum, RequestError, TrainingAnswer, TrainingCall

PROTOBUF = "application/x-protobuf"
DTYPES = {messages.FLOAT32: np.dtype(np.float32), messages.INT64: np.dtype(np.int64)}
MOST_CELLS = 2**28  # of a tensor that a sparse one stands for


def parse_training(body: bytes) -> TrainingCall:
    """Return the request of a protobuf body. Raises RequestError, naming the datum and the field."""
    try:
        message = messages.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(
            f"the body of {len(body)} bytes is no ForwardBackwardRequest ({error}); a client before tinker 0.25 sends "
            "JSON, which is not read"
        ) from None
    if not message.data:
        raise RequestError("data is empty: a forward_backward needs at least one datum")
    settings = {name: float(value) for name, value in message.loss_fn_config.items()}
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("kind") == "text" else value.number
    return TrainingCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        settings=settings,
        forward_only=message.forward_only,
        data=[_datum(datum, f"data[{i}]") for i, datum in enumerate(message.data)],
    )


def _datum(message, where: str) -> Datum:
    tokens = _tokens(message.model_input, where)
    arrays = {name: _array(tensor, f"{where}.{name}") for name, tensor in message.loss_fn_inputs.items()}
    if "target_tokens" not in arrays:
        raise RequestError(f"{where} has no target_tokens, and every loss reads them")
    targets = arrays.pop("target_tokens")
    if targets.dtype != np.int64:
        raise RequestError(f"{where}.target_tokens must be int64 and is {targets.dtype}")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise RequestError(
            f"{where}.target_tokens has shape {list(targets.shape)} and the model input has {len(tokens)} tokens; give "
            "one target, or K of them, after each token"
        )
    for name, values in arrays.items():
        if values.shape != targets.shape:
            raise RequestError(
                f"{where}.{name} has shape {list(values.shape)} and target_tokens has {list(targets.shape)}; give one "
                "number for each target"
            )
        if not np.isfinite(values).all():
            raise RequestError(f"{where}.{name} holds NaN or infinity, of which no loss can be made")
    wide = (len(tokens), -1)
    return Datum(
        tokens=tokens,
        targets=targets.reshape(wide),
        inputs={name: values.astype(np.float32).reshape(wide) for name, values in arrays.items()},
        flat=targets.ndim == 1,
    )


def _tokens(chunks, where: str) -> np.ndarray:
    parts = []
    for number, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("kind")
        if kind != "encoded_text":
            raise RequestError(f"{where}.model_input[{number}] is {kind or 'empty'}; only text is served here")
        parts.append(_from_bytes(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}.model_input[{number}]"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
    if not len(tokens):
        raise RequestError(f"{where}.model_input has no token")
    return tokens


def _from_bytes(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{where} has {len(data)} bytes, which are no whole {dtype} numbers")
    return np.frombuffer(data, dtype=dtype)


def _array(message, where: str) -> np.ndarray:
    """Return a tensor as a dense array; what a sparse one does not list is 0."""
    if message.dtype not in DTYPES:
        raise RequestError(f"{where} has dtype {message.dtype}; float32 ({messages.FLOAT32}) and int64 are read")
    dtype, shape = DTYPES[message.dtype], tuple(message.shape)
    if any(size < 0 for size in shape):
        raise RequestError(f"{where} has shape {list(shape)}")
    if message.WhichOneof("kind") == "sparse_csr":
        return _dense(message.sparse_csr, dtype, shape, where)
    values = _from_bytes(message.dense, dtype, where)
    if not shape:
        return values
    if values.size != int(np.prod(shape)):
        raise RequestError(f"{where} has {values.size} numbers and its shape {list(shape)} asks for {np.prod(shape)}")
    return values.reshape(shape)


def _dense(csr, dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    values = _from_bytes(csr.values, dtype, f"{where} (values)")
    crow = _from_bytes(csr.crow_indices, np.dtype(np.int64), f"{where} (crow_indices)")
    columns = _from_bytes(csr.col_indices, np.dtype(np.int64), f"{where} (col_indices)")
    fits = (
        len(shape) == 2
        and 0 < shape[0] * shape[1] <= MOST_CELLS
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and (np.diff(crow) >= 0).all()
        and crow[-1] == len(columns) == len(values)
        and ((columns >= 0) & (columns < shape[1])).all()
    )
    if not fits:
        raise RequestError(
            f"{where} is no CSR tensor of shape {list(shape)}: {len(crow)} crow_indices, {len(columns)} col_indices "
            f"and {len(values)} values"
        )
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), columns] = values
    return dense


def training_answer(answer: TrainingAnswer) -> bytes:
    """Return the protobuf body of an answer; a record holds neighbouring data whose log-probs have the same width."""
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(answer.metrics))
    for trailing, group in itertools.groupby(answer.logprobs, key=lambda values: values.shape[1:]):
        arrays = [np.ascontiguousarray(values, dtype=np.float32) for values in group]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        offsets = np.cumsum([0, *(values.nbytes for values in arrays)], dtype=np.int64)
        field = record.fields["logprobs"]
        field.data, field.offsets = b"".join(values.tobytes() for values in arrays), offsets.tobytes()
        field.dtype = messages.FLOAT32
        field.trailing_shape.extend(trailing)
    return message.SerializeToString()


def sample_answer(result: SampleResult) -> bytes:
    """Return the protobuf body of a sampling request's answer."""
    message = messages.SampleResponse()
    for sequence in result.sequences:
        part = message.sequences.add(
            stop_reason=messages.STOP if sequence.finish_reason == "stop" else messages.LENGTH,
            tokens=sequence.token_ids.astype(np.int32).tobytes(),
            logprobs=sequence.logprobs.astype(np.float32).tobytes(),
        )
        if sequence.top is not None:
            _put_top(part.topk_sampled_logprobs, sequence.top)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.prompt_top is not None:
        _put_top(message.topk_prompt_logprobs, result.prompt_top)
    return message.SerializeToString()


def _put_top(message, top: TopLogProbs) -> None:
    message.token_ids = top.token_ids.astype(np.int32).tobytes()
    message.logprobs = top.logprobs.astype(np.float32).tobytes()
    message.length, message.k = top.token_ids.shape


def prompt_tokens(prompt: Mapping[str, object]) -> tuple[int, ...]:
    """Return the tokens of a ``ModelInput`` in JSON. Raises RequestError for anything but text."""
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, Sequence) or not chunks:
        raise RequestError("prompt.chunks must be a list of chunks, at least one")
    tokens: list[int] = []
    for number, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else None
        if kind != "encoded_text":
            raise RequestError(f"prompt.chunks[{number}] is of type {kind!r}; only encoded_text is served here")
        part = chunk.get("tokens")
        if not isinstance(part, list) or not all(type(token) is int for token in part):
            raise RequestError(f"prompt.chunks[{number}].tokens must be a list of whole numbers")
        tokens += part
    if not tokens:
        raise RequestError("prompt has no token")
    return tuple(tokens)
