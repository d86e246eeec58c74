"""What the tests ask of a server through Tinker's SDK."""

from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types

from tests.patience import patient
from tests.tinker.workplace import CHAT

ANSWER_S = 120.0
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
TEXTS = [[65, 66, 67, 68, 69], [70, 71, 72], [65, 70, 80, 90]]


def answer(future):
    """Return a future's result; a test ends with its name where there is none in time."""
    return future.result(timeout=patient(ANSWER_S))


def service(address: str, key: str = "tml-test") -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=address, api_key=key)


def trainer(client: tinker.ServiceClient, *, seed: int = 0, rank: int = 8) -> tinker.TrainingClient:
    made = client.create_lora_training_client(base_model=CHAT, rank=rank, seed=seed)
    return answer(made) if hasattr(made, "result") else made  # the client itself, in the SDK's oldest release


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Return a datum that scores every token but the first; each input holds a number for each of those."""
    given = {name: np.asarray(values, dtype=np.float32) for name, values in inputs.items()}
    targets = np.asarray(tokens[1:], dtype=np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs={"target_tokens": targets, **given}
    )


def texts(weight: float = 1.0) -> list[types.Datum]:
    return [datum(tokens, weights=[weight] * (len(tokens) - 1)) for tokens in TEXTS]


def logprobs(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    """Return the log-probs of each datum."""
    return [np.asarray(fields["logprobs"].tolist(), dtype=np.float32) for fields in output.loss_fn_outputs]


def scores(client: tinker.TrainingClient) -> np.ndarray:
    """Return the log-probs of the texts, all in one array, without training."""
    return np.concatenate(logprobs(answer(client.forward(texts(), "cross_entropy"))))
