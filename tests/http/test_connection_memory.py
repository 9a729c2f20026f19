"""What remains of requests and connections that have ended: nothing that waits for the garbage collector."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ports import reserved_port

pytestmark = pytest.mark.slow

# Runs a server, sends it the same request many times while its garbage collector is off, and prints for each kind of
# request how many objects of them only the collector would find.
SERVER = """
import gc, http.client, json, os, signal, sys, threading, time
from frontend.server import run
from lmi_server.configuration.server_settings import resolve_server
from lmi_server.serving.models.model_store import ModelSource

directory, port, kinds = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])

def send(path, body, ends):
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

def left(kind):
    send(*kind)
    time.sleep(0.5)
    gc.collect()
    for _ in range(20):
        send(*kind)
    time.sleep(0.5)
    return gc.collect()

def check():
    while not ready():
        time.sleep(0.1)
    gc.disable()
    print(json.dumps({name: left(kind) for name, kind in kinds.items()}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=check, daemon=True).start()
settings, _ = resolve_server({}, {"port": port, "log_level": "warning"})
sys.exit(run([ModelSource(directory, "echo")], settings, {}))
"""
ECHO = '{"inputs": "a b c", "parameters": {"max_new_tokens": 3}}'
STREAM = '{"inputs": "a b c", "parameters": {"max_new_tokens": 3}, "stream": true}'
ENDLESS = '{"inputs": "a b c", "parameters": {"max_new_tokens": 1000000}, "stream": true}'


KINDS = {
    "whole": ("/invocations", ECHO, "answered"),
    "stream": ("/invocations", STREAM, "answered"),
    "bad body": ("/invocations", "{", "answered"),
    "no such model": ("/predictions/none", ECHO, "answered"),
    "client gone": ("/invocations", ENDLESS, "early"),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return how many objects of 20 requests are left, for each of KINDS."""
    directory = tmp_path_factory.mktemp("echo")
    (directory / "serving.properties").write_text("option.entryPoint=djl_python.echo\n")
    with reserved_port() as port:
        command = [sys.executable, "-c", SERVER, str(directory), str(port), json.dumps(KINDS)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_request_waits_for_the_garbage_collector(left: dict[str, int], kind: str) -> None:
    # The server itself may leave something now and then.
    assert left[kind] < 20, "each of the 20 requests left something"
