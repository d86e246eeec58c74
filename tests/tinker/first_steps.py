"""Trains, saves and samples by whichever release of Tinker's SDK is first on the path; prints what it saw as JSON."""

import json
import sys

import tinker
from tinker import types

from tests.tinker.clients import ADAM, TEXTS, answer, logprobs, service, texts, trainer


def main(address: str) -> dict[str, object]:
    client = service(address)
    model = trainer(client)
    losses = []
    for _ in range(3):
        promise = model.forward_backward(texts(), "cross_entropy")
        answer(model.optim_step(ADAM))
        losses.append(answer(promise).metrics["loss:sum"])
    answer(model.save_state("three"))
    sampler = model.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=5, temperature=0.0)
    drawn = answer(sampler.sample(types.ModelInput.from_ints(TEXTS[0][:2]), 1, params))
    return {
        "version": tinker.__version__,
        "losses": losses,
        "logprobs": [values.tolist() for values in logprobs(answer(model.forward(texts(), "cross_entropy")))],
        "drawn": list(drawn.sequences[0].tokens),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
