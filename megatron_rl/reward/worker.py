"""A reward worker: a process that calls reward functions, without torch unless a function imports it.

    python -m megatron_rl.reward.worker FD STACK_FD PARENT_PID      # started by pool.py, never by hand

FD and STACK_FD are file descriptors: of the socket to the rank, and of a file for stack traces. The
started process forks: it becomes a subreaper (distributed/subreaper.py), and its child is the
worker. The first message names the functions. Then tasks arrive one at a time, and each is
answered. Functions are called in the main thread, since math-verify's time limits use SIGALRM. The
worker itself interrupts no call. At a task's deadline the pool kills the process, since a call on a
list of samples cannot be stopped otherwise. Once the fraction STACK_AT of the deadline has passed,
the stack traces of all threads are written to STACK_FD.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Iterator

from megatron_rl.distributed.frames import Inbox, encode
from megatron_rl.distributed.subreaper import go_on_in_a_child
from megatron_rl.errors import ConfigError
from megatron_rl.reward.forms import Form
from megatron_rl.reward.function import (
    RewardFunction,
    call,
    check_signature,
    formatted_traceback,
    needed_parameters,
    resolve,
)

STACK_AT = 0.9  # share of the deadline at which stacks are written


def answer(task: dict, function: RewardFunction) -> dict:
    """Call a task's function on its samples, and return the message for the pool.

    The message holds ``id``, and the lists ``values`` and ``errors``, one element per sample. Instead
    of the lists, it holds the reason as ``error`` if the call fails, or as ``refused`` if the
    function does not take the columns.
    """
    size = len(task["completions"])
    columns = {key: [value] * size for key, value in task["columns"].items()}
    fixed = {
        "prompts": [task["prompt"]] * size,
        "completions": task["completions"],
        "completion_ids": task["completion_ids"],
    }
    try:
        check_signature(task["function"], function, list(columns))
    except ConfigError as error:
        return {"id": task["id"], "refused": str(error)}
    try:
        outcomes, error = call(function, {**columns, **fixed}, [task["messages"]] * size)
    except KeyboardInterrupt:
        error = formatted_traceback()  # raised by the function: no Ctrl-C reaches a worker
    if error is not None:
        return {"id": task["id"], "error": error}
    return {
        "id": task["id"],
        "values": [outcome.value for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def resolve_all(names: list[str], completions: str) -> dict[str, tuple[Form | None, RewardFunction]]:
    """Return {name: (form, function)}, as ``resolve`` returns them. Raises ConfigError if ``resolve`` does.

    completions: ``reward.completions``, "text" or "messages".
    """
    functions = {}
    for name in names:
        try:
            functions[name] = resolve(name, completions)
        except ConfigError as error:
            raise ConfigError(
                f"{error} (raised in a reward worker process; a function that only the rank's main process has must "
                "be named in reward.in_process)"
            ) from error
        except BaseException as error:  # a module may exit
            raise ConfigError(
                f"reward function {name!r}: importing it in a reward worker ended with {type(error).__name__}: "
                f"{error}; mend the module, or name the function in reward.in_process"
            ) from error
    return functions


def serve(messages: Iterator[dict], send: Callable[[dict], None], stacks: int) -> None:
    own_pid = os.getpid()
    setup = next(messages, None)
    if setup is None:
        return
    sys.path[:] = setup["path"]
    try:
        resolved = resolve_all(setup["functions"], setup["completions"])
    except ConfigError as error:
        send({"kind": "refused", "error": str(error)})
        return
    functions = {name: function for name, (_, function) in resolved.items()}
    needed = {name: needed_parameters(function) for name, function in functions.items()}
    forms = {name: form and form.name for name, (form, _) in resolved.items()}
    send({"kind": "ready", "pid": own_pid, "needed": needed, "forms": forms})
    for task in messages:
        os.lseek(stacks, 0, os.SEEK_SET)
        os.ftruncate(stacks, 0)
        faulthandler.dump_traceback_later(STACK_AT * setup["deadline_s"], file=stacks)
        reply = answer(task, functions[task["function"]])
        if os.getpid() != own_pid:  # the function forked, and this is the child that came back
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        send({"kind": "answer", **reply})


def received(connection: socket.socket) -> Iterator[dict]:
    """Yield the messages that arrive, until the rank closes the connection."""
    inbox = Inbox()
    while piece := connection.recv(1 << 20):
        yield from inbox.take(piece)


def main(arguments: list[str]) -> None:
    descriptor, stacks, parent = map(int, arguments)
    go_on_in_a_child(parent, (descriptor, stacks))
    for inherited in (descriptor, stacks):
        os.set_inheritable(inherited, False)
    connection = socket.socket(fileno=descriptor)
    try:
        serve(received(connection), lambda message: connection.sendall(encode(message)), stacks)
    except ConnectionError:
        return  # the rank is gone


if __name__ == "__main__":
    main(sys.argv[1:])
