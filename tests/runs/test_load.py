"""The load of a plain GRPO run: the files that it imports, and those in which docs/architecture.md reads one step."""

import re

import pytest

from tests.load import PACKAGE, lines_of, plain_run
from tests.workers.inputs import ROOT

MOST_IMPORTED = 200
MOST_READ, MOST_LINES_READ = 24, 6300
# Features, by the files that hold them; a plain run has none of them but their sections of the configuration.
OF_FEATURES = re.compile(
    r"rollout/(endpoint|vllm|weight_sync)/|serve/|simulator/|critic/|model/(bridge|lora|invariant)/|commands/|integrations/"
    r"|(?!config/).*(distillation|preference|replay|reroll|straggler|routing|routed|delta|adapter|bitwise|teacher|gae|multi_turn|profile|adaptive|speculation|decided|early_end|retry)"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, list[str]]:
    return plain_run(tmp_path_factory.mktemp("plain"))


@pytest.mark.process
def test_a_plain_run_imports_its_own_files_alone(plain) -> None:
    imported = plain["imported"]
    assert not [name for name in imported if OF_FEATURES.match(name)]
    assert 100 < len(imported) <= MOST_IMPORTED, "\n".join(imported)


@pytest.mark.process
def test_one_step_is_read_in_the_files_that_the_page_lists(plain) -> None:
    """Each file of the list is executed by a step of a plain run, and the page says how many they are."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    reading = page.partition("## Reading one GRPO step")[2].partition("\n## ")[0]
    listed = re.findall(r"^\d+\. \[`([\w/]+\.py)`\]", reading, flags=re.MULTILINE)
    assert not set(listed) - set(plain["executed"]) and all((PACKAGE / name).is_file() for name in listed)
    lines = sum(lines_of(listed).values())
    assert len(listed) <= MOST_READ and lines <= MOST_LINES_READ
    assert f"{len(listed)} files and {round(lines, -2):,} lines" in reading, (len(listed), lines)
