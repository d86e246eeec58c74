"""Checks the contract of ``reward.decided`` on the saved rollouts of a run that ended no sample early.

    megatron-rl check-decided RUN reward.decided=./my_run/reward.py:decided

The run saved its rollouts (metrics.save_rollouts=true). After every reward.decided_every_tokens tokens
of each response the function is asked. Wherever it returns True, the response that ends there must have
the reward of the whole response. The exit code is 1 if one has another.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl import hub
from megatron_rl.config import Config, load_config
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import ConfigError, RewardError, quoted
from megatron_rl.json_text import check, field
from megatron_rl.observability.completions import cut, visible
from megatron_rl.observability.saved_rollouts import read_rollout, saved_numbers
from megatron_rl.reward.decided import Decided
from megatron_rl.reward.reward import Reward, opened_reward
from megatron_rl.rollout.engines.early_end import DECIDED, EarlyEnd
from megatron_rl.trainer.training_data import load_prompts
from megatron_rl.types import Prompt, Rollout
from megatron_rl.validate import objective, validate_config
from megatron_rl.weights.config_json import load_hf_config

EXIT_CONFIG = 2
MOST_SHOWN = 10  # violations that are printed
SHOWN_CHARS = 200  # the end of a text that is printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Describes the beginning of a response whose reward is not the reward of the whole response.

    beginning, whole: the total rewards; None for a sample without one.
    text: the beginning's text.
    """

    sample: str
    num_tokens: int
    beginning: float | None
    whole: float | None
    text: str


@dataclass(slots=True, kw_only=True)
class Replay:
    """Counts what a replay of saved samples found.

    samples, tokens: the whole responses and their tokens.
    ended: the samples that would have ended early.
    saved_tokens: the tokens that would not have been sampled.
    compared: the beginnings that the function called decided.
    skipped: samples that ended early already, or that an environment gave up.
    """

    samples: int = 0
    tokens: int = 0
    ended: int = 0
    saved_tokens: int = 0
    compared: int = 0
    skipped: int = 0

    def samples_of(
        self, wholes: Sequence[Rollout], early_end: EarlyEnd, decode: Callable[[list[int]], str], reward: Reward
    ) -> Iterator[Violation]:
        """Replay whole responses to one prompt; yield each violation of the contract."""
        for whole in wholes:
            ids, every = whole.response_ids, early_end.every_tokens
            places = (whole.prompt, whole.sample_index)
            ends = [end for end in range(every, len(ids), every) if early_end.ends(*places, ids[:end])]
            self.samples, self.tokens = self.samples + 1, self.tokens + len(ids)
            if not ends:
                continue
            self.ended, self.compared = self.ended + 1, self.compared + len(ends)
            self.saved_tokens += len(ids) - ends[0]
            beginnings = [_sample(*places, ids[:end], decode(list(ids[:end])), DECIDED) for end in ends]
            of_whole, *scores = reward.score([whole, *beginnings])
            for beginning, score in zip(beginnings, scores, strict=True):
                if score.total != of_whole.total:
                    yield Violation(
                        sample=whole.sample_id,
                        num_tokens=len(beginning.response_ids),
                        beginning=score.total,
                        whole=of_whole.total,
                        text=beginning.text,
                    )

    def summary(self) -> str:
        share = self.saved_tokens / max(1, self.tokens)
        skipped = f"; {self.skipped} samples that are no whole responses were left out" if self.skipped else ""
        return (
            f"{self.samples:,} responses of {self.tokens:,} tokens: {self.ended:,} would have ended early, which saves "
            f"{self.saved_tokens:,} tokens ({share:.1%}); {self.compared:,} beginnings compared{skipped}"
        )


def replay(run: pathlib.Path, config: Config, last: int | None) -> tuple[Replay, list[Violation]]:
    """Replay a run's saved rollouts; return the counts and the violations.

    last: only so many of the latest saved rollouts are replayed; None: all.

    Raises ConfigError for a run without saved rollouts, or of other data than the configuration's.
    """
    numbers = saved_numbers(run)[-last:] if last else saved_numbers(run)
    if not numbers:
        raise ConfigError(f"{run} has no saved rollouts; run it with metrics.save_rollouts=true, and without decided")
    hf_config = load_hf_config(config.model.hf_path, provider=config.model.provider)
    tokenizer = load_tokenizer(config.model, hf_config.vocab_size)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    found, violations = Replay(), []
    with opened_reward(config.reward, config.run.deadline_s) as reward:
        parts = (config.data, config.sft, config.preference, config.environment, config.run.seed)
        prompts = load_prompts(*parts, tokenizer, hf_config, reward.required_columns)
        decided = Decided(config.reward, decode)
        for number in numbers:
            for group in read_rollout(run, number)["groups"]:
                prompt = _prompt(group, prompts.recall, f"rollout {number} of {run}")
                wholes = []
                for row in field(group, "samples", list, f"{run}: prompt {prompt.name}", error=ConfigError):
                    if row["finish_reason"] == DECIDED or row["excluded"] is not None:
                        found.skipped += 1
                        continue
                    ids = tuple(row["ids"])
                    body = ids[:-1] if row["finish_reason"] == "stop" else ids
                    wholes.append(_sample(prompt, row["sample"], ids, decode(list(body)), row["finish_reason"]))
                violations += found.samples_of(wholes, decided, decode, reward)
    return found, violations


def _prompt(group: Mapping[str, object], recall: Callable[[str, int], Prompt], where: str) -> Prompt:
    """Return the prompt of a saved group, with all columns of its row. Raises ConfigError if the row has changed."""
    name = check(group["prompt_id"], f"{where}: prompt_id", str, error=ConfigError)
    prompt_id, _, attempt = name.partition(".")
    try:
        prompt = recall(prompt_id, int(attempt or 0))
    except (ValueError, IndexError):
        prompt = None
    if prompt is None or prompt.text != group["prompt"]:
        raise ConfigError(
            f"{where} has the prompt {name} of other data than data.train has now; name the data that the run was "
            "trained on, as in data.train=FILE"
        )
    return prompt


def _sample(prompt: Prompt, index: int, ids: tuple[int, ...], text: str, finish_reason: str) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample_index=index,
        response_ids=ids,
        logprobs=(0.0,) * len(ids),
        text=text,
        finish_reason=finish_reason,
        weight_versions=((0, len(ids)),),
    )


def main(arguments: list[str] | None = None) -> int:
    """Replay a run's rollouts. Returns 0, 1 if the contract is broken, or 2 with the reason on stderr."""
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="megatron-rl check-decided",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=pathlib.Path, help="the folder of the run whose rollouts are replayed")
    parser.add_argument("--last", type=int, metavar="N", help="replay the N latest saved rollouts alone")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replace settings of RUN/config.yaml")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.last is not None and options.last < 1:
            raise ConfigError(f"--last={options.last} must be at least 1")
        if not (options.run / "config.yaml").is_file():
            raise ConfigError(f"{options.run} is no run's folder: it has no config.yaml")
        config = hub.fetched(load_config(options.run / "config.yaml", options.settings), weights=False, pins=False)
        if config.reward.decided is None:
            raise ConfigError("reward.decided=null; name the function to check, as in reward.decided=./mine.py:decided")
        validate_config(config, objective.early_ends)
        found, violations = replay(options.run, config, options.last)
    except (ConfigError, FileNotFoundError, RewardError, ValueError) as error:
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    for x in violations[:MOST_SHOWN]:
        end = cut(visible(x.text[-SHOWN_CHARS:]), SHOWN_CHARS)
        print(f"BROKEN {x.sample} after {x.num_tokens} tokens: reward {x.beginning}, whole {x.whole}; text … {end!r}")
    print(found.summary())
    if not found.compared:
        print(f"reward.decided={quoted(config.reward.decided, 300)} never returned True: nothing was checked")
    if violations:
        samples = len({x.sample for x in violations})
        print(f"the contract is broken by {len(violations)} beginnings of {samples} samples: the reward was not fixed")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
