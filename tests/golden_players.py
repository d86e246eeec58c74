"""Plays in golden's runs: an environment of several turns, and an agent that asks the run's endpoint."""

import json
import urllib.request

from megatron_rl.environment import Step


class Riddle:
    """An environment that tells how long the turn was, and goes on after a turn of an even number of characters."""

    def reset(self, prompt) -> None: ...

    def step(self, action: str) -> Step:
        return Step(observation=f"={len(action)} ", reward=len(action) / 8, done=len(action) % 2 == 1)


def counts_on(base_url: str, row: dict) -> float:
    """Let a text go on three times, and earn a tenth for each of its characters."""
    text = row["prompt"]
    for number in range(3):
        body = json.dumps({"prompt": text, "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{base_url}/completions", body, {"Authorization": "Bearer any"})
        with urllib.request.urlopen(request, timeout=100) as response:
            text += json.loads(response.read())["choices"][0]["text"] + f"+{number}="
    return len(text) / 10
