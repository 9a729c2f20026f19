"""The files of deploy/: they are valid, go together, and say what the server does.

Kubernetes' own kinds are checked against its schemas. KServe's have none that is installed: what their fields name is
compared here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from paths import ROOT
from server_helpers import Server, serving

from lmi_server.configuration.server_settings import ServerSettings, resolve_server

KUBERNETES, KSERVE, COMPOSE = (ROOT / "deploy" / name for name in ("kubernetes", "kserve", "compose"))
VERSION = "1.37"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


RESOURCES = [
    pytest.param(document, id=document["kind"] + "-" + document["metadata"]["name"])
    for path in sorted(KUBERNETES.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in documents(path)
]


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    [deployment] = documents(KUBERNETES / "deployment.yaml")
    return deployment["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = pod["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


def settings_of(container: dict[str, Any]) -> ServerSettings:
    """Return the settings that the variables of a container give a server."""
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    settings, warnings = resolve_server(variables, {})
    assert not warnings
    return settings


@pytest.mark.parametrize("document", RESOURCES)
def test_a_resource_is_valid(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_schemas_find_a_wrong_field() -> None:
    [service] = documents(KUBERNETES / "service.yaml")
    service["spec"]["prots"] = service["spec"].pop("ports")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSION, strict=True)


def test_the_autoscaler_reads_a_metric_of_the_server(server: Server) -> None:
    [autoscaler] = documents(KUBERNETES / "autoscaler.yaml")
    [metric] = autoscaler["spec"]["metrics"]
    assert server.metric(metric["pods"]["metric"]["name"]) == 0


def test_every_file_is_applied() -> None:
    [kustomization] = documents(KUBERNETES / "kustomization.yaml")
    others = {path.name for path in KUBERNETES.iterdir()} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == others


def test_names_labels_and_volumes_go_together(pod: dict[str, Any], container: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"]
    by_kind = {param.values[0]["kind"]: param.values[0] for param in RESOURCES}
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "lmi-server"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    claims = {document["metadata"]["name"] for document in documents(KUBERNETES / "volumes.yaml")}
    used = [volume["persistentVolumeClaim"] for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == {claim["claimName"] for claim in used}


def test_probes_ask_for_paths_of_the_server(server: Server, container: dict[str, Any]) -> None:
    [port] = container["ports"]
    assert port["containerPort"] == ServerSettings().port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        assert (asked["port"], server.http.get(asked["path"]).status_code) == (port["name"], 200)


def test_a_pod_has_the_time_that_the_server_takes_to_end(pod: dict[str, Any], container: dict[str, Any]) -> None:
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= pause + settings_of(container).drain_timeout + 10


def test_the_user_is_that_of_the_image(pod: dict[str, Any]) -> None:
    context = pod["spec"]["securityContext"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert f"--uid {context['runAsUser']} --gid {context['runAsGroup']}" in dockerfile


def test_kserves_runtime_serves_the_inference_service(server: Server) -> None:
    [runtime], [service] = documents(KSERVE / "runtime.yaml"), documents(KSERVE / "inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {entry["name"] for entry in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    [container] = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container", "by which KServe finds it"
    assert container["args"] == ["serve", "{{.Name}}=/mnt/models"]
    for name in ("readinessProbe", "livenessProbe"):
        assert server.http.get(container[name]["httpGet"]["path"]).status_code == 200
    grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace >= ServerSettings().drain_timeout + 10


def test_compose_names_files_that_are_there() -> None:
    [compose] = documents(COMPOSE / "compose.yaml")
    services = compose["services"]
    build = services["lmi-server"]["build"]
    assert f" AS {build['target']}\n" in (COMPOSE / build["context"] / build["dockerfile"]).read_text(encoding="utf-8")
    mounted = [volume.partition(":")[0] for service in services.values() for volume in service["volumes"]]
    assert all((COMPOSE / source).is_file() for source in mounted if source.startswith("."))
    assert int(services["lmi-server"]["stop_grace_period"].removesuffix("s")) >= ServerSettings().drain_timeout + 10
    [scraped] = documents(COMPOSE / "prometheus.yml")[0]["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"lmi-server:{ServerSettings().port}"]
