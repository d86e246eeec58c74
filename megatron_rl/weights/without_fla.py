"""Makes transformers' models of gated delta nets compute with torch where flash-linear-attention's kernels cannot."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_fla() -> Iterator[None]:
    """Hide an installed fla-core while transformers imports a model's module.

    transformers 5.19 (integrations/hub_kernels.py) takes the kernels of an installed fla-core on any
    device, once, when it imports the module. The kernels need a GPU, and round products of float32
    to TF32. So a model on a CPU, or one to compare with, is made in this context.
    """
    hidden = [name for name in sys.modules if name.partition(".")[0] == "fla"]
    modules = {name: sys.modules.pop(name) for name in hidden}
    sys.modules["fla"] = None  # type: ignore[assignment]  # an import of it raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules["fla"]
        sys.modules.update(modules)
