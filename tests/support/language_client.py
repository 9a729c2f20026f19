"""A client of the Language Server Protocol over the standard streams of a process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TIMEOUT = 30.0  # seconds for one answer


class LanguageClient:
    """Starts `lmi-server lsp`, and speaks as an editor does."""

    def __init__(self, *, encodings: tuple[str, ...] = ("utf-16",), variables: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmi_server", "lsp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(variables or {})},
        )
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._notes: list[dict[str, Any]] = []
        self._last = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._encodings = encodings

    def __enter__(self) -> Self:
        try:
            general = {"positionEncodings": list(self._encodings)}
            self.ask("initialize", processId=None, rootUri=None, capabilities={"general": general})
            self.tell("initialized")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.ask("shutdown")
                self.tell("exit")
                assert self._process.wait(TIMEOUT) == 0
        finally:
            self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def tell(self, method: str, **parameters: Any) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": parameters})

    def ask(self, method: str, **parameters: Any) -> Any:
        """Return the result of a request; what the server tells meanwhile is kept."""
        self._last += 1
        message = {"jsonrpc": "2.0", "id": self._last, "method": method}
        self._write(message | ({"params": parameters} if parameters else {}))
        while True:
            answer = self._messages.get(timeout=TIMEOUT)
            if answer.get("id") == self._last and "method" not in answer:
                assert "error" not in answer, answer
                return answer["result"]
            self._notes.append(answer)

    def open(self, path: Path, text: str) -> str:
        """Open a document, and return its URI."""
        uri = path.as_uri()
        document = {"uri": uri, "languageId": "plaintext", "version": 1, "text": text}
        self.tell("textDocument/didOpen", textDocument=document)
        return uri

    def change(self, uri: str, version: int, *changes: dict[str, Any]) -> None:
        document = {"uri": uri, "version": version}
        self.tell("textDocument/didChange", textDocument=document, contentChanges=list(changes))

    def at(self, method: str, uri: str, line: int, character: int) -> Any:
        """Return the answer to a request about a position."""
        position = {"line": line, "character": character}
        return self.ask(f"textDocument/{method}", textDocument={"uri": uri}, position=position)

    def diagnostics(self, uri: str) -> list[dict[str, Any]]:
        """Wait for the next diagnostics of a document, and return them."""
        while True:
            note = self._notes.pop(0) if self._notes else self._messages.get(timeout=TIMEOUT)
            if note.get("method") == "textDocument/publishDiagnostics" and note["params"]["uri"] == uri:
                found: list[dict[str, Any]] = note["params"]["diagnostics"]
                return found

    def _write(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._process.stdin.flush()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while True:
            length = 0
            while (line := stream.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            if not line:
                return
            self._messages.put(json.loads(stream.read(length)))
