"""The health check of one vLLM server while a request to it is under way: does its engine live, and does it compute?"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable

from megatron_rl.rollout.engines.replica import ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm.http import MissingRoute, NotListening, Server, ServerFailed

log = logging.getLogger(__name__)
HEALTH_S = 2.0  # seconds between two checks of a server that owes an answer
UNHEALTHY = 2  # failed checks in a row that make a server sick
ANSWER_S = 10.0  # seconds for an answer that needs no computation
# vLLM's counters of computed tokens, of prompts and responses (0.32.0, v1/metrics/loggers.py).
COUNTERS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class ServerHealth:
    """Checks a server in a thread, but only while a request to the server is under way.

    owes: called without arguments; returns whether a request is under way.
    cut: called without arguments, to end all requests to the server. It is called if the engine
        died, since the server may then hold its requests for ever. It is not called for a server
        that is only busy.
    sick: the error of a server whose engine died; "" if the engine lives.
    progressed_at: time.monotonic() when the server's token counters were last seen to move; −inf
        before.
    """

    def __init__(self, server: Server, *, owes: Callable[[], bool], cut: Callable[[], None]) -> None:
        self.server, self.owes, self.cut = server, owes, cut
        self.sick = ""
        self.progressed_at = -math.inf
        self._computed: float | None = None
        self._says_no_counters = True
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name=f"health-{self.server.url}").start()

    def close(self) -> None:
        self._closed = True

    def _watch(self) -> None:
        bad = 0
        while not self._closed:
            time.sleep(HEALTH_S)
            if not self.owes():
                continue
            try:
                self.server.call("GET", "/health", timeout_s=ANSWER_S)
                bad = 0
                self._note_progress()
            except (NotListening, ServerFailed) as error:
                bad += 1
                if bad >= UNHEALTHY:
                    self.sick = str(error)
                    self.cut()
            except (ReplicaLost, RequestRefused):  # the answer was late, or the check was cut
                bad = 0

    def _note_progress(self) -> None:
        """Read the server's token counters, and set ``progressed_at`` if they have moved.

        If the server has no counters, a warning is logged once. Then only the server's answers to
        requests count as progress.
        """
        try:
            counts = COUNTERS.findall(self.server.text("/metrics", timeout_s=ANSWER_S))
        except (MissingRoute, ServerFailed):
            counts = []
        if counts and sum(map(float, counts)) != self._computed:
            self._computed = sum(map(float, counts))
            self.progressed_at = time.monotonic()
        elif not counts and self._says_no_counters:
            self._says_no_counters = False
            log.warning(
                "%s has no token counters at /metrics (--disable-log-stats?), so a request is given up "
                "rollout.request_s after the server's last answer, even if a long response is still computed",
                self.server.url,
            )
