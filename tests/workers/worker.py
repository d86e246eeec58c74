"""One process of the pool, forked from a nursery: it runs each task in a fresh gloo world, by pool.py's protocol."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def exit_with_parent() -> None:
    """End this process when the pool's is gone: that ends stdin, a pipe which the pool holds and never writes to."""
    while os.read(0, 1):
        continue
    os._exit(0)


def find_function(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def leave_every_group() -> None:
    """Destroy all process groups and drop Megatron's references to them.

    ``destroy_model_parallel`` alone frees none (megatron-core 0.16.1: +84 file descriptors, +51 threads each time).
    Destroying WORLD takes every group off torch's register; it comes second, as Megatron looks its own up there.
    """
    if not dist.is_initialized():
        return
    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    dist.destroy_process_group()
    # models hold groups in reference cycles (hooks); sockets and threads close when the last reference goes
    gc.collect()


def run_task(payload: bytes, rank: int, store: dist.Store) -> tuple[str, ...]:
    """Run one task; return ("returned", pickled result) or ("raised", "Type: message", traceback)."""
    try:
        number, world, module, qualname, args, kwargs, timeout_s = pickle.loads(payload)
        bound, own = datetime.timedelta(seconds=timeout_s), dist.PrefixStore(f"task{number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=bound)
        return "returned", pickle.dumps(find_function(module, qualname)(rank, world, *args, **kwargs))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (reported to the test, which raises it)
        return "raised", traceback.format_exception_only(error)[-1].strip(), traceback.format_exc()


def serve(pipe_fd: int, store_port: int, rank: int) -> None:
    """Run tasks until the pool closes the pipe."""
    os.set_inheritable(pipe_fd, False)
    pipe = Connection(pipe_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the pool asks where a rank hangs before it kills it
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    pipe.send_bytes(pickle.dumps(("ready",)))

    with contextlib.suppress(EOFError):
        while True:
            search_path, payload = pickle.loads(pipe.recv_bytes())
            sys.path.extend(folder for folder in search_path if folder not in sys.path)
            pipe.send_bytes(pickle.dumps(run_task(payload, rank, store)))
            pipe.recv_bytes()  # "leave": every rank has reported, so nobody still needs this rank's sockets
            leave_every_group()
            pipe.send_bytes(pickle.dumps(("idle",)))
