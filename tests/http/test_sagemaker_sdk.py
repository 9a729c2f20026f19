"""SageMaker's SDK as it stands: its Predictor against a server, and its local mode, which starts one itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hosting_container import environment, packed, write
from own_code_helpers import make_own
from sagemaker_helpers import deployed_locally, sdk_scripts
from server_helpers import Server, make_model, running

pytestmark = pytest.mark.slow

ECHO = """
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add_as_json(inputs.get_as_json())
"""
SEEN = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    return Output().add_as_json([inputs.get_properties()["Content-Type"], len(inputs.get_as_bytes())])
"""
# AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names the server.
PREDICTOR = """
import json
from sagemaker.base_deserializers import JSONDeserializer
from sagemaker.base_serializers import CSVSerializer, JSONLinesSerializer, JSONSerializer, NumpySerializer
from sagemaker.iterators import LineIterator
from sagemaker.predictor import Predictor
from sagemaker.session import Session

session = Session()
asked = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
predictor = Predictor("model", session, serializer=JSONSerializer(), deserializer=JSONDeserializer())
answer = predictor.predict(asked, custom_attributes="x=y")
lines = [json.loads(line) for line in predictor.predict_stream({**asked, "stream": True}, iterator=LineIterator)]
seen = []
serializers = {CSVSerializer: [[1, 2], [3, 4]], NumpySerializer: [1, 2], JSONLinesSerializer: [[1], [2]]}
for serializer, data in serializers.items():
    other = Predictor("own", session, serializer=serializer(), deserializer=JSONDeserializer())
    seen.append(other.predict(data, component_name="own"))
print(json.dumps([answer, [line["token"]["text"] for line in lines], seen]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("endpoints")
    with running(make_model(directory / "model"), make_own(directory / "own", SEEN), workers=2) as server:
        yield server


def test_a_predictor_predicts_streams_and_serializes(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    ran = sdk_scripts(tmp_path, {"predictor": PREDICTOR}, AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=url)
    answer, streamed, seen = json.loads(ran.output("predictor").splitlines()[-1])
    assert answer == {"generated_text": " a b a"}
    assert streamed == [" a", " b", " a"]
    (csv, csv_size), (numpy, numpy_size), (lines, lines_size) = seen
    assert (csv, csv_size) == ("text/csv", len("1,2\n3,4"))
    assert (numpy, numpy_size > 16) == ("application/x-npy", True)
    assert (lines, lines_size) == ("application/jsonlines", len("[1]\n[2]"))


def test_its_local_mode_deploys_a_model(tmp_path: Path) -> None:
    """Without docker here: a program in its place starts the server as the container would."""
    archive = packed(write(tmp_path / "files", model_py=ECHO), tmp_path / "model" / "model.tar.gz")
    (tmp_path / "opt_ml").mkdir()
    started = [str(Path(sys.executable).with_name("lmi-server"))]
    variables = environment(tmp_path / "opt_ml")
    del variables["HOME"], variables["PATH"]
    answer, batch_size, port = deployed_locally(tmp_path / "sdk", archive, started, **variables)
    assert (answer, batch_size) == ({"a": 1}, 2)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/ping")
