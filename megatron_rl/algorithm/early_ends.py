"""The settings under which ending samples early (``reward.decided``) changes the expected gradient.

A sample ends once its reward is fixed. With A its advantage, which is fixed too, the tokens left out
would have added A · w · E[∇ log π(token | tokens before)] = 0 to the expected gradient, if their weight w
depends on no token after them (docs/semantics.md#early-ends). The settings below break that: a
weight that depends on the sample's length or on its later tokens, or a loss of every token besides
the policy term.
"""

from __future__ import annotations

from megatron_rl.config import Config

# Reductions that divide by numbers of sampled tokens.
BY_LENGTH = ("token_mean", "sequence_mean", "prompt_mean")


def changed_terms(config: Config) -> tuple[str, ...]:
    """Return the settings, each as ``key=value: what changes``, under which early ends change the expected gradient.

    The ratio's clip is not among them: on the weights that sampled, it does nothing. In later
    steps on the same rollout it clips the tokens that are left out too.
    """
    loss, terms = config.loss, []
    if loss.reduction in BY_LENGTH:
        terms.append(f"loss.reduction={loss.reduction}: a token's weight depends on the lengths, which become shorter")
    if config.kl_in_loss:
        terms.append(f"loss.kl_coefficient={loss.kl_coefficient}: the tokens left out have no KL")
    if config.kl_in_reward:
        terms.append("reference.kl_in=reward: the KL of the tokens left out is not in the reward")
    if loss.entropy_coefficient != 0:
        terms.append(f"loss.entropy_coefficient={loss.entropy_coefficient}: the tokens left out have no entropy bonus")
    if loss.policy == "gspo":
        terms.append("loss.policy=gspo: a sequence's ratio is a mean over its tokens")
    if config.correction.mode.startswith(("sequence_", "geometric_")):
        terms.append(f"correction.mode={config.correction.mode}: a sequence's weight is of all its tokens")
    if config.correction.off_policy_delta is not None:
        delta = config.correction.off_policy_delta
        terms.append(f"correction.off_policy_delta={delta}: a sample is dropped by a mean over its tokens")
    if config.advantage.estimator in ("reinforce_plus_plus", "gdpo") and config.advantage.whiten != "none":
        terms.append(f"advantage.whiten={config.advantage.whiten}: a sample weighs as its number of tokens")
    if config.has_critic:
        terms.append("advantage.estimator=gae: values, returns and whitening are of the tokens that are left")
    if config.has_teacher:
        terms.append("advantage.estimator=distillation: the tokens left out are not compared with the teacher's")
    return tuple(terms)
