"""Score the samples of a run: run.yaml names this file under reward.functions."""

import re


def score(prompts, completions, completion_ids, answer, **columns):
    """Return a float for each sample: 1.0 if the last number of the completion is the answer, else 0.0.

    prompts, completions: texts.
    completion_ids: lists of token ids.
    answer: the data's column of that name. Name any other column as a parameter.

    A function may return None for a sample to which it does not apply.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion)
        scores.append(float(bool(numbers) and numbers[-1] == str(expected)))
    return scores
