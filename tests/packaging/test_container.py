"""Containers of the built image, as docker, SageMaker and Kubernetes start them. `make test-image` runs these tests.

The images are those of LMI_TEST_IMAGE (the target cpu) and LMI_TEST_SLIM_IMAGE; the program that runs them is that of
LMI_TEST_DOCKER, docker if it is not set, and takes docker's command line.
"""

from __future__ import annotations

import configparser
import contextlib
import gzip
import hashlib
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from paths import BUILT_MODELS, ROOT
from sagemaker_helpers import deployed_locally
from waiting import wait_until

IMAGE = os.environ.get("LMI_TEST_IMAGE", "")
SLIM = os.environ.get("LMI_TEST_SLIM_IMAGE", "")
DOCKER = os.environ.get("LMI_TEST_DOCKER", "docker")
DEMO_MODEL = BUILT_MODELS / "smollm2-135m-instruct"
# Nothing can be written but /tmp and the caches; no privilege but those of the user.
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
CACHES = ("--volume", "/var/cache/lmi-server")  # a new volume, which is filled from the image
LIST_KERNELS = ("sh", "-c", "find /var/cache/lmi-server/numba -type f -printf '%p %t\n' | sort")
QUESTION = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
OWN_CODE = """
from djl_python import Input, Output

def handle(inputs: Input):
    return None if inputs.is_empty() else Output().add_as_json(inputs.get_as_json())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.image,
    pytest.mark.skipif(not (IMAGE and SLIM), reason="needs the built images: make test-image"),
]
both_images = pytest.mark.parametrize("image", [IMAGE, SLIM], ids=["cpu", "slim"])


def docker(*arguments: str) -> str:
    # Where memory ran out, podman's conmon writes an empty file `oom` into the directory that it was started in.
    started_in = tempfile.gettempdir()
    done = subprocess.run(
        [DOCKER, *arguments], cwd=started_in, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Container:
    """A container that has been started and serves, or has ended."""

    def __init__(self, *options: str, arguments: tuple[str, ...] = (), image: str = IMAGE) -> None:
        common = ("--detach", "--no-healthcheck", "--publish", "127.0.0.1::8080", "--publish", "127.0.0.1::9000")
        self.name = docker("run", *common, *options, image, *arguments)

    @contextlib.contextmanager
    def client(self, port: int = 8080) -> Iterator[httpx.Client]:
        """Wait until the server is ready on its `port`; give a client of it."""
        with httpx.Client(base_url=f"http://{docker('port', self.name, f'{port}/tcp')}", timeout=60) as http:
            wait_until(lambda: answers(http) or self.ended, f"{self.name} serves", 300)
            assert not self.ended, self.log
            yield http

    @property
    def ended(self) -> bool:
        return docker("inspect", "--format", "{{.State.Running}}", self.name) == "false"

    @property
    def log(self) -> str:
        return "".join(self.outputs())

    def outputs(self) -> tuple[str, str]:
        """Return standard output and standard error so far."""
        done = subprocess.run([DOCKER, "logs", self.name], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout, done.stderr

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL after 30 seconds; return the exit code."""
        docker("stop", "-t", "30", self.name)
        return self.exit_code()

    def exit_code(self) -> int:
        return int(docker("wait", self.name))


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/ping").status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def container(*options: str, arguments: tuple[str, ...] = (), image: str = IMAGE) -> Iterator[Container]:
    started = Container(*options, arguments=arguments, image=image)
    try:
        yield started
    finally:
        docker("rm", "--force", "--volumes", started.name)


def model_at(directory: Path) -> tuple[str, str]:
    return "--volume", f"{directory}:/opt/ml/model:ro"


def health_check() -> list[str]:
    """Return the command that the image has for it; docker and podman show it in different places."""
    found = json.loads(docker("image", "inspect", IMAGE))[0]
    kind, *command = (found.get("Healthcheck") or found["Config"]["Healthcheck"])["Test"]
    assert kind == "CMD"
    return command


@pytest.fixture(scope="module")
def kernels_of_the_image() -> str:
    """Return the compiled kernels with their times."""
    return docker("run", "--rm", "--entrypoint", LIST_KERNELS[0], IMAGE, *LIST_KERNELS[1:])


@pytest.mark.parametrize("user", ["lmi-server", "root", "12345"])
def test_the_demo_model_is_served_with_a_read_only_root(user: str, kernels_of_the_image: str) -> None:
    options = (*HARDENED, *CACHES, "--user", user, *model_at(DEMO_MODEL))
    with container(*options, arguments=("serve",)) as server, server.client() as http:
        assert "Paris" in http.post("/invocations", json=QUESTION).json()["generated_text"]
        chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert docker("exec", server.name, *health_check()) == ""
        assert docker("exec", server.name, *LIST_KERNELS) == kernels_of_the_image
        assert server.stop() == 0, server.log


def test_vllm_serves_and_compiles_for_a_user_that_the_image_does_not_know(tmp_path: Path) -> None:
    """The demo model's own serving.properties names another handler, so it is a data source beside the model here."""
    tmp_path.chmod(0o755)
    weights = "/opt/ml/additional-model-data-sources/base"
    lines = [f"option.model_id={weights}", "option.rolling_batch=vllm", "option.kv_cache_memory_gb=0.5"]
    (tmp_path / "serving.properties").write_text("\n".join(["engine=Python", *lines]))
    options = (*HARDENED, *CACHES, "--volume", f"{DEMO_MODEL}:{weights}:ro", "--user", "12345", *model_at(tmp_path))
    with container(*options) as server, server.client() as http:
        assert "Paris" in http.post("/invocations", json=QUESTION).json()["generated_text"]
        # The compiler has the lowest priority, and other containers may keep the processors busy.
        wait_until(lambda: "the compiled code runs" in server.log, "the model is compiled", 1200)
        assert "Paris" in http.post("/invocations", json=QUESTION).json()["generated_text"]
        assert server.stop() == 0, server.log


def test_the_slim_image_has_its_engines_and_no_compiler() -> None:
    script = "python -c 'import sklearn, skops, xgboost' && ! command -v cc gcc g++ c++"
    docker("run", "--rm", "--entrypoint", "sh", SLIM, "-c", script)


@both_images
def test_the_image_holds_the_code_of_the_tree(image: str) -> None:
    """A builder that takes a step from its cache by mistake makes an image of former code."""
    code = "cd /opt/lmi-server/.venv/lib/python3*/site-packages && find lmi_server handlers frontend -name '*.py'"
    sums = docker("run", "--rm", "--entrypoint", "sh", image, "-c", f"{code} -exec sha256sum {{}} +")
    found = {path: digest for digest, path in map(str.split, sums.splitlines())}
    expected = {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for package in ("lmi_server", "handlers", "frontend")
        for path in (ROOT / package).rglob("*.py")
    }
    assert found == expected


@both_images
def test_the_labels_say_what_the_image_is(image: str) -> None:
    labels = json.loads(docker("image", "inspect", image))[0]["Config"]["Labels"]
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert labels["org.opencontainers.image.title"] == "lmi-server"
    assert labels["org.opencontainers.image.version"] == settings["metadata"]["version"]
    assert re.fullmatch("[0-9a-f]{40}", labels["org.opencontainers.image.revision"])
    assert labels["com.amazonaws.sagemaker.capabilities.multi-models"] == "true"


@both_images
def test_the_server_has_no_privileges_unless_it_is_asked_for(image: str) -> None:
    with container(*model_at(DEMO_MODEL), "--entrypoint", "id", image=image) as started:
        assert started.exit_code() == 0
        assert "uid=1000(lmi-server) gid=0(root)" in started.log


@both_images
@pytest.mark.parametrize("user", ["lmi-server", "root"])
@pytest.mark.parametrize("is_archive", [False, True])
def test_code_of_ones_own_is_served(tmp_path: Path, is_archive: bool, user: str, image: str) -> None:
    (tmp_path / "model.py").write_text(OWN_CODE)
    if is_archive:
        with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "model.py", "model.py")
        (tmp_path / "model.py").unlink()
    tmp_path.chmod(0o755)
    options = (*HARDENED, *CACHES, "--user", user, *model_at(tmp_path))
    with container(*options, image=image) as server, server.client() as http:
        assert http.post("/invocations", json=[1]).json() == [1]
        assert server.stop() == 0, server.log


def test_a_multi_model_endpoint_of_sagemaker(tmp_path: Path) -> None:
    """As "Create a Container for Multi-Model Endpoints" of SageMaker's guide has it."""
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "a" / "model" / "model.py").write_text(OWN_CODE)
    tmp_path.chmod(0o755)
    variables = ("--env", "SAGEMAKER_MULTI_MODEL=true", "--env", "SAGEMAKER_BIND_TO_PORT=9000")
    models = ("--volume", f"{tmp_path}:/opt/ml/models:ro")
    with container(*HARDENED, *variables, *models, arguments=("serve",)) as server, server.client(9000) as http:
        model = {"model_name": "a", "url": "/opt/ml/models/a/model"}
        assert http.post("/models", json=model).status_code == 200
        (listed,) = http.get("/models").json()["models"]
        assert (listed["modelName"], listed["modelUrl"]) == ("a", "/opt/ml/models/a/model")
        assert http.post("/models", json=model).status_code == 409
        assert http.post("/models/a/invoke", json=[1]).json() == [1]
        assert http.delete("/models/a").status_code == 200
        assert http.post("/models/a/invoke", json=[1]).status_code == 404
        assert server.stop() == 0, server.log


def test_the_local_mode_of_sagemakers_sdk_deploys_the_image(tmp_path: Path) -> None:
    """What stands in for docker reads the SDK's compose file alone; the container is one of the image."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model.py").write_text(OWN_CODE)
    with tarfile.open(tmp_path / "model" / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "model.py", "model.py")
    tmp_path.chmod(0o755)
    archive_path = tmp_path / "model" / "model.tar.gz"
    answer, batch_size, _ = deployed_locally(tmp_path / "sdk", archive_path, [DOCKER, "run"], SLIM)
    assert (answer, batch_size) == ({"a": 1}, 2)


def test_the_server_is_configured_as_in_the_containers_of_lmi(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text("job_queue_size=5\nmanagement_clients=any\n")
    (tmp_path / "model.py").write_text(OWN_CODE)
    tmp_path.chmod(0o755)
    configured = ("--volume", f"{tmp_path}:/opt/djl/conf:ro")
    with container(*HARDENED, *configured, *model_at(tmp_path)) as server, server.client() as http:
        assert http.get("/models/model").json()[0]["models"][0]["queueSize"] == 5
        assert server.stop() == 0, server.log


def own_code(model: Path) -> None:
    (model / "model.py").write_text(OWN_CODE)


def damaged_archive(model: Path) -> None:
    (model / "model.tar.gz").write_bytes(gzip.compress(OWN_CODE.encode())[:-20])


def wrong_key(model: Path) -> None:
    (model / "serving.properties").write_text("option.model_id=x\noption.dtype=float7\n")


def large_model(model: Path) -> None:
    own_code(model)
    (model / "serving.properties").write_text("required_memory_mb=2000\n")


def greedy_code(model: Path) -> None:
    (model / "model.py").write_text("taken = bytearray(b'x') * 2**30\n" + OWN_CODE)


class BadStart(NamedTuple):
    """A container that must end: what makes its model directory, options of `docker run`, and parts of the reason."""

    model: Callable[[Path], None]
    options: tuple[str, ...]
    reason: tuple[str, ...]


BAD_STARTS = {
    "no model": BadStart(lambda model: None, (), ("require_model", "/opt/ml/model")),
    "damaged archive": BadStart(damaged_archive, (), ("/opt/ml/model/model.tar.gz", "is damaged")),
    "wrong key": BadStart(wrong_key, (), ("option.dtype", "float7", "/opt/ml/model/serving.properties")),
    "wrong option": BadStart(own_code, ("--env", "OPTION_BATCH_SIZE=x"), ("OPTION_BATCH_SIZE", '"x"')),
    "wrong setting": BadStart(own_code, ("--env", "SERVING_DRAIN_TIMEOUT=x"), ("SERVING_DRAIN_TIMEOUT", '"x"')),
    "wrong port": BadStart(own_code, ("--env", "SAGEMAKER_BIND_TO_PORT=x"), ("SAGEMAKER_BIND_TO_PORT", '"x"')),
    "less memory than asked for": BadStart(
        large_model, ("--memory", "1g"), ("required_memory_mb", "2500 MiB are needed")
    ),
    "killed for memory": BadStart(greedy_code, ("--memory", "600m", "--memory-swap", "600m"), ("ran out of memory",)),
}


@both_images
@pytest.mark.parametrize("name", BAD_STARTS)
def test_what_cannot_be_served_ends_the_container_with_one_line_that_says_why(
    name: str, tmp_path: Path, image: str
) -> None:
    bad = BAD_STARTS[name]
    tmp_path.chmod(0o755)
    bad.model(tmp_path)
    with container(*HARDENED, *CACHES, *bad.options, *model_at(tmp_path), image=image) as server:
        assert server.exit_code() == 1
        output, errors = server.outputs()
    assert errors == ""
    said = [line for line in output.splitlines() if all(part in line for part in bad.reason)]
    assert len(said) == 1, output
    assert "Traceback" not in output
