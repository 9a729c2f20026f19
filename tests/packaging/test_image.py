"""docker/Dockerfile and .dockerignore name what is in the tree, and hold all that the wheel is built from."""

from __future__ import annotations

import configparser
import contextlib
import fnmatch
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from paths import ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def instructions(name: str) -> list[str]:
    """Return the arguments of each instruction of this name, continued lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in joined.splitlines() if line.startswith(name + " ")]


def stages() -> dict[str, tuple[str, list[str]]]:
    """Return of each stage what it begins with, and its instructions."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in DOCKERFILE.replace("\\\n", " ").splitlines():
        if line.startswith("FROM "):
            _, base, _, name = line.split()
            found[name] = (base, [])
        elif found and line and not line.startswith("#"):
            found[name][1].append(line)
    return found


def copied() -> list[str]:
    """Return what is copied from the tree, and not from another stage."""
    return [source for line in instructions("COPY") if "--from=" not in line for source in line.split()[:-1]]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.splitlines()


def is_ignored(path: str) -> bool:
    """Return what the last pattern says that matches the path or a folder above it, as docker does."""
    ignored = False
    for pattern in IGNORED:
        if matches(path, pattern.removeprefix("!")):
            ignored = not pattern.startswith("!")
    return ignored


def matches(path: str, pattern: str) -> bool:
    parts = PurePosixPath(path).parts
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern.removeprefix("**/")) for part in parts)
    assert "/" not in pattern, f"{pattern}: this test reads names of the root and **/names only"
    return fnmatch.fnmatchcase(parts[0], pattern)


def test_what_is_copied_is_tracked_and_not_ignored() -> None:
    files = tracked()
    for source in copied():
        below = [path for path in files if path == source or path.startswith(f"{source}/")]
        assert below, f"{source} is not in the tree"
        assert [path for path in below if is_ignored(path)] == []


def test_nothing_else_is_sent_to_the_build() -> None:
    sent = {PurePosixPath(path).parts[0] for path in tracked() if not is_ignored(path)}
    assert sent == {PurePosixPath(source).parts[0] for source in copied()}
    for path in (".venv/bin/python", "models/demo/model.safetensors", ".git/config", "handlers/__pycache__/a.pyc"):
        assert is_ignored(path), path


def test_all_that_the_wheel_is_built_from_is_copied() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    packages = [line.rstrip("*") for line in settings["options.packages.find"]["include"].split()]
    data = [value.partition("/")[0] for value in settings["options.data_files"].values()]
    licences = [path.partition("/")[0] for path in settings["metadata"]["license_files"].split()]
    files = [settings["metadata"]["long_description"].removeprefix("file: "), *licences]
    assert {*packages, *data, *files, "setup.cfg", "pyproject.toml"} <= {*copied()}


def test_dependencies_are_installed_before_the_code_is_copied() -> None:
    installed = DOCKERFILE.index("setup_environment.py image")
    assert all(installed < DOCKERFILE.index(f"COPY {package}") for package in ("lmi_server", "handlers", "frontend"))


def test_every_target_is_an_image_of_the_server_for_a_user_without_privileges() -> None:
    targets = {name: lines for name, (base, lines) in stages().items() if base == "runtime"}
    assert [*targets] == ["slim", "cuda", "tensorrt-llm", "neuronx", "cpu"], "the last is what a build makes"
    for name, lines in targets.items():
        assert lines[-1] == "USER 1000:0", name
        assert any("add_server.sh" in line for line in lines), name


def test_only_engines_that_compile_at_run_time_have_a_compiler() -> None:
    compilers = {
        name for name, (_, lines) in stages().items() if re.search(r"\b(gcc|g\+\+|build-essential)", " ".join(lines))
    }
    assert compilers == {"cpu", "cuda"}


def test_the_image_that_has_vllm_for_processors_has_what_that_is_linked_with() -> None:
    """The base image has no libnuma; without it vLLM warns, and fails when it loads a model."""
    _, lines = stages()["cpu"]
    assert any("apt-get install" in line and " libnuma1 " in line for line in lines)


def test_a_stage_declares_the_arguments_that_it_uses() -> None:
    """buildah hands an argument on to no other stage. The installation of packages reads some as variables."""
    for name, (_, lines) in stages().items():
        text = "\n".join(lines)
        used = {*re.findall(r"\$\{(\w+)\}", text)}
        if "pip" in text or "setup_environment.py" in text:
            used.add("PIP_INDEX_URL")
        if "image huggingface" in text:
            used.add("TORCH_ARGS")
        assert used <= {*re.findall(r"^ARG (\w+)", text, re.MULTILINE)}, name


def test_the_extras_of_each_image_are_those_of_the_package() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    named = {
        extra
        for line in DOCKERFILE.replace("\\\n", " ").splitlines()
        for found in re.findall(r'^ARG EXTRAS="([^"]+)"|setup_environment.py image ([\w-]+)', line)
        for extra in " ".join(found).split()
    }
    assert {"huggingface", "vllm", "vllm-cuda", "deepspeed", "mpi", "s3", "sklearn", "xgboost"} == named
    assert named <= {*settings["options.extras_require"]}


def test_signals_reach_the_server_and_an_argument_replaces_serve() -> None:
    (entry_point,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    program = json.loads(entry_point)[-1]  # a list: there is no shell between
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    scripts = settings["options.entry_points"]["console_scripts"]
    assert f"\n{program} = lmi_server.commands.container_command:main" in scripts
    assert json.loads(command) == ["serve"]


def checked(variables: dict[str, str], directory: Path) -> int:
    """Run the health check of the image; return its exit code."""
    (check,) = instructions("HEALTHCHECK")
    python, *arguments = json.loads(check[check.index("[") :])
    assert python == "python"
    path = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=os.environ | path | variables, cwd=directory, capture_output=True, check=False
    ).returncode


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (207, True), (503, False)])
def test_the_health_check_asks_the_port_of_the_server(status: int, is_healthy: bool, tmp_path: Path) -> None:
    with answering(status) as port:
        assert (checked({"SERVING_PORT": str(port)}, tmp_path) == 0) is is_healthy


@pytest.mark.slow
def test_the_health_check_reads_the_settings_as_the_server_does(tmp_path: Path) -> None:
    """SageMaker's variable wins, and a file is read."""
    home = tmp_path / "home"
    (home / "conf").mkdir(parents=True)
    with answering(200) as port:
        assert checked({"SAGEMAKER_BIND_TO_PORT": str(port), "SERVING_PORT": "1"}, tmp_path) == 0
        (home / "conf" / "config.properties").write_text(f"inference_address=http://127.0.0.1:{port}\n")
        assert checked({"MODEL_SERVER_HOME": str(home)}, tmp_path) == 0
        assert checked({"SERVING_PORT": "none"}, tmp_path) == 1


@contextlib.contextmanager
def answering(status: int) -> Iterator[int]:
    """Answer GET /ping with a status; give the port."""

    class Ping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ping" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep the standard error of the tests clean."""

    with http.server.HTTPServer(("127.0.0.1", 0), Ping) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_all_that_is_written_is_below_one_directory() -> None:
    variables = dict(pair.split("=", 1) for line in instructions("ENV") for pair in line.split())
    home = variables["HOME"]
    for name in ("XDG_CACHE_HOME", "HF_HOME", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert PurePosixPath(variables[name]).is_relative_to(home), name
