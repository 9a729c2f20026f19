"""A fake Hugging Face Hub: the routes of its HTTP API that downloading a snapshot of one model needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub(ThreadingHTTPServer):
    """Serves `files` as the only branch of `repo_id` and as `commit`; `requested` lists the files sent."""

    daemon_threads = True

    def __init__(self, repo_id: str, files: Mapping[str, bytes], branch: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo_id = repo_id
        self.files = files
        self.branch = branch
        self.commit = "a" * 40
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *arguments: object) -> None:
        """Keep quiet."""

    def _answer(self, with_body: bool) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        api = f"/api/models/{hub.repo_id}"
        if path in (f"{api}/revision/{hub.branch}", f"{api}/revision/{hub.commit}", api):
            siblings = [{"rfilename": name} for name in hub.files]
            found = {"id": hub.repo_id, "sha": hub.commit, "siblings": siblings}
            self._send(200, json.dumps(found).encode(), with_body)
        elif path in (f"{api}/tree/{hub.commit}", f"{api}/tree/{hub.branch}"):
            self._send(200, json.dumps([_listed(name, content) for name, content in hub.files.items()]).encode(), True)
        elif path.startswith(f"/{hub.repo_id}/resolve/"):
            self._send_file(path.split("/", 5)[5], with_body)
        else:
            code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
            self._send(404, b"{}", with_body, {"X-Error-Code": code, "X-Error-Message": "not found"})

    def _send_file(self, name: str, with_body: bool) -> None:
        content = self.server.files[name]
        if with_body:
            self.server.requested.append(name)
        self._send(200, content, with_body, {"X-Repo-Commit": self.server.commit, "ETag": f'"{_digest(content)}"'})

    def _send(self, status: int, body: bytes, with_body: bool, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _listed(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def fake_hub(repo_id: str, files: Mapping[str, bytes], branch: str = "main") -> Iterator[FakeHub]:
    hub = FakeHub(repo_id, files, branch)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
