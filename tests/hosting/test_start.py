"""How a container starts, or refuses to: its model, its variables and its port, as SageMaker and LMI have them.

The rules are those of "Custom Inference Code with Hosting Services" in SageMaker's guide, and LMI's configuration.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hosting_container import packed, refused, write

pytestmark = pytest.mark.slow

OWN_CODE = "def handle(inputs):\n    return None\n"


def empty(model: Path) -> None:
    model.mkdir()


def own_code(model: Path) -> None:
    write(model, model_py=OWN_CODE)


def no_archive(model: Path) -> None:
    empty(model)
    (model / "model.tar.gz").write_bytes(b"no archive")


def cut_archive(model: Path) -> None:
    archive = packed(write(model.parent / "files", model_py=OWN_CODE, big_txt=" ".join(map(str, range(50_000)))), model)
    archive.rename(model.parent / "whole")
    empty(model)
    (model / "model.tar.gz").write_bytes((model.parent / "whole").read_bytes()[:20_000])


def unknown_entry_point(model: Path) -> None:
    write(model, serving_properties="option.entryPoint=other.py")


def unknown_weights(model: Path) -> None:
    write(model, serving_properties="option.model_id=/opt/ml/additional-model-data-sources/none")


def broken_code(model: Path) -> None:
    write(model, model_py="raise RuntimeError('no luck')\ndef handle(inputs): pass\n")


class Refusal(NamedTuple):
    """A container that must end: what makes its model directory, its variables, a part of the line that says why."""

    model: Callable[[Path], None]
    variables: dict[str, str]
    reason: str


REFUSALS = {
    "no directory": Refusal(lambda model: None, {}, "require_model is set, and there is no model: model_store /"),
    "no model": Refusal(empty, {}, "/model holds no model"),
    "no archive": Refusal(no_archive, {}, "model.tar.gz: is damaged, or is no tar or zip archive: "),
    "cut archive": Refusal(cut_archive, {}, "model.tar.gz: is damaged, or is no tar or zip archive: Compressed file"),
    "no entry point": Refusal(unknown_entry_point, {}, 'option.entryPoint = "other.py" is not allowed; there is no'),
    "no weights": Refusal(unknown_weights, {}, "there is no directory /opt/ml/additional-model-data-sources/none"),
    "code that raises": Refusal(broken_code, {}, "model.py:1: RuntimeError: no luck"),
    "option": Refusal(own_code, {"OPTION_BATCH_SIZE": "x"}, 'OPTION_BATCH_SIZE: option.batch_size = "x" is not'),
    "setting": Refusal(own_code, {"SERVING_DRAIN_TIMEOUT": "x"}, 'SERVING_DRAIN_TIMEOUT: drain_timeout = "x" is not'),
    "port": Refusal(own_code, {"SAGEMAKER_BIND_TO_PORT": "x"}, 'SAGEMAKER_BIND_TO_PORT: port = "x" is not allowed'),
    "ports": Refusal(own_code, {"SAGEMAKER_SAFE_PORT_RANGE": "9-1"}, 'SAGEMAKER_SAFE_PORT_RANGE: "9-1" is not allowed'),
    "memory": Refusal(own_code, {"SERVING_RESERVED_MEMORY_MB": "99999999"}, "stays reserved 99999999 MiB are needed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_ends_the_container_with_a_line_that_says_why(name: str, tmp_path: Path) -> None:
    refusal = REFUSALS[name]
    refusal.model(tmp_path / "model")
    code, lines = refused(tmp_path, **refusal.variables)
    assert code == 1
    (why,) = (line for line in lines if refusal.reason in line)
    following = lines[lines.index(why) + 1 :]
    assert all("ending the server, because model model could not" in line for line in following), following
    assert "crash report" not in "".join(lines), "no process has crashed"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_sagemaker_chooses_the_port(taken_port: int, tmp_path: Path) -> None:
    own_code(tmp_path / "model")
    given = {"SAGEMAKER_BIND_TO_PORT": str(taken_port), "SERVING_PORT": "0"}
    code, (line,) = refused(tmp_path, **given)
    assert (code, f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use" in line) == (1, True)


def test_the_port_is_8080_if_nothing_else_is_said(tmp_path: Path) -> None:
    own_code(tmp_path / "model")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has the port, which does as well
            stack.enter_context(socket.create_server(("127.0.0.1", 8080)))
        code, (line,) = refused(tmp_path, SERVING_PORT="")
    assert (code, "cannot listen on 127.0.0.1 port 8080" in line) == (1, True)


# Each variable of SageMaker and of LMI's containers that does nothing here.
IDLE = {
    "DJL_CLUSTER_SIZE": "2",
    "DJL_LEADER_ADDR": "leader",
    "DJL_OFFLINE": "true",
    "DJL_TEST_S3_NO_CREDENTIALS": "true",
    "DJL_VENV_DIR": "/venv",
    "DJL_WORKER_ADDR_FORMAT": "worker-%d",
    "ENGINE_CACHE_DIR": "/cache",
    "JAVA_OPTS": "-Xmx4g",
    "MAX_NETTY_BUFFER_SIZE": "1",
    "NO_OMP_NUM_THREADS": "true",
    "OPT_OUT_TRACKING": "true",
    "SAGEMAKER_HANDLER": "handler.py:handle",
    "SAGEMAKER_MAX_RESPONSE_SIZE": "1",
    "SAGEMAKER_MODEL_SERVER_VMARGS": "-Xmx4g",
    "SAGEMAKER_MODEL_STORE": "/",
    "SAGEMAKER_NUM_MODEL_WORKER": "2",
    "SAGEMAKER_SERVE_SECRET_KEY": "x",
    "SAGEMAKER_SUBMIT_DIRECTORY": "s3://bucket/source.tar.gz",
    "SAGEMAKER_TFS_NUM_OF_GRPC_CHANNELS": "4",
    "SERVING_CHUNKED_READ_TIMEOUT": "60",
    "SERVING_FEATURES": "vllm",
    "SERVING_HEALTH_CHECK_OVERRIDE": "true",
    "SERVING_NO_SUCH_KEY": "1",
    "SERVING_PROMETHEUS": "true",
    "SM_MODEL_DIR": "/opt/ml/model",
    "SM_TELEMETRY_LOG_REV_2022_12": "/tmp/log",
}


def test_a_variable_without_effect_is_named(taken_port: int, tmp_path: Path) -> None:
    own_code(tmp_path / "model")
    harmless = {"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code", "SAGEMAKER_PROGRAM": "x", "SAGEMAKER_REGION": "x"}
    ports = {"SAGEMAKER_BIND_TO_PORT": str(taken_port)}
    assert len(refused(tmp_path, **harmless, **ports, DJL_CLUSTER_SIZE="1")[1]) == 1
    _, lines = refused(tmp_path, **IDLE, **ports)
    named = [
        found[1] for line in lines if (found := re.search(r"WARNING .* variable (\w+)( has no|: | is unknown)", line))
    ]
    assert sorted(named) == sorted(IDLE)
    assert any("did you mean SAGEMAKER_NUM_MODEL_WORKERS?" in line for line in lines)
