"""A stand-in for a vLLM server in the tests of the supervisor: two processes and a /health.

``python -m tests.unit.rollout.stand_in_server --host H --port P ...`` runs it. Its environment variables are:

STAND_IN_FOLDER   the folder where each start leaves a file, PORT-N.json: process ids, arguments, environment
STAND_IN_DIES     "at once": it ends with exit code 3. "never healthy": it has no /health.
                  "stubborn": it ignores SIGTERM.

A file PID.sick in the folder makes /health answer 503.
"""

import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        sick = pathlib.Path(os.environ["STAND_IN_FOLDER"]) / f"{os.getpid()}.sick"
        self.send_response(503 if sick.exists() else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_) -> None:
        """Write nothing."""


def main(arguments: list[str]) -> int:
    port = int(arguments[arguments.index("--port") + 1])
    how = os.environ.get("STAND_IN_DIES", "")
    if how == "at once":
        print(f"stand-in server of port {port}: no memory left", flush=True)
        return 3
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port if how != "never healthy" else 0), Healthy)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    engine = subprocess.Popen([sys.executable, "-S", "-E", "-c", sleeper])
    folder = pathlib.Path(os.environ["STAND_IN_FOLDER"])
    said = {"pids": [os.getpid(), engine.pid], "arguments": arguments, "environment": dict(os.environ)}
    draft = folder / f"{os.getpid()}.draft"
    draft.write_text(json.dumps(said))
    draft.rename(folder / f"{port}-{len(list(folder.glob(f'{port}-*.json')))}.json")
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
