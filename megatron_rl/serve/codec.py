"""The conversion between Tinker's protobuf bodies and the server's values. Every fault of a body is a RequestError."""

from __future__ import annotations

import itertools
import math

import numpy as np
from google.protobuf.message import DecodeError

from megatron_rl.errors import quoted, shortened
from megatron_rl.rollout.engines.sampling import SampleResult, TopLogProbs
from megatron_rl.serve import messages
from megatron_rl.serve.values import Datum, RequestError, TrainingAnswer, TrainingCall

PROTOBUF = "application/x-protobuf"
DTYPES = {messages.FLOAT32: np.dtype(np.float32), messages.INT64: np.dtype(np.int64)}
MOST_CELLS = 2**24  # cells of all tensors of a request, including the cells that a sparse tensor leaves out
MOST_DATA = 2**16  # data of a request; the SDK sends 1,024 at most
MOST_INPUTS = 8  # inputs of a datum; a loss reads four


def parse_message(body: bytes):
    """Return the ForwardBackwardRequest of a protobuf body. Raises RequestError for other bytes."""
    try:
        return messages.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(
            f"the body of {len(body)} bytes is no ForwardBackwardRequest ({error}); a client before tinker 0.25 sends "
            "JSON, which is not read"
        ) from None


def parse_training(body: bytes) -> TrainingCall:
    """Return the training request of a protobuf body. Raises RequestError, naming the datum and the field."""
    return training_call(parse_message(body))


def training_call(message) -> TrainingCall:
    """Return the training request of a ForwardBackwardRequest. Raises RequestError, naming the datum and the field."""
    if not message.data:
        raise RequestError("data is empty: a forward_backward needs at least one datum")
    if len(message.data) > MOST_DATA:
        raise RequestError(f"data holds {len(message.data):,} data, and {MOST_DATA:,} are read in one request")
    _check_cells(message.data)
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


def _check_cells(data) -> None:
    """Raise RequestError if the data's tensors have more than MOST_CELLS elements, or a datum has too many tensors.

    A sparse tensor counts with its dense size.
    """
    cells = 0
    for number, datum in enumerate(data):
        if len(datum.loss_fn_inputs) > MOST_INPUTS:
            names = ", ".join(quoted(name, 40) for name in sorted(datum.loss_fn_inputs)[:MOST_INPUTS])
            raise RequestError(
                f"data[{number}] has {len(datum.loss_fn_inputs)} loss_fn_inputs ({names}, …); no loss "
                f"reads more than {MOST_INPUTS}"
            )
        for name, tensor in datum.loss_fn_inputs.items():
            if any(size < 0 for size in tensor.shape):
                raise RequestError(f"data[{number}].loss_fn_inputs[{quoted(name)}] has shape {_shape(tensor)}")
            if tensor.WhichOneof("kind") == "sparse_csr":
                cells += math.prod(tensor.shape)
            else:
                cells += len(tensor.dense) // 4
            if cells > MOST_CELLS:
                raise RequestError(
                    f"the loss_fn_inputs up to data[{number}]'s {quoted(name)} of shape {_shape(tensor)} have "
                    f"{cells:,} cells, and {MOST_CELLS:,} are read in one request; send fewer data at once"
                )


def _shape(tensor) -> str:
    return shortened(str(list(tensor.shape[:8])), 100)


def size_of(call: TrainingCall) -> int:
    """Return the number of bytes of a request's arrays."""
    return sum(array.nbytes for datum in call.data for array in (datum.tokens, datum.targets, *datum.inputs.values()))


def _datum(message, where: str) -> Datum:
    tokens = _tokens(message.model_input, where)
    arrays = {name: _array(tensor, f"{where}.{_named(name)}") for name, tensor in message.loss_fn_inputs.items()}
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
                f"{where}.{_named(name)} has shape {list(values.shape)} and target_tokens has {list(targets.shape)}; "
                "give one number for each target"
            )
        if not np.isfinite(values).all():
            raise RequestError(f"{where}.{_named(name)} holds NaN or infinity, so the loss would not be finite")
    wide = (len(tokens), -1)
    return Datum(
        tokens=tokens,
        targets=targets.reshape(wide),
        inputs={name: values.astype(np.float32).reshape(wide) for name, values in arrays.items()},
        flat=targets.ndim == 1,
    )


def _named(name: str) -> str:
    """Return an input's name for error messages, without control characters."""
    return name if name.isidentifier() and name.isascii() and len(name) < 60 else f"loss_fn_inputs[{quoted(name)}]"


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
    """Return a protobuf tensor as a dense array. ``where``: the tensor's name, for error messages.

    Elements that a sparse tensor omits are 0.
    """
    if message.dtype not in DTYPES:
        raise RequestError(f"{where} has dtype {message.dtype}; float32 ({messages.FLOAT32}) and int64 are read")
    dtype, shape = DTYPES[message.dtype], tuple(message.shape)
    if message.WhichOneof("kind") == "sparse_csr":
        return _dense(message.sparse_csr, dtype, shape, where)
    values = _from_bytes(message.dense, dtype, where)
    if not shape:
        return values
    if values.size != math.prod(shape):
        raise RequestError(f"{where} has {values.size} numbers and its shape {_shape(message)} asks for others")
    return values.reshape(shape)


def _dense(csr, dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    values = _from_bytes(csr.values, dtype, f"{where} (values)")
    crow = _from_bytes(csr.crow_indices, np.dtype(np.int64), f"{where} (crow_indices)")
    columns = _from_bytes(csr.col_indices, np.dtype(np.int64), f"{where} (col_indices)")
    fits = (
        len(shape) == 2
        and min(shape) > 0
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and (np.diff(crow) >= 0).all()
        and crow[-1] == len(columns) == len(values)
        and ((columns >= 0) & (columns < shape[1])).all()
    )
    if not fits:
        raise RequestError(
            f"{where} is no CSR tensor of shape {shortened(str(list(shape)), 100)}: {len(crow)} crow_indices, "
            f"{len(columns)} col_indices and {len(values)} values"
        )
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), columns] = values
    return dense


def training_answer(answer: TrainingAnswer) -> bytes:
    """Return the protobuf body of an answer, with each datum's log-probs."""
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(answer.metrics))
    # consecutive data whose log-probs have the same number of columns share one ArrayRecord
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
