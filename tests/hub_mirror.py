"""A server that speaks as much of the Hugging Face hub's API as its own client asks for models and data sets."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/?]+)(?:/([^?]*))?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?")


def commit(number: int) -> str:
    return hashlib.sha1(str(number).encode()).hexdigest()


@dataclass
class Mirror:
    """Holds repositories by kind and name: a branch's commit, and the files of each commit.

    gated: names that want a token. cut: files of which the next answer ends in the middle. asked: answers by path.
    """

    repos: dict[tuple[str, str], dict[str, dict[str, bytes]]] = field(default_factory=dict)
    heads: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    asked: Counter = field(default_factory=Counter)
    tokens: set[str] = field(default_factory=set)
    url: str = ""

    def push(self, kind: str, name: str, files: dict[str, bytes]) -> str:
        """Add a commit, to which the branch main moves; return it."""
        known = self.repos.setdefault((kind, name), {})
        known[commit(len(known))] = files
        self.heads[kind, name] = commit(len(known) - 1)
        return self.heads[kind, name]

    def downloads(self) -> Counter:
        """Return how often each file was sent."""
        found = Counter()
        for (method, path), count in self.asked.items():
            if method == "GET" and (match := _FILE.fullmatch(path)):
                found[match[4]] += count
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mirror: Mirror

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        self.given = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        mirror, path = self.mirror, urllib.parse.unquote(self.path)
        mirror.asked[self.command, path] += 1
        if token := self.headers.get("Authorization"):
            mirror.tokens.add(token)
        api, file = _API.fullmatch(path.partition("?")[0]), _FILE.fullmatch(path)
        if api is not None:
            kind, name, revision = api[1], api[2], api[4] or "main"
        elif file is not None:
            kind, name, revision = "datasets" if file[1] else "models", file[2], file[3]
        else:
            return self.fault(404, "EntryNotFound")
        if (kind, name) not in mirror.repos:
            return self.fault(401, "RepoNotFound")
        if name in mirror.gated and not token:
            return self.fault(403 if file else 401, "GatedRepo")
        sha = mirror.heads[kind, name] if revision == "main" else revision
        files = mirror.repos[kind, name].get(sha)
        if files is None:
            return self.fault(404, "RevisionNotFound")
        if file is not None:
            return self.send_file(files, file[4], sha, body=body)
        if api[3] in ("tree", "paths-info"):
            return self.send_json(self.entries(files, api[3], api[5] or ""))
        siblings = [{"rfilename": path} for path in files]
        self.send_json({"id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []})

    def entries(self, files: dict[str, bytes], what: str, under: str) -> list[dict]:
        if what == "paths-info":
            text = self.given.decode()
            wanted = json.loads(text)["paths"] if text.startswith("{") else urllib.parse.parse_qs(text)["paths"]
        else:
            recursive = "recursive=true" in self.path.lower()
            inside = [path for path in files if not under or path.startswith(f"{under}/")]
            depth = len(under.split("/")) if under else 0
            wanted = {"/".join(path.split("/")[: None if recursive else depth + 1]) for path in inside}
            wanted |= {path.rpartition("/")[0] for path in inside if "/" in path and recursive}
        found = []
        for path in sorted(wanted):
            if path in files:
                found.append({"type": "file", "path": path, "size": len(files[path]), "oid": etag(files[path])})
            elif any(one.startswith(f"{path}/") for one in files):
                found.append({"type": "directory", "path": path, "oid": "0" * 40})
        return found

    def send_file(self, files: dict[str, bytes], path: str, sha: str, *, body: bool) -> None:
        if path not in files:
            return self.fault(404, "EntryNotFound")
        content, first = files[path], 0
        if given := self.headers.get("Range"):
            first = int(re.fullmatch(r"bytes=(\d+)-\d*", given)[1])
        part = content[first:]
        self.send_response(206 if first else 200)
        for key, value in {"X-Repo-Commit": sha, "ETag": f'"{etag(content)}"', "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body and path in self.mirror.cut:
            self.mirror.cut.discard(path)
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        elif body:
            self.wfile.write(part)

    def send_json(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def fault(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def mirrored() -> Iterator[Mirror]:
    """Serve a mirror on loopback within the block."""
    mirror = Mirror()
    handler = type("Handler", (_Handler,), {"mirror": mirror})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    mirror.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
