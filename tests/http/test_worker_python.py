"""The process of a worker as the model configures it: variables, interpreter, a virtual environment of its own."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from own_code_helpers import make_own
from server_helpers import Server, running

CODE = """
import os, sys
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    return Output().add_as_json({
        "executable": sys.executable, "prefix": sys.prefix, "path": sys.path, "handler_sees": inputs.get_properties(),
        "variables": {name: os.environ.get(name) for name in ("A", "B", "HOME_OF_TEST", "PYTHONPATH")},
    })
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    variables = {"HOME_OF_TEST": "server", "SERVING_DOWNLOAD_DIR": str(directory / "downloads")}
    with running(make_own(directory / "model", CODE), variables=variables, workers=1) as server:
        yield server


def register(server: Server, directory: Path, **options: Any) -> httpx.Response:
    """Register a model named after its directory."""
    make_own(directory, CODE, **options)
    return server.http.post("/models", params={"url": str(directory)})


def process_of(server: Server, name: str) -> dict[str, Any]:
    answer = server.http.post(f"/predictions/{name}", content=b"{}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def virtual_environment(directory: Path) -> Path:
    """Return the interpreter of an environment that holds nothing but the standard library."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return directory / "bin" / "python"


# --- option.env ---


def test_the_variables_of_a_model_are_those_of_its_workers(server: Server, tmp_path: Path) -> None:
    assert register(server, tmp_path / "variables", env="A=1,B=x=y,HOME_OF_TEST=model").status_code == 200
    found = process_of(server, "variables")
    inherited = process_of(server, "model")["variables"]["PYTHONPATH"].rpartition(os.pathsep)[0]
    path = os.pathsep.join([inherited, str(tmp_path / "variables")])
    assert found["variables"] == {"A": "1", "B": "x=y", "HOME_OF_TEST": "model", "PYTHONPATH": path}
    assert "env" not in found["handler_sees"]
    assert process_of(server, "model")["variables"]["HOME_OF_TEST"] == "server"


def test_the_server_itself_sets_the_devices(server: Server, tmp_path: Path) -> None:
    refused = register(server, tmp_path / "devices", env="A=1,CUDA_VISIBLE_DEVICES=3")
    assert refused.status_code == 400
    assert "option.env" in refused.json()["message"]
    assert "load_on_devices" in refused.json()["message"]


# --- option.pythonExecutable ---


def test_an_interpreter_that_is_not_there(server: Server, tmp_path: Path) -> None:
    refused = register(server, tmp_path / "absent", pythonExecutable="/no/such/python")
    assert refused.status_code == 400
    assert 'option.pythonExecutable = "/no/such/python": there is no such program' in refused.json()["message"]


def test_an_interpreter_that_lacks_what_a_worker_imports(server: Server, tmp_path: Path) -> None:
    python = virtual_environment(tmp_path / "bare")
    refused = register(server, tmp_path / "lacking", pythonExecutable=python)
    assert refused.status_code == 400
    message = refused.json()["message"]
    assert "it lacks msgspec, pydantic, uvloop" in message
    assert f"{python} -m pip install 'msgspec' 'pydantic>=2.7' 'uvloop'" in message


def test_a_program_that_is_no_python(server: Server, tmp_path: Path) -> None:
    refused = register(server, tmp_path / "shell", pythonExecutable="/bin/false")
    assert refused.status_code == 500
    assert "option.pythonExecutable: /bin/false failed (exit code 1)" in refused.json()["message"]


@pytest.mark.slow
def test_the_worker_runs_in_the_interpreter_that_the_model_names(server: Server, tmp_path: Path) -> None:
    directory = tmp_path / "named"
    python = virtual_environment(directory / "python")
    packages = next((directory / "python").glob("lib/*/site-packages"))
    for name in ("msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "uvloop"):
        found = next(path for root in site.getsitepackages() if (path := Path(root, name)).exists())
        (packages / name).symlink_to(found)
    (packages / "typing_extensions.py").symlink_to(Path(site.getsitepackages()[0], "typing_extensions.py"))
    (directory / "model.py").write_text(CODE)
    (directory / "serving.properties").write_text("option.pythonExecutable=python/bin/python")  # beside the model
    assert server.http.post("/models", params={"url": str(directory)}).status_code == 200
    found = process_of(server, "named")
    assert found["executable"] == str(python)
    assert not any(entry in found["path"] for entry in site.getsitepackages()), "the server's packages"


# --- option.enable_venv ---


@pytest.mark.slow
def test_a_virtual_environment_for_each_model(server: Server, tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert register(server, tmp_path / name, enable_venv="true").status_code == 200
    first, second = process_of(server, "first"), process_of(server, "second")
    assert len({first["prefix"], second["prefix"], sys.prefix}) == 3
    assert first["executable"].startswith(first["prefix"])
    # What is installed there is the model's alone; what the server has is there for all.
    packages = next(Path(first["prefix"]).glob("lib/*/site-packages"))
    assert str(packages) in first["path"]
    assert str(packages) not in second["path"]
    assert site.getsitepackages()[0] in first["path"]
    subprocess.run([first["executable"], "-c", "import msgspec"], check=True)


@pytest.mark.slow
def test_an_environment_is_made_once(server: Server, tmp_path: Path) -> None:
    directory = tmp_path / "again"
    assert register(server, directory, enable_venv="true").status_code == 200
    prefix = process_of(server, "again")["prefix"]
    (Path(prefix) / "kept").touch()
    assert server.http.delete("/models/again").status_code == 200
    assert server.http.post("/models", params={"url": str(directory)}).status_code == 200
    assert process_of(server, "again")["prefix"] == prefix
    assert (Path(prefix) / "kept").exists()


def test_what_a_worker_imports_is_named() -> None:
    """WORKER_PACKAGES is complete: the worker and a handler of own code import nothing else that pip installs."""
    from lmi_server.artifacts.interpreter import WORKER_PACKAGES

    code = (
        "import json, sys\n"
        "import lmi_server.worker.__main__, handlers.own_code.handler, handlers.own_code.options\n"
        "tops = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(json.dumps(sorted(tops)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    brought = {"annotated_types", "pydantic_core", "typing_extensions", "typing_inspection"}  # by pydantic
    ours = {"__main__", "lmi_server", "handlers"}
    of_the_environment = {name for name in json.loads(printed) if name.startswith(("_", "cython"))}
    assert set(json.loads(printed)) - brought - ours - of_the_environment == set(WORKER_PACKAGES)
