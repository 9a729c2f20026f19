"""What remains of requests and connections that have ended: nothing that waits for the garbage collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ports import reserved_port

# Runs a server whose garbage collector is off, sends it the same request many times, and prints how many objects of
# them only the collector would find.
SERVER = """
import gc, http.client, os, signal, sys, threading, time
from frontend.server import run
from lmi_server.configuration.server_settings import resolve_server
from lmi_server.serving.models.model_store import ModelSource

directory, port, path, body, ends = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]

def send():
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, body, {"content-type": "application/json"})
    if ends == "early":
        time.sleep(0.05)
    else:
        connection.getresponse().read()
    connection.close()

def ready():
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except OSError:
        return False

def check():
    while not ready():
        time.sleep(0.1)
    send()
    time.sleep(0.5)
    gc.collect()
    gc.disable()
    for _ in range(20):
        send()
    time.sleep(0.5)
    print("found", gc.collect(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=check, daemon=True).start()
settings, _ = resolve_server({}, {"port": port, "log_level": "warning"})
sys.exit(run([ModelSource(directory, "echo")], settings, {}))
"""
ECHO = '{"inputs": "a b c", "parameters": {"max_new_tokens": 3}}'
STREAM = '{"inputs": "a b c", "parameters": {"max_new_tokens": 3}, "stream": true}'
ENDLESS = '{"inputs": "a b c", "parameters": {"max_new_tokens": 1000000}, "stream": true}'


@pytest.mark.parametrize(
    ("path", "body", "ends"),
    [
        ("/invocations", ECHO, "answered"),
        ("/invocations", STREAM, "answered"),
        ("/invocations", "{", "answered"),
        ("/predictions/none", ECHO, "answered"),
        ("/invocations", ENDLESS, "early"),
    ],
    ids=["whole", "stream", "bad body", "no such model", "client gone"],
)
def test_nothing_of_a_request_waits_for_the_garbage_collector(tmp_path: Path, path: str, body: str, ends: str) -> None:
    (tmp_path / "serving.properties").write_text("option.entryPoint=djl_python.echo\n")
    with reserved_port() as port:
        command = [sys.executable, "-c", SERVER, str(tmp_path), str(port), path, body, ends]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    # The server itself may leave something now and then.
    found = int(result.stdout.removeprefix("found "))
    assert found < 20, "each of the 20 requests left something"
