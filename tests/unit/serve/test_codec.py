"""Bodies of requests become the server's values, and what is wrong with them is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.engines.sampling import SampledSequence, SampleResult
from megatron_rl.serve import messages
from megatron_rl.serve.codec import parse_training, sample_answer, training_answer
from megatron_rl.serve.values import RequestError, TrainingAnswer


def request(tokens=(3, 4, 5), loss: str = "cross_entropy", **inputs: np.ndarray):
    message = messages.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, dtype=np.int32).tobytes()
    for name, values in {"target_tokens": np.array([4, 5, 6]), **inputs}.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = messages.INT64 if values.dtype == np.int64 else messages.FLOAT32
        tensor.dense = values.tobytes()
        tensor.shape.extend(values.shape)
    return message


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_a_request_is_read_its_chunks_are_one_input_and_a_sparse_tensor_is_the_dense_one() -> None:
    message = request(weights=floats(0, 1, -2))
    message.forward_only = True
    message.loss_fn_config["beta"] = 0.5
    call = parse_training(message.SerializeToString())
    assert (call.model_id, call.seq_id, call.loss, call.forward_only) == ("m", 7, "cross_entropy", True)
    assert call.settings == {"beta": 0.5}
    (datum,) = call.data
    assert datum.tokens.tolist() == [3, 4, 5] and datum.targets.tolist() == [[4], [5], [6]] and datum.flat
    assert datum.inputs["weights"].tolist() == [[0], [1], [-2]]
    # several chunks of text are one input
    message = request(tokens=(3,), weights=floats(0, 1, 1))
    message.data[0].model_input.add().encoded_text.tokens = np.array([8, 9], dtype=np.int32).tobytes()
    assert parse_training(message.SerializeToString()).data[0].tokens.tolist() == [3, 8, 9]
    dense = np.array([[0, 1.5], [0, 0], [2.0, 0]], dtype=np.float32)
    message = request(target_tokens=np.array([[4, 1], [5, 2], [6, 3]]))
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype = messages.FLOAT32
    tensor.shape.extend(dense.shape)
    tensor.sparse_csr.values = floats(1.5, 2.0).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 2], dtype=np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0], dtype=np.int64).tobytes()
    datum = parse_training(message.SerializeToString()).data[0]
    assert np.array_equal(datum.inputs["weights"], dense) and not datum.flat
    tensor.sparse_csr.col_indices = np.array([1, 2], dtype=np.int64).tobytes()
    with pytest.raises(RequestError, match=r"data\[0\].weights is no CSR tensor of shape \[3, 2\]"):
        parse_training(message.SerializeToString())


def test_what_is_wrong_images_and_missing_targets_are_named() -> None:
    for changed, words in (
        (dict(tokens=()), "model_input has no token"),
        (dict(tokens=(3, 4)), r"target_tokens has shape \[3\] and the model input has 2 tokens"),
        (dict(target_tokens=floats(1, 2, 3)), "target_tokens must be int64 and is float32"),
        (dict(weights=floats(1, 2)), r"weights has shape \[2\] and target_tokens has \[3\]"),
        (dict(weights=floats(1, np.nan, 2)), "weights holds NaN or infinity"),
    ):
        with pytest.raises(RequestError, match=words):
            parse_training(request(**changed).SerializeToString())
    message = request()
    message.data[0].model_input.add()
    with pytest.raises(RequestError, match=r"model_input\[1\] is empty; only text is served"):
        parse_training(message.SerializeToString())
    del message.data[0].loss_fn_inputs["target_tokens"]
    del message.data[0].model_input[1]
    with pytest.raises(RequestError, match="has no target_tokens"):
        parse_training(message.SerializeToString())


def read_or_refused(body: bytes) -> None:
    try:
        parse_training(body)
    except RequestError as error:
        assert error.status == 400


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    read_or_refused(body)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_body_is_read_or_refused(place: int, patch: bytes) -> None:
    body = bytearray(request(weights=floats(0, 1, -2)).SerializeToString())
    place %= len(body)
    body[place : place + len(patch)] = patch
    read_or_refused(bytes(body))


def test_an_answer_has_a_record_for_each_width_and_a_samples_its_tokens_and_logprobs() -> None:
    rows = [floats(-1, -2), floats(-3), np.array([[-4, -5]], dtype=np.float32), floats(-6)]
    answer = TrainingAnswer(logprobs=rows, metrics={"loss:sum": 1.5})
    message = messages.ForwardBackwardOutput.FromString(training_answer(answer))
    assert dict(message.metrics) == {"loss:sum": 1.5}
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    first = message.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(first.data, np.float32).tolist() == [-1, -2, -3]
    assert np.frombuffer(first.offsets, np.int64).tolist() == [0, 8, 12]
    assert list(message.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [2]
    sequence = SampledSequence(token_ids=np.array([5, 6], np.int32), logprobs=floats(-1, -2), finish_reason="stop")
    prompt = floats(np.nan, -3)
    body = sample_answer(SampleResult(sequences=[sequence], prompt_logprobs=prompt))
    message = messages.SampleResponse.FromString(body)
    (found,) = message.sequences
    assert np.frombuffer(found.tokens, np.int32).tolist() == [5, 6]
    assert np.frombuffer(found.logprobs, np.float32).tolist() == [-1, -2]
