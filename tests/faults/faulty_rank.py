"""One rank of a run of which one rank meets a fault.

``main`` takes the fault and the guilty rank. Each rank is a fork of the nursery with RANK, WORLD_SIZE and MASTER_* in
its environment, as under torchrun but with nobody to end the others. The faults:

  raise            raises in the first training forward pass
  kill             SIGKILL in the first training forward pass
  sleep            sleeps in the first training forward pass
  reward           sleeps in its reward
  loss             sleeps in its own policy loss
  plan             makes a plan of its own
  early            SIGKILL where it would open the watch: groups are built and weights are loaded
  raise_and_stay   as raise, but the process and its sockets live on
"""

import os
import signal
import time
import traceback
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_rl import cli, train
from megatron_rl.algorithm.own_policy import PolicyTokens
from megatron_rl.backend import schedule
from megatron_rl.distributed import watchdog
from megatron_rl.distributed.watchdog_server import WatchdogServer
from megatron_rl.trainer import update
from tests.patience import until
from tests.reward_functions import parity

SLEEP_S = 36000.0  # far beyond every bound of the tests
TOLD: list[str] = []  # the stages of this rank that its watch server has told to the others, where it is rank 0


def sleeping_reward(**columns) -> list[float]:
    """Let the guilty rank sleep; the others reward as ``parity`` does."""
    if dist.get_rank() == int(os.environ["GUILTY_RANK"]):
        time.sleep(SLEEP_S)
    return parity(**columns)


def sleeping_loss(tokens: PolicyTokens) -> torch.Tensor:
    """Let the guilty rank sleep in training, and in no check of its contract."""
    trains = dist.is_initialized() and tokens.logprobs.dtype == torch.float32  # skip.mode's trial is in float64
    if trains and dist.get_rank() == int(os.environ["GUILTY_RANK"]):
        time.sleep(SLEEP_S)
    return -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages


def break_forward(fault: str) -> None:
    forward = schedule.Schedule._forward_step

    def broken(*args, **kwargs):
        if torch.is_grad_enabled():  # not a log-prob pass
            match fault:
                case "raise" | "raise_and_stay":
                    raise RuntimeError("planted")
                case "sleep":
                    time.sleep(SLEEP_S)
                case "kill":
                    until(lambda: dist.get_rank() != 0 or "update" in TOLD)
                    os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **kwargs)

    schedule.Schedule._forward_step = broken


def note_what_is_told() -> None:
    tell = WatchdogServer._tell

    def noted(self: WatchdogServer, **message) -> None:
        tell(self, **message)
        TOLD.append(message.get("stage", ""))

    WatchdogServer._tell = noted


def break_plan() -> None:
    whole = update.has_signal

    def other(*args, **kwargs):
        signal_S = whole(*args, **kwargs)
        signal_S[signal_S.argmax()] = False  # drops a sample that the others run
        return signal_S

    update.has_signal = other


def end_early() -> None:
    watchdog.gather_json = lambda value: os.kill(os.getpid(), signal.SIGKILL)


def main(fault: str, guilty: int) -> NoReturn:
    """Run ``megatron_rl.train`` by this process's arguments, with the fault where RANK is the guilty one's."""
    os.environ["GUILTY_RANK"] = str(guilty)
    note_what_is_told()
    if os.environ["RANK"] == str(guilty):
        {"plan": break_plan, "early": end_early}.get(fault, lambda: break_forward(fault))()
    try:
        code = train.main()
    except RuntimeError:
        if fault == "raise_and_stay":
            time.sleep(SLEEP_S)
        traceback.print_exc()
        code = 1
    cli.leave(code)
