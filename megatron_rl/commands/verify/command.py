"""Compare your config's parallel topology with one process, on a thin copy of your model, within a tolerance.

    megatron-rl verify --nproc 4 --config my.yaml parallel.tensor=2 parallel.pipeline=2

The thin copy has fewer layers and less width. The command compares log-probs, the gradient by class
of tensors, the gradient norm, and the weights after three AdamW steps. It also compares a step that
drops samples without signal (skip) with a step that drops none (dense). If values differ, it names
the layer and the tensor at which the first difference appears. The exit code of each rank is 0 if
all agree, 1 if something differs or a rank fails, and 2 for settings that cannot work.
docs/verify-topology.md says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import time
import traceback
from typing import NoReturn

TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2}
GRACE_S = 3.0  # torchrun ends every rank as soon as one has ended: the main rank's message must be printed before
FAULT_NAMES = ("tp_all_reduce", "microbatch_mean", "context_offset", "other_plan")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl verify",
        description=__doc__.split("\n")[0],
        epilog="example: megatron-rl verify --nproc 2 --config my.yaml parallel.tensor=2 --json topology.json",
    )
    parser.add_argument(
        "--config", help="your YAML; its model.hf_path names the model, of which only config.json is read"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--layers-per-stage", type=int, default=1, metavar="N", help="decoder layers of each pipeline stage (default 1)"
    )
    parser.add_argument(
        "--keep",
        default="",
        metavar="LIST",
        help="real sizes to keep, comma-separated: hidden, ffn, vocabulary, experts; or all (default: none)",
    )
    parser.add_argument(
        "--dtype", choices=tuple(TOLERANCES), default="float32", help="of model and reference (default float32)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative error (default 1e-5 in float32, 5e-2 in bfloat16)",
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="also write everything there, each tensor's error too"
    )
    parser.add_argument(
        "--inject",
        choices=FAULT_NAMES,
        metavar="FAULT",
        help=f"plant a fault, to see it named: {', '.join(FAULT_NAMES)}",
    )
    parser.add_argument(
        "--inject-layer",
        type=int,
        metavar="K",
        help="tp_all_reduce's layer, as in model.layers.K (default: the middle)",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.layers_per_stage < 1:
        parser.error(f"--layers-per-stage {options.layers_per_stage} must be at least 1")
    if options.tolerance is not None and not options.tolerance > 0:
        parser.error(f"--tolerance {options.tolerance} must be above 0")
    if options.inject_layer is not None and options.inject != "tp_all_reduce":
        parser.error(f"--inject-layer {options.inject_layer} belongs to --inject tp_all_reduce")
    options.tolerance = options.tolerance or TOLERANCES[options.dtype]
    return options


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thin:
    """Holds the configurations and samples of the comparison; all ranks make equal ones from the command line.

    The thin model is the user's model with fewer layers and less width.

    config: the user's Config, changed for the thin model.
    real, hf_config: the Hugging Face configs of the user's model and of the thin model.
    work: the synthetic samples, a Work (thin.py).
    world: the number of ranks.
    """

    config: object
    real: object
    hf_config: object
    work: object
    world: int

    def topology_facts(self) -> dict[str, object]:
        """Return the parallelism and other settings of the run compared with one process, as JSON-able values."""
        from megatron_rl.commands.verify.report import layout

        parallel, megatron = self.config.parallel, self.config.megatron
        return {
            "parallel": dataclasses.asdict(parallel),
            "world_size": self.world,
            "layout": layout(parallel, self.world),
            "megatron": {"ddp": dict(megatron.ddp), "transformer": dict(megatron.transformer)},
            "optimizer_distributed": self.config.optimizer.distributed,
            "dtype": self.config.model.dtype,
        }


def prepare(options: argparse.Namespace) -> Thin:
    """Return the thin model's configurations and the synthetic samples.

    The thin model is the user's model with fewer layers and less width. No process group exists
    yet. Raises ConfigError, on every rank alike, if an option or a setting cannot work.
    """
    from megatron_rl import hub
    from megatron_rl.algorithm.signal import signal_rule
    from megatron_rl.commands.verify.thin import (
        KEEP,
        Size,
        make_work,
        thin_hf_config,
        thin_layout,
        user_config,
    )
    from megatron_rl.config import load_config
    from megatron_rl.errors import ConfigError
    from megatron_rl.model.settings import ModelSettings
    from megatron_rl.weights.config_json import read_hf_config

    # Check the options and the configuration, then make the thin model and its work.
    keep = KEEP if options.keep == "all" else tuple(x for x in options.keep.split(",") if x)
    unknown = [x for x in keep if x not in KEEP]
    if unknown:
        raise ConfigError(f"--keep {options.keep} names {unknown[0]!r}; choose from {', '.join(KEEP)}, or all")
    config = hub.fetched(load_config(options.config, options.overrides), weights=False, pins=False)
    signal_rule(config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    real = read_hf_config(config.model.hf_path)
    settings = ModelSettings.of(config)
    hf_config = thin_hf_config(real, settings, Size(layers_per_stage=options.layers_per_stage, keep=keep))
    vocab_size, context_tokens = hf_config.vocab_size, hf_config.max_position_embeddings
    work = make_work(config.parallel, vocab_size, context_tokens, world=world, seed=config.run.seed)
    layout = thin_layout(real, settings, options.layers_per_stage)
    thin_config = user_config(config, options.dtype, work, world, layout)
    return Thin(config=thin_config, real=real, hf_config=hf_config, work=work, world=world)


def measure(options: argparse.Namespace, thin: Thin) -> tuple[object, object]:
    """Return (measurements of the topology, measurements of one process), each a Measured.

    First the main rank runs alone, as the one process. Then all ranks together run the topology. On
    ranks other than the main rank, the second element is None.
    """
    import torch
    import torch.distributed as dist

    from megatron_rl.algorithm.signal import coupling_terms
    from megatron_rl.backend import MegatronBackend
    from megatron_rl.commands.verify.faults import Fault
    from megatron_rl.commands.verify.measure import (
        NUM_STEPS,
        add_steps,
        measure_reference,
        measure_topology,
        open_bench,
    )
    from megatron_rl.commands.verify.thin import reference_config, thin_weights, whole_gradients
    from megatron_rl.distributed import topology
    from megatron_rl.distributed.platform import HOST
    from megatron_rl.distributed.watchdog import open_watchdog

    if HOST.is_cuda:
        torch.cuda.set_device(HOST.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    # The main rank measures the reference alone, before it joins the others.
    weights = thin_weights(thin.hf_config, thin.config.run.seed)
    reference, work = None, thin.work
    if int(os.environ.get("RANK", "0")) == 0:
        reference, work = measure_reference(reference_config(thin.config), thin.hf_config, weights, thin.work)
    # All ranks measure the topology, with the fault planted if one is asked for.
    layer = thin.hf_config.num_hidden_layers // 2 if options.inject_layer is None else options.inject_layer
    fault = Fault(name=options.inject, layer=layer) if options.inject else None
    skips = not coupling_terms(thin.config)
    deadline_s = thin.config.run.deadline_s
    fields = {"hf_config": thin.hf_config, "weights": weights, "total_steps": NUM_STEPS}
    backend_of = functools.partial(MegatronBackend, **fields)
    optimizer, megatron = whole_gradients(thin.config.optimizer, thin.config.megatron)
    whole = dataclasses.replace(thin.config, optimizer=optimizer, megatron=megatron)
    ranks = topology.initialize(thin.config.parallel, deadline_s=deadline_s)
    with open_watchdog(ranks, deadline_s) as watch:
        topology.destroy()  # Megatron's groups: each bench makes its own over the same world
        work = share_logprobs(thin.work, work)
        with open_bench(backend_of(whole), work, fault) as bench:
            measured = measure_topology(bench, watch, skips=skips)
        with open_bench(backend_of(thin.config), work, fault) as bench:
            measured = add_steps(measured, bench, watch)
    dist.barrier()
    return measured, reference


def share_logprobs(bare, main_work):
    """Return a copy of ``bare`` whose samples have the main rank's log-probs, equal to the bit on all ranks.

    A collective.

    bare: the synthetic samples, a Work (thin.py), equal on every rank.
    main_work: on the main rank, the Work whose log-probs are sent. The other ranks pass one of equal
        size, whose log-probs are ignored.
    """
    import numpy as np
    import torch
    import torch.distributed as dist

    from megatron_rl.distributed.platform import HOST

    flat = torch.from_numpy(np.concatenate([s.logprobs for s in main_work.samples])).to(HOST.device)
    dist.broadcast(flat, 0)
    return bare.with_logprobs(flat.cpu().numpy())


def report(options: argparse.Namespace, thin: Thin, measured, reference) -> bool:
    """Compare the measurements, print the result, and write the file of ``--json``; return whether all checks pass.

    measured, reference: the Measured of the topology and of one process, on the main rank.
    """
    from megatron_rl.algorithm.signal import coupling_terms
    from megatron_rl.commands.verify.report import (
        layout,
        machine,
        model_line,
        show,
        verdict_line,
        write_json,
    )
    from megatron_rl.commands.verify.verdict import judge

    # Judge the measurements.
    parallel, facts = thin.config.parallel, measured.facts
    microbatches = max(facts["microbatches"])
    counts = {
        "micro-batches": microbatches,
        "data-parallel replicas": len(measured.traces),
        "tensor ranks": parallel.tensor,
        "context ranks": parallel.context,
        "expert ranks": parallel.expert,
        "pipeline stages": parallel.pipeline,
        "processes": thin.world,
    }
    terms = ", ".join(coupling_terms(thin.config))
    verdict = judge(
        measured,
        reference,
        options.tolerance,
        counts=counts,
        no_skip=f"{terms} makes skip another objective than dense",
    )
    # Print the table, and write the JSON if asked.
    host = machine()
    machine_line = f"{host['backend']}, {host['device']}"
    header = [
        f"{layout(parallel, thin.world)} against one process; {options.dtype}, {facts['layer_spec']} layers, "
        f"{machine_line}",
        model_line(thin.real, thin.hf_config),
        f"{len(thin.work.samples)} samples, two groups of three without advantage; micro-batches per replica "
        f"{facts['microbatches']}",
        *([f"planted: {options.inject}"] if options.inject else []),
    ]
    show(verdict, header, options.tolerance)
    if options.json:
        common = {
            "topology": thin.topology_facts(),
            "machine": host,
            "model": model_line(thin.real, thin.hf_config),
            "injected": options.inject,
            "measured": {name: value for name, value in facts.items() if name != "holders"},
        }
        write_json(options.json, common, verdict, options.tolerance, verdict_line(verdict, options.tolerance))
    return verdict.passed


def run(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from megatron_rl.cli import EXIT_CONFIG, EXIT_FAILED
    from megatron_rl.distributed.collectives import gather_json
    from megatron_rl.distributed.lost_rank import losses_named
    from megatron_rl.errors import ConfigError, LockstepError, NonFiniteGradient, PeerError

    is_main = os.environ.get("RANK", "0") == "0"
    try:
        thin = prepare(options)
        with losses_named():
            measured, reference = measure(options, thin)
            all_pass = gather_json(report(options, thin, measured, reference) if is_main else None)[0]
        dist.destroy_process_group()
        return 0 if all_pass else EXIT_FAILED
    except (ConfigError, FileNotFoundError) as error:
        if not is_main:
            time.sleep(GRACE_S)
        else:
            print(f"megatron_rl: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    except (LockstepError, NonFiniteGradient, PeerError) as error:
        failure = f"FAILED, {type(error).__name__}: {error}"
        print(f"verdict: {failure}", file=sys.stderr, flush=True)
        if is_main and options.json:
            from megatron_rl.commands.verify.report import machine, write_json

            common = {
                "topology": thin.topology_facts(),
                "machine": machine(),
                "injected": options.inject,
            }
            write_json(options.json, common, None, options.tolerance, failure)
        if isinstance(error, LockstepError):
            dist.barrier()  # every rank raised it, and all must print it before one exits
        elif not is_main:
            time.sleep(GRACE_S)
        return EXIT_FAILED


def main() -> NoReturn:
    """Run the comparison, and end the process at once by ``os._exit``, even on success.

    A normal exit may lose the exit code. Reference cycles in the models keep gloo's process groups
    alive, and gloo's threads may abort while the interpreter shuts down.
    """
    from megatron_rl.cli import EXIT_FAILED, set_up_logging

    options = parse(None)
    set_up_logging(is_main=os.environ.get("RANK", "0") == "0")
    try:
        code = run(options)
    except Exception:  # noqa: BLE001 (the traceback is printed, and the process ends)
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
