"""The process of an engine that a rank starts: runs vLLM's engine for the rank at the other end of a socket pair.

    python -m megatron_rl.rollout.vllm.process_main FD PARENT_PID    # started by process_replica.py alone

FD is the socket. The first message holds the engine's arguments. Then requests and control messages
arrive at any time, and completions are sent as they are done. During a weight update, and between
pause and resume, the engine makes no steps. The process ends when its rank ends, for any reason.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import sys
import threading
import time
import traceback

import numpy as np

from megatron_rl.distributed import frames
from megatron_rl.distributed.child_process import end_with_parent
from megatron_rl.rollout.vllm import routed_experts
from megatron_rl.rollout.vllm.partial_tokens import PartialTokens

PROGRESS_S = 1.0  # seconds between two messages of progress


class EngineProcess:
    """Runs vLLM's LLMEngine for one rank."""

    def __init__(self, connection: socket.socket, arguments: dict) -> None:
        from vllm import EngineArgs, LLMEngine

        from megatron_rl.rollout.vllm.without_torchvision import register_text_models

        register_text_models(arguments["model"])
        self.connection = connection
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.partial = PartialTokens(self.engine, lambda *message: frames.send(self.connection, *message))
        wanted = (arguments.get("speculative_config") or {}).get("method")
        if wanted == "custom_class":
            self._ask("attach_drafter")
        elif wanted is not None and (method := self.engine.vllm_config.speculative_config.method) != wanted:
            raise RuntimeError(f"vLLM drafts by method={method} where rollout.speculation={wanted} was wanted")
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.lora = None
        if arguments.get("enable_lora"):
            from megatron_rl.rollout.weight_sync.adapter import policy_request

            self.lora = policy_request()
        self.updating = self.paused = False
        self.told_at = -math.inf

    @property
    def works(self) -> bool:
        return self.engine.has_unfinished_requests() and not (self.updating or self.paused)

    def run(self) -> None:
        import vllm

        frames.send(self.connection, {"kind": "ready", "vllm_version": vllm.__version__, **self._ask("describe")})
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            while not (self.works and self.inbox.empty()):
                if not self._handle(self.inbox.get()):
                    return
            for output in self.engine.step():
                if output.finished:
                    self._send_output(output)
            self.partial.tell()
            self._tell_progress()

    def _tell_progress(self) -> None:
        """Send the rank a message of progress with the engine's load.

        It is sent after the first step of an idle engine, every PROGRESS_S while the engine works, and
        after the last step. So a short call shows its load, and a long response is not mistaken for an
        engine that hangs.
        """
        is_idle = not self.engine.has_unfinished_requests()
        now = time.monotonic()
        if is_idle or now - self.told_at >= PROGRESS_S:
            self.told_at = -math.inf if is_idle else now
            frames.send(self.connection, {"kind": "progress", **self._load()})

    def _load(self) -> dict[str, float]:
        """Return {"running": samples, "waiting": samples, "kv_cache_usage": used fraction of the KV cache}.

        The numbers come from the scheduler (vLLM 0.32.0, v1/core/sched/scheduler.py).

        vLLM's own statistics are off (``disable_log_stats``), since they would time every request.
        """
        scheduler = self.engine.engine_core.engine_core.scheduler
        running, waiting = scheduler.get_request_counts()
        return {"running": running, "waiting": waiting, "kv_cache_usage": float(scheduler.get_kv_cache_usage())}

    def _read(self) -> None:
        """Put the rank's messages in ``inbox``. After the last message put None, which ends the process.

        The messages end if the rank is gone, a message breaks off, or memory runs out.
        """
        try:
            while True:
                self.inbox.put(frames.receive(self.connection))
        except frames.Closed:
            return
        finally:
            self.inbox.put(None)

    def _handle(self, message: tuple[dict, dict] | None) -> bool:
        """Handle one message of the rank; return False if the process is to end.

        message: (header, arrays); None if the rank is gone.
        """
        if message is None:
            return False
        header, arrays = message
        match header["kind"]:
            case "generate":
                self._add(header, arrays["token_ids"])
            case "abort":
                self.engine.abort_request([header["request_id"]])
                self.partial.forget(header["request_id"])
            case "end_sample":
                if (output := self.partial.end(header["request_id"], header["sample"])) is not None:
                    self._send_output(output)
            case "control":
                self._control(header)
            case "close":
                return False
        return True

    def _add(self, header: dict, token_ids: np.ndarray) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        try:
            sampling = SamplingParams(**header["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"prompt_token_ids": token_ids.tolist()}
            self.engine.add_request(header["request_id"], prompt, sampling, lora_request=self.lora)
            if every := header.get("look_every_tokens"):
                self.partial.watch(header["request_id"], every)
        except (ValueError, TypeError) as error:
            frames.send(self.connection, {"kind": "refused", "request_id": header["request_id"], "error": str(error)})

    def _send_output(self, output) -> None:
        """Send all samples of a request in one message.

        Tokens and log-probs of all samples are concatenated. ``lengths`` [samples, 2] holds each
        sample's number of tokens and number of log-probs.
        """
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        token_ids = [np.asarray(sample.token_ids, dtype=np.int64) for sample in samples]
        logprobs = [_sampled_logprobs(sample) for sample in samples]
        arrays = {
            "lengths": np.array(
                [[len(x), len(y)] for x, y in zip(token_ids, logprobs, strict=True)], dtype=np.int64
            ).reshape(-1, 2),
            "token_ids": np.concatenate([*token_ids, np.empty(0, dtype=np.int64)]),
            "logprobs": np.concatenate([*logprobs, np.empty(0, dtype=np.float32)]),
            **routed_experts.frame_of(samples),
        }
        if output.prompt_logprobs is not None:
            arrays["prompt_logprobs"] = _prompt_logprobs(output)
        versions = [
            [[span.version, span.end - span.start] for span in sample.weight_versions or []] for sample in samples
        ]
        decided = self.partial.forget(output.request_id)
        reasons = ["decided" if sample.index in decided else sample.finish_reason for sample in samples]
        header = {"reasons": reasons, "weight_versions": versions}
        header["cached_tokens"] = output.num_cached_tokens or 0
        if samples and samples[0].spec_decode_metrics is not None:
            header["drafts"] = [_drafts(sample.spec_decode_metrics) for sample in samples]
        frames.send(self.connection, {"kind": "output", "request_id": output.request_id, **header}, arrays)

    def _control(self, header: dict) -> None:
        try:
            answer = self._do(header["method"], header["arguments"])
        except Exception as error:  # noqa: BLE001 (the rank raises it, with its text)
            frames.send(
                self.connection, {"kind": "failed", "id": header["id"], "error": f"{type(error).__name__}: {error}"}
            )
            if header["method"] in ("update_weights", "finish_weight_update"):
                self.updating = False
        else:
            frames.send(self.connection, {"kind": "answer", "id": header["id"], "answer": answer})

    def _do(self, method: str, arguments: dict) -> object:
        engine = self.engine
        match method:
            case "init_weight_transfer":
                engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": arguments})
            case "start_weight_update":
                self.updating = True
                engine.collective_rpc("start_weight_update")
            case "update_weights":
                engine.collective_rpc("update_weights", kwargs={"update_info": arguments})
            case "finish_weight_update":
                engine.collective_rpc("finish_weight_update")
                engine.set_weight_version(arguments["weight_version"])
                self.updating = False
            case "reset_prefix_cache":
                # Running requests begin again, with their tokens so far as the prompt. A step that is under
                # way on the device (asynchronous scheduling) is lost with its tokens
                # (v1/core/sched/scheduler.py, 0.32.0).
                if not engine.reset_prefix_cache(reset_running_requests=arguments.get("running", False)):
                    raise RuntimeError("the prefix cache could not be reset: requests are still under way")
            case "weights_received" | "abandon_weight_update" | "use_adapter":
                return engine.collective_rpc(method)
            case "load_history":
                engine.collective_rpc("load_history", kwargs=arguments)
            case "pause":
                self.paused = True
            case "resume":
                self.paused = False
            case "sleep":
                engine.sleep(level=arguments["level"])
            case "wake":
                engine.wake_up(arguments["tags"])
            case other:
                raise ValueError(f"an engine has no control message {other!r}")
        return None

    def _ask(self, method: str) -> dict:
        return self.engine.collective_rpc(method)[0]


def _sampled_logprobs(sample) -> np.ndarray:
    """Return the log-prob of each sampled token of a vLLM sample, float32 [tokens]; empty if vLLM returned none."""
    return np.array([] if sample.logprobs is None else sample.logprobs.logprobs, dtype=np.float32)


def _drafts(metrics) -> list[int]:
    """Return [drafted tokens, accepted tokens] of a sample, from its ``RequestSpecDecodeMetrics``."""
    return [metrics.num_draft_tokens, sum(accepted * steps for accepted, steps in enumerate(metrics.histogram))]


def _prompt_logprobs(output) -> np.ndarray:
    """Return the log-prob of each prompt token, float32 [prompt tokens], NaN for the first."""
    logprobs = [
        np.nan if place is None or not len(place) else place[token].logprob
        for token, place in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]
    return np.array(logprobs, dtype=np.float32)


def main(arguments: list[str]) -> int:
    descriptor, parent = int(arguments[0]), int(arguments[1])
    end_with_parent(parent)
    connection = socket.socket(fileno=descriptor)
    setup, _ = frames.receive(connection)
    try:
        EngineProcess(connection, setup["engine"]).run()
    except Exception as error:  # noqa: BLE001 (told to the rank, and the process ends)
        traceback.print_exc()
        try:
            frames.send(connection, {"kind": "dead", "error": f"{type(error).__name__}: {error}"})
        except OSError:
            print("the rank is gone too", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # when out of memory, even reporting the error can fail
        # Exit at once, since vLLM's own teardown may wait. Workers of tensor parallelism end with this process.
        os._exit(code)
