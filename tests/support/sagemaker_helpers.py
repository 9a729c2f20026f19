"""boto3's client of SageMaker endpoints, pointed at a server of a test, and the local mode of SageMaker's SDK."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client_environment import SAGEMAKER_PYTHON, ClientScripts
from paths import MODEL_CODE

ACCESS_KEY, SECRET_KEY = "AKIAEXAMPLE", "planted-secret"


def sagemaker_runtime(port: int, **more: Any) -> Any:
    """Return a client of the server on this port, which asks once; `more` are arguments of boto3.client."""
    import boto3
    from botocore.config import Config

    given = {
        "region_name": "us-east-1",
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "config": Config(retries={"total_max_attempts": 1}, read_timeout=120),
    }
    return boto3.client("sagemaker-runtime", endpoint_url=f"http://127.0.0.1:{port}", **given | more)


# A slow machine may need longer than the two minutes that the SDK waits for /ping.
_LOCAL_MODE = """
import json, urllib.request
import sagemaker.local.entities
from sagemaker.deserializers import JSONDeserializer
from sagemaker.local import LocalSession
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

sagemaker.local.entities.HEALTH_CHECK_TIMEOUT_LIMIT = 1200
model = Model(
    image_uri=IMAGE,
    model_data=f"file://{ARCHIVE}",
    role="arn:aws:iam::123456789012:role/any",
    env={"SERVING_BATCH_SIZE": "2", "SERVING_MANAGEMENT_CLIENTS": "any"},
    predictor_cls=Predictor,
    sagemaker_session=LocalSession(),
)
predictor = model.deploy(1, "local", serializer=JSONSerializer(), deserializer=JSONDeserializer())
try:
    answer = predictor.predict({"a": 1})
    served = json.load(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/models/model"))
finally:
    predictor.delete_endpoint()  # a thread of the SDK would keep this process
print(json.dumps([answer, served[0]["models"][0]["batchSize"]]))
"""


def sdk_scripts(directory: Path, scripts: Mapping[str, str], **variables: str) -> ClientScripts:
    """Run code in the environment of SageMaker's SDK, which finds credentials that nobody checks."""
    directory.mkdir(parents=True, exist_ok=True)
    defaults = directory / "defaults.yaml"  # or it tells Amazon of each call
    defaults.write_text("{SchemaVersion: '1.0', SageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}}")
    amazon = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(directory),
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(defaults),
    }
    named = {name: ("sagemaker", code) for name, code in scripts.items()}
    return ClientScripts(named, SAGEMAKER_PYTHON, **amazon | variables)


def deployed_locally(
    directory: Path, archive: Path, command: Sequence[str], image: str = "lmi-server", **variables: str
) -> tuple[Any, int, int]:
    """Deploy an archive in the SDK's local mode, which docker_stand_in.py starts with `command`; remove it again.

    Return its answer to {"a": 1}, the batch size that the model was given by a variable, and its former port.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (directory / ".sagemaker").mkdir(parents=True)
    (directory / ".sagemaker" / "config.yaml").write_text(f"local: {{serving_port: {port}}}")
    docker = directory / "docker"
    docker.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {MODEL_CODE / "docker_stand_in.py"} "$@"\n')
    docker.chmod(0o755)
    paths = {"PATH": f"{directory}:{os.environ['PATH']}", "LOCAL_MODE_COMMAND": json.dumps(command)}
    names = f"IMAGE, ARCHIVE, PORT = {image!r}, {str(archive)!r}, {port}\n"
    ran = sdk_scripts(directory, {"local": names + _LOCAL_MODE}, **variables | paths)
    answer, batch_size = json.loads(ran.output("local").splitlines()[-1])
    return answer, batch_size, port
