"""A container of a multi-model endpoint, as SageMaker loads, lists, invokes and unloads its models.

The rules are those of "Custom Containers Contract for Multi-Model Endpoints" in SageMaker's guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from hosting_container import Container, started, write

pytestmark = pytest.mark.slow

NAMES = [letter * 64 for letter in "abc"]  # SageMaker names a model by a digest of its path
ECHO = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    kind = inputs.get_property("Content-Type")
    output = Output().add(inputs.get_as_bytes())
    output.add_property("Content-Type", kind)
    output.add_property("x-target", inputs.get_property("X-Amzn-SageMaker-Target-Model"))
    return output
"""
SCRIPT = """
def model_fn(model_dir):
    return model_dir

def transform_fn(model, body, content_type, accept):
    return f"{body} {content_type}", accept
"""


class Endpoint(NamedTuple):
    """A container, a client of it, and the directory that stands for /opt/ml/models."""

    container: Container
    http: httpx.Client
    models: Path

    def load(self, name: str, directory: str | None = None) -> httpx.Response:
        url = self.models / (directory or name) / "model"
        return self.http.post("/models", json={"model_name": name, "url": str(url)}, headers={"accept": "text/plain"})

    def loaded(self, query: str = "") -> list[str]:
        return [model["modelName"] for model in self.http.get(f"/models{query}").json()["models"]]

    def invoke(self, name: str, body: str = "1", content_type: str = "text/csv") -> httpx.Response:
        headers = {"content-type": content_type, "accept": "text/x", "x-amzn-sagemaker-target-model": "m.tar.gz"}
        return self.http.post(f"/models/{name}/invoke", content=body, headers=headers)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    opt_ml = tmp_path_factory.mktemp("opt_ml")
    models = opt_ml / "models"
    for name in NAMES[:2]:
        write(models / name / "model", model_py=ECHO)
    write(models / NAMES[2] / "model", code__inference_py=SCRIPT)
    write(models / "large" / "model", model_py=ECHO)
    with (models / "large" / "model" / "weights.bin").open("wb") as weights:
        weights.truncate(8 << 40)  # a sparse file of 8 TiB
    write(models / "broken" / "model", model_py="raise RuntimeError('no luck')\ndef handle(inputs): pass\n")
    with started(opt_ml, SAGEMAKER_MULTI_MODEL="true", SERVING_RESERVED_MEMORY_MB="1") as (container, http):
        endpoint = Endpoint(container, http, models)
        assert (http.get("/ping").status_code, endpoint.loaded()) == (200, [])
        with ThreadPoolExecutor(3) as threads:  # as requests for three models at once have it
            assert [answer.status_code for answer in threads.map(endpoint.load, NAMES)] == [200] * 3
        yield endpoint


def test_models_are_listed_in_pages(endpoint: Endpoint) -> None:
    assert endpoint.loaded() == NAMES
    first = endpoint.http.get("/models", params={"limit": 2}).json()
    assert (len(first["models"]), endpoint.loaded(f"?next_page_token={first['nextPageToken']}")) == (2, NAMES[2:])
    assert "nextPageToken" not in endpoint.http.get("/models").json()
    url = str(endpoint.models / NAMES[0] / "model")
    row = {"modelName": NAMES[0], "modelUrl": url}
    assert row.items() <= first["models"][0].items()
    (described,) = endpoint.http.get(f"/models/{NAMES[0]}").json()
    assert row.items() <= described["models"][0].items()


@pytest.mark.parametrize("content_type", ["text/csv", "application/json", "application/x-npy", "application/x-own"])
def test_a_model_gets_the_body_and_its_type(endpoint: Endpoint, content_type: str) -> None:
    answer = endpoint.invoke(NAMES[0], "[1]", content_type)
    assert (answer.status_code, answer.text) == (200, "[1]")
    assert (answer.headers["content-type"], answer.headers["x-target"]) == (content_type, "m.tar.gz")


def test_a_script_for_the_framework_containers(endpoint: Endpoint) -> None:
    answer = endpoint.invoke(NAMES[2])
    assert (answer.status_code, answer.text, answer.headers["content-type"]) == (200, "1 text/csv", "text/x")


def test_what_is_refused(endpoint: Endpoint) -> None:
    assert endpoint.load(NAMES[0]).status_code == 409
    assert endpoint.load("large").status_code == 507
    assert endpoint.load("none").status_code == 404
    broken = endpoint.load("broken")
    assert (broken.status_code, "no luck" in broken.json()["message"]) == (500, True)
    assert endpoint.http.post("/models", json={"model_name": "x"}).status_code == 400
    assert endpoint.http.post("/models", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    for method, path in (("GET", "/models/x"), ("DELETE", "/models/x"), ("POST", "/models/x/invoke")):
        assert endpoint.http.request(method, path).status_code == 404
    assert (endpoint.http.get("/ping").status_code, endpoint.loaded()) == (200, NAMES)


def test_models_come_and_go_under_traffic(endpoint: Endpoint) -> None:
    name = "d" * 64
    with ThreadPoolExecutor(5) as threads:
        loading = threads.submit(endpoint.load, name, NAMES[0])
        while not loading.done():
            assert {answer.status_code for answer in threads.map(endpoint.invoke, NAMES[:2] * 2)} == {200}
        assert (loading.result().status_code, endpoint.invoke(name).status_code) == (200, 200)
        unloading = threads.submit(endpoint.http.delete, f"/models/{name}")
        while not unloading.done():
            assert {answer.status_code for answer in threads.map(endpoint.invoke, NAMES[:2] * 2)} == {200}
    assert unloading.result().status_code == 200
    assert (endpoint.invoke(name).status_code, endpoint.loaded()) == (404, NAMES)
    assert endpoint.load(name, NAMES[0]).status_code == 200, "an unloaded model can be loaded again"
    assert endpoint.http.delete(f"/models/{name}").status_code == 200
