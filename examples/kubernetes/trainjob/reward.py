"""The reward function of this run: run.yaml names this file under reward.functions."""

import re


def score(prompts, completions, completion_ids, answer, **columns):
    """Return a float for each sample: 1.0 if the last number of the completion is the answer, else 0.0.

    prompts, completions: a text for each sample.
    completion_ids: a list of token ids for each sample.
    answer: the column ``answer`` of the data. To get another column, name it as a parameter.

    A function may return None for a sample to which it does not apply.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion)
        scores.append(float(bool(numbers) and numbers[-1] == str(expected)))
    return scores
