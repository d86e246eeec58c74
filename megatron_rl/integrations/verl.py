"""The registration of the zero-advantage skip with verl, which loads this module by the entry point ``verl.plugins``.

Importing this module puts ``SkippingEngine`` (verl_engine.py) before verl's own Megatron engine,
for language models on NVIDIA devices and an unchanged ``actor.strategy=megatron``. verl looks up
(device, vendor) before the device alone (0.9.1, workers/engine/base.py). So a registration for
"nvidia" precedes verl's own and removes nothing.

verl imports its engines late, in the workers that train. A plug-in that imported them here would
bring Megatron-Core into every process that imports verl. So the engine registers itself right after
verl's own module has been imported. verl swallows a plug-in's errors while it loads it; an error at
that later place ends the import, and is seen.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
from types import ModuleType

ENGINE_MODULE = "verl.workers.engine.megatron.transformer_impl"
TRIED_VERSION = "0.9.1"

logger = logging.getLogger(__name__)


def register_engine() -> bool:
    """Register ``SkippingEngine``; return whether it is now verl's choice. If it is not, a warning gives the reason."""
    version = importlib.metadata.version("verl")
    if version != TRIED_VERSION:
        logger.warning(
            "megatron_rl's zero-advantage skip is OFF: it was written for verl %s and this is %s, whose engine may "
            "differ; install verl==%s to have it",
            TRIED_VERSION,
            version,
            TRIED_VERSION,
        )
        return False
    from verl.workers.engine.base import EngineRegistry

    from megatron_rl.integrations.verl_engine import SkippingEngine

    place = EngineRegistry._engines["language_model"]["megatron"]
    engine = place.get(("cuda", "nvidia"))
    if engine is SkippingEngine:
        return True
    if engine is not None:
        logger.warning(
            "megatron_rl's zero-advantage skip is OFF: %s is registered for (cuda, nvidia) already; choose one plug-in "
            "by VERL_USE_EXTERNAL_PLUGINS=<name>",
            engine.__name__,
        )
        return False
    EngineRegistry.register("language_model", "megatron", device="cuda", vendor="nvidia")(SkippingEngine)
    return True


class _RegisterAfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds verl's engine module once, imports it unchanged, and registers ours."""

    def find_spec(self, fullname, path, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname != ENGINE_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        register_engine()


if ENGINE_MODULE in sys.modules:
    register_engine()
else:
    sys.meta_path.insert(0, _RegisterAfterImport())
