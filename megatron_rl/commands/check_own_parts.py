"""Tries a policy loss or an advantage estimator of your own against its contract, and shows the loss's gradient.

Examples:

    megatron-rl check --loss my_losses:clipped --arguments low=0.2
    megatron-rl check --estimator ./my_estimator.py:median

The contract is a list of properties, which docs/your-own.md explains. Each is tried on random
numbers, in seconds, without a model. The exit code is 1 if a property does not hold. A run tries
the same properties at its start.
"""

from __future__ import annotations

import argparse
import sys

import yaml

from megatron_rl.algorithm import own_estimator, own_policy_check
from megatron_rl.algorithm.contract import Finding
from megatron_rl.config import AdvantageConfig, LossConfig
from megatron_rl.errors import ConfigError


def print_findings(name: str, findings: list[Finding]) -> bool:
    """Print ``name`` and each checked property with its result; return whether all properties hold.

    name: the checked loss or estimator, as the user named it.
    """
    print(name)
    for finding in findings:
        print(f"  {'holds' if finding.holds else 'FAILS'}  {finding.name}: {finding.detail}")
    return all(finding.holds for finding in findings)


def print_gradient(config: LossConfig) -> None:
    """Print autograd's gradient of the loss at six tokens beside central differences; print whether they are equal.

    The two gradients count as equal if they agree to 1e-6 at all tokens, not only at these six. A
    loss that detaches a tensor on purpose makes them differ.
    """
    gradient, numeric = own_policy_check.finite_differences(config)
    print("  d loss / d log-prob of the first tokens, and by central differences of the loss:")
    for index in range(6):
        print(f"    {float(gradient[index]):+.6f}  {float(numeric[index]):+.6f}")
    gap = float((gradient - numeric).abs().max())
    verdict = "equal: the loss stops no gradient" if gap < 1e-6 else "right only if your loss stops a gradient (detach)"
    print(f"    the largest difference of {len(gradient)} tokens is {gap:.2g}; {verdict}")


def main(arguments: list[str] | None = None) -> int:
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="megatron-rl check",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--loss", metavar="MODULE:FUNCTION", help="a policy loss, as loss.policy names it")
    part.add_argument("--estimator", metavar="MODULE:FUNCTION", help="an estimator, as advantage.estimator names it")
    parser.add_argument("--arguments", nargs="*", default=[], metavar="KEY=VALUE", help="its arguments, YAML values")
    parser.add_argument(
        "--moves-equal-rewards", action="store_true", help="the estimator's advantage.moves_equal_rewards=true"
    )
    options = parser.parse_args(arguments)
    values = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in options.arguments)}
    try:
        if options.estimator:
            estimator = AdvantageConfig(
                estimator=options.estimator, arguments=values, moves_equal_rewards=options.moves_equal_rewards
            )
            return 0 if print_findings(options.estimator, own_estimator.check(estimator)) else 1
        config = LossConfig(policy=options.loss, arguments=values)
        findings = own_policy_check.check(config)
        whole = print_findings(options.loss, findings)
        if findings[0].holds:
            print_gradient(config)
    except ConfigError as error:
        print(f"megatron_rl: {error}", file=sys.stderr)
        return 2
    if not whole and all(finding.holds for finding in findings if finding.name != own_policy_check.ZERO):
        print("  skip.mode=exact refuses it: take skip.mode=approximate or skip.mode=off")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
