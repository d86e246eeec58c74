"""The registration of the zero-advantage skip with verl, which loads this module by the entry point ``verl.plugins``.

Importing this module makes verl use ``SkippingEngine`` (verl_engine.py) in place of its own
Megatron engine, for language models on NVIDIA devices. The user leaves ``actor.strategy=megatron``
as it is. verl first looks for an engine of the GPU's vendor, then for one of the kind of device
(0.9.1, workers/engine/base.py). So an engine for "nvidia" is found before verl's own, which stays
registered.

verl imports its engines late, in the workers that train. A plug-in that imported them at once would
load Megatron-Core into every process that imports verl. So the engine registers itself right after
verl's engine module has been imported. An error there ends that import, and so is seen. verl hides
errors that occur while it loads a plug-in.
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
    """Register ``SkippingEngine`` with verl; return whether verl now uses it.

    If it does not, a warning in the log gives the reason.
    """
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
    """Imports verl's engine module unchanged when it is first asked for, and then registers ``SkippingEngine``."""

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
