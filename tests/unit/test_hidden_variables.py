"""What other processes of the same user read of the server: neither its variables with secrets nor its memory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest

from lmi_server.machine.environment import SECRETS_OF_SERVER

HIDING = """
import json, os, sys
from lmi_server.processes.hidden_variables import hide_secrets
hide_secrets()
print(json.dumps({
    "pid": os.getpid(),
    "shown": open("/proc/self/environ").read().split("\\0"),
    "has": dict(os.environ),
    "arguments": sys.argv[1:],
    "files": [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2
              and os.path.islink(f"/proc/self/fd/{name}")],
}))
"""
# Another process of the user, which is not root, tries to read this one before and after.
PRIVATE = """
import ctypes, os, sys
from lmi_server.processes.hidden_variables import keep_memory_private
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
def look():
    target = os.getpid()
    child = os.fork()
    if child == 0:
        for name in ("environ", "mem", "maps", "fd"):
            path = f"/proc/{target}/{name}"
            try:
                os.listdir(path) if name == "fd" else open(path, "rb").close()
                print(name, "read")
            except PermissionError:
                print(name, "refused")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
look()
keep_memory_private()
look()
os.listdir("/proc/self/fd"), open("/proc/self/statm").read(), open("/proc/self/stat").read()
memory = os.memfd_create("a")
open(f"/proc/self/fd/{memory}", "rb").close()
"""


def hidden(**variables: str) -> tuple[int, dict[str, Any]]:
    """Return the id of a process that hides its secrets, and what it then says of itself."""
    others = {name: value for name, value in os.environ.items() if name not in SECRETS_OF_SERVER}
    command = [sys.executable, "-c", HIDING, "serve", "--port", "0"]
    with subprocess.Popen(command, env={**others, **variables}, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return process.pid, json.loads(output)


def test_secrets_are_there_and_proc_does_not_show_them() -> None:
    secrets = {name: f"planted-{name}-é\n" for name in SECRETS_OF_SERVER}
    pid, found = hidden(**secrets, HF_TOKEN="kept")
    assert found["pid"] == pid, "process 1 of a container stays process 1"
    assert not [entry for entry in found["shown"] if "planted" in entry]
    assert "HF_TOKEN=kept" in found["shown"]
    assert {name: found["has"][name] for name in SECRETS_OF_SERVER} == secrets
    assert "LMI_SERVER_SECRETS_FD" not in found["has"]
    assert found["arguments"] == ["serve", "--port", "0"]
    assert not [name for name in found["files"] if "memfd" in name]


def test_without_secrets_a_process_starts_once() -> None:
    _, found = hidden(SERVING_API_KEYS="")
    assert "SERVING_API_KEYS=" in found["shown"]


@pytest.mark.parametrize("given", ["0", "x", "99", "-1", "9" * 4000, ""])
def test_a_variable_that_names_no_file_in_memory_gives_nothing(given: str) -> None:
    _, found = hidden(LMI_SERVER_SECRETS_FD=given)
    assert found["has"].keys().isdisjoint({"LMI_SERVER_SECRETS_FD", *SECRETS_OF_SERVER})


def test_private_memory_is_refused_to_others_and_not_to_the_process_itself() -> None:
    found = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, timeout=120, check=True)
    names = ("environ", "mem", "maps", "fd")
    assert found.stdout.split("\n")[:-1] == [f"{name} read" for name in names] + [f"{name} refused" for name in names]


def test_a_parent_that_shows_a_secret_is_named() -> None:
    code = "from lmi_server.processes import hidden_variables as h; print(*h.parents_with_secrets(), sep=';')"
    shell = ["sh", "-c", f"{shlex.join([sys.executable, '-c', code])}; true"]
    variables = {**os.environ, "SERVING_SIGV4_KEYS": "a:planted"}
    found = subprocess.run(shell, env=variables, capture_output=True, text=True, timeout=120, check=True)
    assert "(sh)" in found.stdout
    assert "planted" not in found.stdout
