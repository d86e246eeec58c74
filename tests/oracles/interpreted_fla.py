"""Prints the errors of fla_rule on a CPU, its kernels run by Triton's interpreter, against a loop over tokens.

    python -m tests.oracles.interpreted_fla shared-float32 alone-float16

A process of its own: Triton reads TRITON_INTERPRET where a kernel is defined. Two things need a hand. Without a driver
nothing can be timed, so that the first configuration of each kernel is taken. The loop of a kernel over chunks gives
Python's numbers, on which the kernel calls `.to`: it gets the interpreter's numbers.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import autotuner, interpreter


def take_first_configurations() -> None:
    made = autotuner.Autotuner.__init__

    def init(self, fn, arg_names, configs, *more, **options) -> None:
        made(self, fn, arg_names, configs[:1], *more, **options)

    autotuner.Autotuner.__init__ = init


def main() -> None:
    take_first_configurations()
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    import fla.ops.common.chunk_delta_h as states

    from megatron_rl.model.delta_net.fla import fla_rule
    from tests.unit.model.delta_rules import errors, layouts, recurrence, results, run_by_run

    # the kernels of this module find it among their globals
    states.range = lambda *bounds: map(interpreter._implicit_cvt, range(*map(int, bounds)))
    loop, found = run_by_run(lambda *heads: recurrence(*heads)[0]), {}
    for case in sys.argv[1:]:
        name, _, dtype = case.partition("-")
        given = layouts()[name], getattr(torch, dtype)
        found[case] = errors(results(fla_rule, *given), results(loop, *given))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
