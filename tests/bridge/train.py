"""Runs ``python -m megatron_rl.train`` where Megatron-Bridge can be imported on a CPU (tests/bridge/engine.py)."""

import tests.bridge.engine  # noqa: F401  # isort: skip

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron_rl.train", run_name="__main__", alter_sys=True)
