"""Give the calculator example's tokenizer a chat template: each message's text, and the stop token behind a turn.

Example:
  python examples/calculator/prepare.py --out inputs && python examples/agent/prepare.py inputs
"""

from __future__ import annotations

import pathlib
import sys

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def main() -> int:
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1], "tokenizer").is_dir():
        print("error: name the folder that examples/calculator/prepare.py made", file=sys.stderr)
        return 1
    for folder in ("tokenizer", "model"):
        pathlib.Path(sys.argv[1], folder, "chat_template.jinja").write_text(TEMPLATE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
