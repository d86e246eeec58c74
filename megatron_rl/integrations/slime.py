"""The zero-advantage skip inside slime and miles: samples without signal reach their trainer as stubs of two tokens.

A sample has signal if its advantage is not 0 and it has a loss token.
``--custom-convert-samples-to-train-data-path`` names ``convert_samples``, which calls the trainer's
own conversion and shortens samples in its result. No sample is taken out of the batch: slime
divides the batch into steps by counting rollouts, averages over that count, and needs a sample for
each rank and micro-batch. Read in slime 0.3.1 (624b824, 2026-08-21) and miles 0.1.0 (31f1ca9,
2026-08-21).

Invariants (tests/unit/integrations/test_slime_stubs.py, tests/oracles/test_slime_plugin.py):

1. Only a sample whose advantage is 0, or that has no loss token, becomes a stub; NaN and infinity
   are not 0.
2. Every field of every other sample is the one that the trainer's own conversion gave.
3. The number of samples, their order and their rollout ids are those of the whole batch. So are
   steps, denominators and the learning rate's schedule. Every rank has the same number of
   micro-batches.
4. If a setting may give a sample of advantage 0 a gradient, no sample is shortened.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.integrations.verl_rows import model_obstacles

logger = logging.getLogger(__name__)

# Their advantage is the reward, once for every token (loss.py, compute_advantages_and_returns), and their policy terms
# are multiples of it. Not among them: ppo has values; both reinforce_plus_plus ask for whitened advantages.
EXACT_ESTIMATORS = ("grpo", "gspo", "cispo")

# Arguments with the values under which a sample of advantage 0 has no gradient and does not affect others. An argument
# that a trainer does not have counts as harmless.
HARMLESS: dict[str, tuple[object, ...]] = {
    "loss_type": ("policy_loss",),
    "train_backend": ("megatron",),
    "qkv_format": ("thd",),  # bshd pads every sample to the longest one
    "compute_advantages_and_returns": (True,),
    "normalize_advantages": (False,),
    "use_critic": (False,),
    "use_opd": (False,),
    "kl_coef": (0,),
    "entropy_coef": (0,),
    "lora_dropout": (0,),
}
UNKNOWN: tuple[str, ...] = (
    "custom_advantage_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_tis_function_path",
    "rollout_data_postprocess_path",
)
UNTRIED: tuple[str, ...] = ("use_routing_replay", "use_rollout_routing_replay", "enable_mtp_training")

# Fields of the train data with one entry per sample, which a stub keeps.
KEPT_FIELDS: frozenset[str] = frozenset(
    {
        "rewards",
        "raw_reward",
        "truncated",
        "sample_indices",
        "rollout_ids",
        "rollout_mask_sums",
        "round_number",
        "metadata",
        "source_names",
        "weight_versions",
    }
)
# Fields that ``_shorten`` cuts.
CUT_FIELDS: frozenset[str] = frozenset(
    {
        "tokens",
        "response_lengths",
        "loss_masks",
        "rollout_log_probs",
        "teacher_log_probs",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stubbed:
    """Counts the savings in one rollout.

    groups:          all prompt groups.
    dead_groups:     groups of which every sample became a stub (a sample cut to two tokens).
    equal_groups:    groups of two or more samples of equal reward, none of which became a stub. float32
        can round the mean of equal rewards, as of 8 rewards of 0.1; then no advantage is exactly 0.
    samples, stubs:  the numbers of all samples and of stubs.
    dense_tokens:    prompt and response tokens of the whole batch.
    executed_tokens: prompt and response tokens that run, stubs included.

    Example: ``groups=4, dead_groups=2, samples=32, stubs=17, dense_tokens=11000,
    executed_tokens=6000``: 15 samples run whole.
    """

    groups: int
    dead_groups: int
    equal_groups: int
    samples: int
    stubs: int
    dense_tokens: int
    executed_tokens: int


def convert_samples(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Return slime's or miles' train data of a rollout, but with every sample without signal cut to two tokens.

    args: slime's or miles' parsed arguments.
    samples: the rollout's samples as a flat list, each of the trainer's class ``Sample``.

    If a setting gives samples of advantage 0 a gradient, the train data stay whole, and a warning
    names the setting. Raises ConfigError for samples of another class, and for miles'
    ``use_dynamic_global_batch_size`` and ``multi_lora``: miles does not give a custom conversion the
    counts that these need.
    """
    train_data = _own_conversion(args, samples)
    obstacles = tuple(obstacles_of(args) + field_obstacles(train_data))
    _say(obstacles)
    if obstacles:
        return train_data
    groups = [sample.group_index for sample in samples]
    train_data, counts = with_stubs(train_data, groups, per_token=args.calculate_per_token_loss)
    logger.info("megatron_rl's zero-advantage skip: %s", counts)
    return train_data


def _own_conversion(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Return the train data that slime or miles would make of the samples without a custom conversion."""
    owners = {base.__module__.partition(".")[0] for base in type(samples[0]).__mro__}
    # slime's conversion is a method of its rollout manager.
    if "slime" in owners:
        manager = importlib.import_module("slime.ray.rollout").RolloutManager
        if hasattr(manager, "__ray_metadata__"):  # Ray's decorator hides the class (ray 2.60, actor.py, ActorClass)
            manager = manager.__ray_metadata__.modified_class
        plain = types.SimpleNamespace(
            args=args,
            custom_convert_samples_to_train_data_func=None,
            custom_reward_post_process_func=_own_rewards(args, "slime"),
        )
        plain._post_process_rewards = functools.partial(manager._post_process_rewards, plain)
        return manager._convert_samples_to_train_data(plain, samples)
    # miles' conversion is a function.
    if "miles" not in owners:
        raise ConfigError(
            f"convert_samples takes samples of slime's or miles' class Sample, not {type(samples[0])!r}; name it by "
            "--custom-convert-samples-to-train-data-path of one of the two"
        )
    for name in ("use_dynamic_global_batch_size", "multi_lora"):
        if vars(args).get(name):
            raise ConfigError(
                f"{name}=True: miles does not hand its counts to a custom conversion; take out "
                "--custom-convert-samples-to-train-data-path, or this setting"
            )
    conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
    return conversion.convert_samples_to_train_data(
        args,
        samples,
        metadata={},
        custom_convert_samples_to_train_data_func=None,
        custom_reward_post_process_func=_own_rewards(args, "miles"),
    )


def _own_rewards(args: Any, package: str) -> Callable | None:
    path = args.custom_reward_post_process_path
    return importlib.import_module(f"{package}.utils.misc").load_function(path) if path is not None else None


def obstacles_of(args: Any) -> list[str]:
    """Return the arguments, each as ``key=value``, that forbid shortening samples of advantage 0; [] if none do."""
    arguments = vars(args)
    obstacles = (
        [] if args.advantage_estimator in EXACT_ESTIMATORS else [f"advantage_estimator={args.advantage_estimator}"]
    )
    obstacles += [
        f"{key}={arguments[key]}"
        for key, harmless in HARMLESS.items()
        if key in arguments and arguments[key] not in harmless
    ]
    if arguments.get("use_kl_loss") and args.kl_loss_coef != 0:
        obstacles.append(f"kl_loss_coef={args.kl_loss_coef}")
    obstacles += [f"{key}={arguments[key]} (not known)" for key in UNKNOWN if arguments.get(key) is not None]
    obstacles += [f"{key}={arguments[key]} (not tried)" for key in UNTRIED if arguments.get(key)]
    return obstacles + model_obstacles(arguments)


def field_obstacles(train_data: Mapping[str, Any]) -> list[str]:
    """Return a remark on each field of the train data that cannot be shortened here, such as pictures; [] if none."""
    return [f"the field {name} (not tried)" for name in sorted(train_data.keys() - KEPT_FIELDS - CUT_FIELDS)]


@functools.lru_cache(maxsize=1)  # log once, and again if it changes
def _say(obstacles: tuple[str, ...]) -> None:
    if obstacles:
        logger.warning(
            "megatron_rl's zero-advantage skip drops NOTHING in this run: under %s a sample without advantage trains, "
            "or may train; the trainer's own data are used",
            ", ".join(obstacles),
        )
    else:
        logger.warning("megatron_rl's zero-advantage skip is ON: samples whose advantage is 0 train as two tokens")


def with_stubs(
    train_data: Mapping[str, Any], groups: Sequence[Any], *, per_token: bool
) -> tuple[dict[str, Any], Stubbed]:
    """Return (the train data with every sample without signal cut to two tokens, counts of the savings).

    groups: the key of each sample's prompt group; only the counts use it.
    per_token: whether the trainer sums the loss over tokens (``--calculate-per-token-loss``).

    A cut sample (a stub) has the prompt's last token and the response's first token. The one entry
    of its loss mask is chosen so that the trainer divides the loss by the same number as without
    cuts:

    - Without ``per_token`` (mean over rollouts) the entry is 0, since the trainer divides by
      ``rollout_mask_sums``, which is not cut.
    - With ``per_token`` the entry is the sum of the uncut response's mask, since the trainer divides
      by Σ max(Σ mask, 1) over samples. The token trains nothing, since its advantage is 0.
    """
    cut = {name: list(values) if name in CUT_FIELDS else values for name, values in train_data.items()}
    tokens, rewards = train_data["tokens"], train_data["rewards"]
    mask_sums = [int(sum(mask)) for mask in train_data["loss_masks"]]
    stubs = set()
    for row, (reward, mask_sum) in enumerate(zip(rewards, mask_sums, strict=True)):
        response = train_data["response_lengths"][row]
        prompt = len(tokens[row]) - response
        if (reward != 0 and mask_sum > 0) or response < 1 or prompt < 1:
            continue
        stubs.add(row)
        _shorten(cut, row, prompt, mask_sum if per_token else 0)
    raw, members = train_data["raw_reward"], {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    dead = [rows for rows in members.values() if stubs.issuperset(rows)]
    equal = [rows for rows in members.values() if len({str(raw[row]) for row in rows}) == 1 < len(rows)]
    return cut, Stubbed(
        groups=len(members),
        dead_groups=len(dead),
        equal_groups=sum(stubs.isdisjoint(rows) for rows in equal),
        samples=len(tokens),
        stubs=len(stubs),
        dense_tokens=sum(map(len, tokens)),
        executed_tokens=sum(map(len, cut["tokens"])),
    )


def _shorten(cut: dict[str, Any], row: int, prompt: int, mask: int) -> None:
    """Cut one sample in place to the last token of its prompt and the first token of its response.

    cut: the train data; ``row`` is the sample's index in them.
    prompt: the number of the prompt's tokens.
    mask: the loss mask of the remaining response token.
    """
    cut["tokens"][row] = cut["tokens"][row][prompt - 1 : prompt + 1]
    cut["response_lengths"][row] = 1
    cut["loss_masks"][row] = [mask]
    for name in ("rollout_log_probs", "teacher_log_probs"):
        if name in cut and cut[name][row] is not None:
            cut[name][row] = [0.0]  # the largest: no ratio against it overflows, whatever the short context gives
    if "rollout_top_p_token_offsets" in cut:
        offsets = cut["rollout_top_p_token_offsets"][row][:2]
        cut["rollout_top_p_token_offsets"][row] = offsets
        cut["rollout_top_p_token_ids"][row] = cut["rollout_top_p_token_ids"][row][: int(offsets[-1])]
