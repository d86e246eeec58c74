"""Draws a run's sampled completions for its report: the first and the last of training and of each evaluation.

Every text is escaped twice over: ``visible`` for characters that no page should obey, then HTML's own escapes.
"""

from __future__ import annotations

import html
import pathlib

from megatron_rl.observability.completions import (
    FILE_NAME,
    Completion,
    headline,
    read_completions,
    visible,
)

SHOWN = 8  # completions of one rollout or evaluation on the page

CSS = """
.completion { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px; }
.completion header { font-size: 13.5px; font-weight: 600; overflow-wrap: anywhere; }
.completion dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 6px 14px; margin: 8px 0 0; }
.completion dt { color: var(--soft); font-size: 13px; }
.completion dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; max-height: 22em;
  overflow-y: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
h3 { font-size: 14px; margin: 18px 0 8px; color: var(--soft); font-weight: 600; }
"""


def _first_and_last(path: pathlib.Path) -> dict[str, list[list[Completion]]]:
    """Return of each source its first and its last rows' completions, in one pass that keeps no others."""
    found: dict[str, list[list[Completion]]] = {}
    for completion in read_completions(path):
        batches = found.setdefault(completion.source, [])
        if batches and batches[-1][0].step == completion.step:
            batches[-1].append(completion)
        else:
            found[completion.source] = [*batches[:1], [completion]]
    return found


def _text(text: str) -> str:
    return html.escape(visible(text))


def _card(completion: Completion) -> str:
    texts = [
        f"<dt>{name}</dt><dd>{_text(text)}</dd>"
        for name, text in (
            ("prompt", completion.prompt),
            ("response", completion.response),
            ("answer", completion.answer),
        )
        if text is not None
    ]
    return f'<div class="completion"><header>{_text(headline(completion))}</header><dl>{"".join(texts)}</dl></div>'


def _batch(batch: list[Completion]) -> str:
    first = batch[0]
    where = f"Rollout {first.rollout}, " if first.rollout is not None else ""
    more = f", {SHOWN} of {len(batch)} recorded" if len(batch) > SHOWN else ""
    title = f"{where}step {first.step}{more}"
    cards = "".join(_card(completion) for completion in batch[:SHOWN])
    return f'<h3>{html.escape(title[:1].upper() + title[1:])}</h3><div class="plots">{cards}</div>'


def completions_section(path: pathlib.Path) -> str:
    """Return the page's section of completions; "" where the run recorded none.

    path: of completions.jsonl. Raises ValueError ``file:line`` for a malformed line.
    """
    if not path.exists():
        return ""
    parts = []
    for source, batches in _first_and_last(path).items():
        name = "Completions of training" if source == "train" else f"Completions of {source}"
        parts.append(f"<h2>{_text(name)}</h2>{''.join(_batch(batch) for batch in batches)}")
    if not parts:
        return ""
    how = (
        f"The first and the last that were recorded; {FILE_NAME} holds all of them. Of each prompt the best and the "
        "worst are recorded, cut in their middle where they are long; control characters are written as escapes."
    )
    return f'{"".join(parts)}<p class="how">{how}</p>'
