"""Signs a manifest again after its files were changed."""

import json
import pathlib

from megatron_rl.checkpoint import folder as folder_module

ABSENT = object()


def sign_again(manifest: pathlib.Path, **changed) -> None:
    """Change a manifest as another release would have written it: with a SHA-256 of its own; ABSENT takes out."""
    content = {**json.loads(manifest.read_text()), **changed, "sha256": ABSENT}
    content = {name: value for name, value in content.items() if value is not ABSENT}
    manifest.write_text(json.dumps({**content, "sha256": folder_module._own_digest(content)}))
