"""`megatron-rl watch`: what the page shows is what the run wrote, while it runs and afterwards, in a real browser."""

import contextlib
import gzip
import http.client
import json
import os
import pathlib
import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_rl.distributed.run_lock import machine, started_ticks
from megatron_rl.errors import ConfigError
from megatron_rl.observability import saved_rollouts
from megatron_rl.observability.completions import Completion, to_row
from megatron_rl.observability.saved_rollouts import sample_row, write_rollout
from megatron_rl.watch.run_folder import RunFolder
from megatron_rl.watch.server import WatchServer
from tests.browser import find_browser, open_page
from tests.patience import HANG_S, patient, until

BROWSER = pytest.mark.skipif(find_browser() is None,
                             reason="no Chromium or Chrome on PATH; make test-browser installs Debian's and runs this")
HOSTILE = "<img src=x onerror=\"document.title='taken over'\">\u202e"
TOKENS = {"1": "ja", "2": "\xe2\x82", "3": "\xac", "4": HOSTILE.encode().decode("latin-1"), "0": "<end>"}


def row(step: int, reward: float) -> str:
    return json.dumps({"step": step, "rollout": step, "step_kind": "REAL", "reward/mean": reward}) + "\n"


def sample(number: int, ids: list[int], advantage: float, reward: float, advantages: list[float] | None = None) -> dict:
    facts = dict(rewards=[reward], finish_reason="stop", weight_version=number, excluded=None)
    return sample_row(sample=number, ids=ids, advantage=advantage, advantages=advantages, reward=reward, **facts)


def group(prompt_id: str, answer: str, *samples: dict) -> dict[str, object]:
    return {"prompt": f"prompt {prompt_id}", "prompt_id": prompt_id, "answer": answer, "samples": list(samples)}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: mine}\n")
    (folder / "metrics.jsonl").write_text(row(1, 0.25) + row(2, 0.5))
    signal = group("a", "7", sample(0, [1, 2, 3, 0], 0.5, 1.0, [0.0, 0.25, 0.5, -0.5]), sample(1, [4, 0], -0.5, 0.0))
    for rank, groups in enumerate(([signal], [group("b", "needle", sample(0, [1, 1, 1, 1, 0], 0.0, 1.0))])):
        write_rollout(folder, 1, rank, {"functions": ["score"], "tokens": TOKENS, "groups": groups})
    return folder


@pytest.fixture
def server(run: pathlib.Path) -> Iterator[WatchServer]:
    with WatchServer(RunFolder(run), 0) as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


def answer_of(server: WatchServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address, timeout=patient(HANG_S))
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_rows_come_once_and_whole(server: WatchServer, run: pathlib.Path) -> None:
    status, text = answer_of(server, "/api/metrics?offset=0")
    first = json.loads(text)
    assert status == 200 and [r["step"] for r in first["rows"]] == [1, 2] and not first["restarted"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row(3, 0.5) + row(4, 1.0)[:-5])
    second = json.loads(answer_of(server, f"/api/metrics?offset={first['offset']}")[1])
    assert [r["step"] for r in second["rows"]] == [3]  # the half line waits for its end
    (run / "metrics.jsonl").write_text(row(1, 0.25))
    third = json.loads(answer_of(server, f"/api/metrics?offset={second['offset']}")[1])
    assert third["restarted"] and [r["step"] for r in third["rows"]] == [1]


def test_a_rollout_is_that_of_all_ranks(server: WatchServer) -> None:
    status, text = answer_of(server, "/api/rollout?number=1")
    whole = json.loads(text)
    assert status == 200 and [g["prompt_id"] for g in whole["groups"]] == ["a", "b"] and whole["tokens"] == TOKENS
    assert whole["groups"][0]["samples"][0]["advantages"] == [0.0, 0.25, 0.5, -0.5]


@pytest.mark.parametrize(("path", "host", "status", "said"), [
    ("/api/rollout?number=9", None, 404, "holds no rollout 9"),
    ("/api/metrics?offset=-1", None, 422, "offset='-1' is no whole number"),
    ("/../config.yaml", None, 404, "is no part of this page"),
    ("http://[", "127.0.0.1", 400, "'http://[' is no address"),
    ("/api/run", "elsewhere.example:80", 403, "this server is http://127.0.0.1:"),
])
def test_a_question_without_an_answer_is_told_why(path, host, status, said, server: WatchServer) -> None:
    found, text = answer_of(server, path, host)
    assert found == status and said in text


def test_a_damaged_file_is_named(server: WatchServer, run: pathlib.Path, monkeypatch) -> None:
    """No byte that changed, and no file that unpacks to a hundred times its size, ends in anything but an answer."""
    file = run / "rollouts" / "rollout_1.rank1.json.gz"
    whole = file.read_bytes()
    monkeypatch.setattr(saved_rollouts, "MOST_BYTES", 1 << 20)
    for content, words in (
        *((whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :], file.name) for place in range(10, 60, 7)),
        (whole[:-9], f"{file.name} is no gzipped rollout: it was cut short"),
        (gzip.compress(b"[]"), f"{file.name} must be an object, and it is []"),
        (gzip.compress(b'{"rollout":1,"functions":[],"tokens":{},"groups":[{}]}'), "groups[0] lacks the field prompt"),
        (gzip.compress(bytes(1 << 24)), f"{file.name} unpacks to more than a rollout's 1048576 bytes"),
    ):
        file.write_bytes(content)
        status, text = answer_of(server, "/api/rollout?number=1")
        assert status == 422 and words in text, text
    file.unlink()
    os.mkfifo(file)
    assert "rank1.json.gz is no regular file" in answer_of(server, "/api/rollout?number=1")[1]
    (run / "metrics.jsonl").write_text("{]\n")
    status, text = answer_of(server, "/api/metrics")
    assert status == 422 and "metrics.jsonl" in text
    os.truncate(run / "metrics.jsonl", 0)
    os.truncate(run / "metrics.jsonl", 1 << 36)  # a hole: no line ends
    assert "has a line of more than 4194304 bytes behind byte 0" in answer_of(server, "/api/metrics?offset=0")[1]


def test_idle_connections_make_room_for_a_new_one(server: WatchServer) -> None:
    server.most_connections = 4
    others = set(threading.enumerate())
    with contextlib.ExitStack() as held:
        idle = [held.enter_context(socket.create_connection(server.server_address)) for _ in range(20)]
        assert answer_of(server, "/api/run")[0] == 200
        for connection in idle[:16]:
            connection.settimeout(patient(HANG_S))
            assert connection.recv(1) == b""
        assert until(lambda: sum("process_request" in x.name for x in {*threading.enumerate()} - others) <= 4)


def test_what_is_no_run_is_refused(tmp_path: pathlib.Path, server: WatchServer) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: neither metrics\.jsonl nor config\.yaml"):
        RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        WatchServer(server.run, server.server_address[1])


HERE = {"machine": machine(), "pid": os.getpid(), "started_ticks": started_ticks(os.getpid()), "token": "x"}
SAID = {"state": "running", "total_steps": 9, "at": 5.0}


@pytest.mark.parametrize(("status", "lock", "state"), [
    (None, None, ("unknown", None, 7.0)),
    (None, HERE, ("running", None, 8.0)),
    (SAID, HERE, ("running", 9, 8.0)),
    (SAID, HERE | {"started_ticks": 1}, ("silent", 9, 8.0)),  # killed
    (SAID, None, ("silent", 9, 7.0)),
    (SAID | {"state": "ended"}, None, ("ended", 9, 5.0)),
    (SAID | {"state": "ended"}, HERE, ("running", 9, 8.0)),  # goes on
    (SAID | {"state": "failed"}, None, ("failed", 9, 5.0)),
    (SAID | {"state": 3}, None, ("unknown", None, 7.0)),
])
def test_the_state_is_told_by_the_status_the_lock_and_the_last_row(server, run: pathlib.Path, status, lock, state):
    os.utime(run / "metrics.jsonl", (0, 7.0))
    for name, value in (("status.json", status), ("lock.json", lock)):
        if value is not None:
            (run / name).write_text(json.dumps(value))
            os.utime(run / name, (0, 8.0))
    found = json.loads(answer_of(server, "/api/run")[1])["state"]
    assert (found["name"], found["total_steps"], found["at"]) == state
    assert ("status.json: state must be" in (found["fault"] or "")) == (status == SAID | {"state": 3})


@BROWSER
def test_the_page_follows_a_run(server: WatchServer, run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    state = "document.getElementById('state').textContent"
    reward = "document.querySelector('[data-metric=\"reward/mean\"] small')?.textContent"
    with open_page(server.address, tmp_path / "profile") as page:
        page.wait_for(f"{state}.startsWith('step 2, at ')", True)
        assert page.evaluate(reward) == "0.5" and page.evaluate("document.title") == "mine"
        with (run / "metrics.jsonl").open("a") as file:
            file.write(row(3, 0.75))
        page.wait_for(f"{state}.startsWith('step 3, at ')", True)
        assert page.evaluate(reward) == "0.75"
        (run / "metrics.jsonl").write_text(row(1, 0.125))
        page.wait_for(f"{state}.startsWith('step 1, at ')", True)
        assert page.evaluate(reward) == "0.125"


def change(name: str, value: str) -> str:
    return f"{{const e = document.getElementById('{name}'); {value}; e.dispatchEvent(new Event('input')); 0}}"


def step_of(step: int, phase: str, **values: float) -> str:
    return json.dumps({"step": step, "step_kind": "REAL", "phase": phase, **values}) + "\n"


@BROWSER
def test_pairs_have_their_metrics_axes_begin_at_0_and_a_start_has_its_own_charts(server, run, tmp_path) -> None:
    """On 360 pixels nothing is wider than the page."""
    state = "document.getElementById('state').textContent"
    ticks = "[...document.querySelectorAll('{} [data-metric=\"{}\"] .tick.y')].map((t) => t.textContent)"
    first_two = "t.innerText.split('\\n').slice(0, 2).join()"
    texts = f"[...document.querySelectorAll('#tiles .tile')].map((t) => {first_two}).join()"
    values = {"train/loss": 0.5, "preference/accuracy": 0.75, "preference/chosen_logprob": -2.0, "train/lr": 0.25}
    parts = "...document.querySelectorAll('header, .tile, #tiles, .charts, .bar, figure, figcaption')"
    rows = [step_of(1, "preference", **values, **{"preference/eval_loss_before": 0.75})]
    rows += [step_of(2, "preference", **values | {"preference/chosen_logprob": -1.0, "train/loss": 0.25})]
    (run / "metrics.jsonl").write_text("".join(rows))
    (run / "status.json").write_text(json.dumps(SAID | {"state": "ended"}))
    with open_page(server.address, tmp_path / "profile") as page:
        page.wait_for(f"{state}.replace(/at .*\\d\\d:\\d\\d/, '')", "ended , step 2 of 9")
        tiles = ["Loss,0.500 → 0.250", "Pairs told apart,75 % → 75 %", "Held-out pairs, loss,0.750"]
        assert page.evaluate(texts) == ",".join([*tiles, "Learning rate,0.25", "Optimizer steps,2"])
        axes = {"train/loss": ["0", "0.8"], "preference/accuracy": ["0", "1"]}
        axes["preference/chosen_logprob"] = ["-2", "-1"]
        shown = {name: page.evaluate(ticks.format("#charts", name)) for name in axes}
        assert {name: [each[0], each[-1]] for name, each in shown.items()} == axes
        # the held-out loss, on the loss's own axis
        circles = "[...document.querySelectorAll('[data-metric=\"train/loss\"] circle')]"
        assert page.evaluate(f"{circles}.map((c) => c.getAttribute('class'))") == ["dot c1", "dot c1", "dot c2"]
        assert page.evaluate("document.getElementById('start').hidden") is True
        (run / "lock.json").write_text(json.dumps(HERE))
        with (run / "metrics.jsonl").open("a") as file:
            long = "perf/dense_equivalent_tokens_per_second"
            file.write(step_of(3, "rl", **{"reward/mean": 0.5, "train/lr": 0.125, long: 1234.5}))
        page.wait_for(state, "running: RL, step 3 of 9")
        highest = [page.evaluate(f"{ticks.format(grid, 'train/lr')}.at(-1)") for grid in ("#charts", "#start-charts")]
        assert highest == ["0.15", "0.25"]
        page.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=False)
        for tab in ("metrics", "rollouts", "config"):
            page.evaluate(f"document.getElementById('tab-{tab}').click()")
            page.wait_for(f"document.getElementById('{tab}').hidden", False)
            wide = f"[document.documentElement, {parts}].filter((e) => e.scrollWidth > e.clientWidth)"
            assert page.evaluate(f"{wide}.map((e) => e.id || e.tagName).join()") == "", tab


@BROWSER
def test_the_page_shows_rollouts_as_text(server: WatchServer, tmp_path: pathlib.Path) -> None:
    titles = "[...document.querySelectorAll('.group h2')].map((h) => h.firstChild.textContent).join()"

    with open_page(f"{server.address}#rollouts", tmp_path / "profile") as page:
        page.wait_for(titles, "a,b")
        tokens = "[...document.querySelectorAll('.group:first-child .completion')[{}].children]"
        # the euro sign is one span, at the token that completes it; the colours' signs are the advantages'
        assert page.evaluate(f"{tokens.format(0)}.map((s) => s.textContent).join('|')") == "ja|€|<end>"
        colours = f"{tokens.format(0)}.map((s) => s.style.background.match(/high|low/)?.[0] ?? 'none').join()"
        assert page.evaluate(colours) == "none,high,low"
        shown = page.evaluate(f"{tokens.format(1)}.map((s) => s.textContent).join('')")
        assert shown == HOSTILE.replace("\u202e", "\\u{202e}") + "<end>"
        assert page.evaluate("document.querySelectorAll('#groups img').length + document.title") == "0mine"
        page.evaluate(change("order", "e.value = 'length'"))
        page.wait_for(titles, "b,a")
        page.evaluate(change("search", "e.value = 'NEEDLE'"))
        page.wait_for(titles, "b")
        page.evaluate(change("search", "e.value = 'ja€'"))
        page.wait_for(titles, "a")
        page.evaluate(change("search", "e.value = ''") + change("signal", "e.checked = true"))
        page.wait_for(titles, "a")
        page.wait_for("document.getElementById('count').textContent", "1 of 2 groups")


@BROWSER
def test_a_run_without_saved_rollouts_shows_its_completions(server, run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path in (run / "rollouts").iterdir():
        path.unlink()
    texts = dict(source="train", sample="17@0#3", prompt="3+4=", response="seven", answer="7", finish_reason="length")
    earned = dict(reward=0.5, rewards={"score": 0.5}, advantage=float("inf"))
    made = Completion(response_tokens=2, weight_version=4, rollout=6, step=6, **texts, **earned)
    (run / "completions.jsonl").write_text(json.dumps(to_row(made)) + "\n")
    with open_page(f"{server.address}#rollouts", tmp_path / "profile") as page:
        page.wait_for("document.querySelector('.completion')?.textContent", "seven")
        facts = page.evaluate("document.querySelector('.facts').textContent")
        assert facts == "#3 reward 0.5 advantage – · 2 tokens · length · weights 4"
        assert page.evaluate("document.getElementById('number').selectedOptions[0].text") == "rollout 6, step 6"
