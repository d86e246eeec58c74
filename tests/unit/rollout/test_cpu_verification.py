"""The verification of drafts for vLLM on a CPU equals a loop over tokens, and keeps the policy's distribution."""

import pytest
import torch

from megatron_rl.rollout.vllm.cpu_verification import expand, mend, replacements, unless_empty, verify

VOCABULARY, MOST = 6, 3


def drawn(counts, drafts, target, noise, uniforms, bonus, *, draft_probs=None, is_greedy=None):
    """Return the tokens that the functions give each request, as vLLM calls them."""
    cumulative = torch.tensor(counts).cumsum(0).to(torch.int32)
    replacing = torch.empty(len(drafts), dtype=torch.int32)
    replacements(replacing, cumulative, drafts, draft_probs, target, 1 / noise, max_spec_len=MOST)
    output = torch.full((len(counts), MOST + 1), -1, dtype=torch.int32)
    is_greedy = torch.zeros(len(counts), dtype=torch.bool) if is_greedy is None else is_greedy
    verify(output, cumulative, drafts, draft_probs, target, bonus, replacing, uniforms, is_greedy, MOST, None)
    return output


def looped(counts, drafts, target, noise, uniforms, bonus, draft_probs=None):
    """Do the same token by token (Leviathan et al. 2023, algorithm 1); a drafter without probabilities is sure."""
    rows, at = [], 0
    for request, count in enumerate(counts):
        tokens = []
        for place in range(at, at + count):
            p, x = target[place], int(drafts[place])
            q = torch.zeros(VOCABULARY) if draft_probs is None else draft_probs[place].clone()
            if draft_probs is None and x >= 0:
                q[x] = 1.0
            if x >= 0 and q[x] > 0 and float(p[x]) / float(q[x]) >= float(uniforms[place]):
                tokens.append(x)
                continue
            left = p.clone()
            if draft_probs is None and x >= 0:
                left[x] = 0.0
            elif x >= 0:
                left = (p - q).clamp(min=0)
            tokens.append(int((left / noise[request]).argmax()))
            break
        else:
            tokens.append(int(bonus[request]))
        rows.append(tokens + [-1] * (MOST + 1 - len(tokens)))
        at += count
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("has_probabilities", [False, True])
def test_verification_equals_a_loop_over_tokens(has_probabilities):
    """Rows have 0 to 3 drafts, some of them the padding −1, which is never accepted."""
    random = torch.Generator().manual_seed(3)
    seen = set()
    for _ in range(60):
        counts = torch.randint(0, MOST + 1, (7,), generator=random).tolist()
        total = sum(counts)
        target = torch.softmax(2 * torch.randn(total, VOCABULARY, generator=random), dim=-1)
        drafts = torch.where(torch.rand(total, generator=random) < 0.7, target.argmax(dim=-1), 3).to(torch.int32)
        drafts[::5] = -1
        given = dict(
            target=target,
            noise=torch.empty(7, VOCABULARY).exponential_(generator=random),
            uniforms=torch.rand(total, dtype=torch.float64, generator=random),
            bonus=torch.randint(0, VOCABULARY, (7, 1), generator=random).to(torch.int32),
        )
        if has_probabilities:
            given["draft_probs"] = torch.softmax(torch.randn(total, VOCABULARY, generator=random), dim=-1)
        found = drawn(counts, drafts, **given)
        assert torch.equal(found, looped(counts, drafts, **given))
        seen |= set((found >= 0).sum(dim=1).tolist())
    assert seen == {1, 2, 3, 4}


def test_greedy_requests_are_left_as_they_are():
    given = dict(target=torch.full((2, VOCABULARY), 1 / VOCABULARY), noise=torch.ones(2, VOCABULARY))
    given |= dict(uniforms=torch.zeros(2, dtype=torch.float64), bonus=torch.tensor([[4], [5]]))
    is_greedy = torch.tensor([True, False])
    found = drawn([1, 1], torch.tensor([2, 3]), **given, is_greedy=is_greedy)
    assert found.tolist() == [[-1] * 4, [3, 5, -1, -1]]


@pytest.mark.parametrize("draft", [0, 3, -1])
def test_tokens_have_the_policys_distribution(draft):
    """A likely, an unlikely and a padded draft; chi-square of 20,000 tokens at a chance of 1e-4 to fail when right."""
    random, number = torch.Generator().manual_seed(draft + 2), 20_000
    target = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    given = dict(
        target=target.expand(number, -1).contiguous(),
        noise=torch.empty(number, VOCABULARY).exponential_(generator=random),
        uniforms=torch.rand(number, dtype=torch.float64, generator=random),
        bonus=torch.zeros(number, 1, dtype=torch.int32),
    )
    found = drawn([1] * number, torch.full((number,), draft, dtype=torch.int32), **given)[:, 0]
    counts = torch.bincount(found.long(), minlength=VOCABULARY).double()
    statistic = ((counts - number * target) ** 2 / (number * target)).sum()
    assert torch.special.gammaincc(torch.tensor((VOCABULARY - 1) / 2).double(), statistic / 2) > 1e-4


def test_tokens_drafted_from_probabilities_have_the_policys_distribution():
    """Drafts are drawn from q, which differs from p; chi-square as above."""
    random, number = torch.Generator().manual_seed(5), 20_000
    target = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    drafter = torch.tensor([0.05, 0.3, 0.05, 0.3, 0.2, 0.1])
    given = dict(
        target=target.expand(number, -1).contiguous(),
        draft_probs=drafter.expand(number, -1).contiguous(),
        noise=torch.empty(number, VOCABULARY).exponential_(generator=random),
        uniforms=torch.rand(number, dtype=torch.float64, generator=random),
        bonus=torch.zeros(number, 1, dtype=torch.int32),
    )
    drafts = torch.multinomial(drafter, number, replacement=True, generator=random).to(torch.int32)
    found = drawn([1] * number, drafts, **given)[:, 0]
    counts = torch.bincount(found.long(), minlength=VOCABULARY).double()
    statistic = ((counts - number * target) ** 2 / (number * target)).sum()
    assert torch.special.gammaincc(torch.tensor((VOCABULARY - 1) / 2).double(), statistic / 2) > 1e-4


def test_values_are_repeated_for_each_draft():
    cumulative = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand(torch.tensor([0.7, 0.5, 0.0]), cumulative, 5, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))
    found = expand(torch.tensor([3, 9, 4], dtype=torch.int32), cumulative, 5)
    assert found.dtype == torch.int32 and found.tolist() == [3, 3, 4, 4, 4]


def test_another_release_is_refused():
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.1.*speculation=off.*0\.32\.0"):
        mend("0.33.1+cpu")


def test_a_step_without_drafts_has_nothing_to_cut():
    """vLLM's function for top_k takes a maximum over the drafts; of none it raises an error."""

    def cut(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        least = logits.topk(int(top_k.max()), dim=1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)

    none, one = torch.zeros(0, VOCABULARY), torch.arange(VOCABULARY, dtype=torch.float32)[None]
    with pytest.raises(RuntimeError, match="numel"):
        cut(none, torch.zeros(0))
    assert unless_empty(cut)(none, torch.zeros(0)) is none
    assert unless_empty(cut)(one, torch.tensor([2])).isfinite().sum() == 2
