"""The files of deploy/: they are valid, go together, and say what the server does.

Kubernetes' own kinds and the compose file are checked against their schemas. KServe's have none that is installed:
what their fields name is compared here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from manifests import VERSION, documents, settings_of
from paths import DATA, ROOT
from server_helpers import Server, serving

from lmi_server.configuration.server_settings import ServerSettings, resolve_server
from lmi_server.machine.inventory import Machine
from lmi_server.ray.deployments.model_files import deployments
from lmi_server.ray.serve_config import serve_config

KUBERNETES, KSERVE, COMPOSE, RAY = (ROOT / "deploy" / name for name in ("kubernetes", "kserve", "compose", "ray"))
CONTAINER_PAGE = (ROOT / "docs" / "container.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("document", RESOURCES)
def test_a_resource_is_valid(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_schemas_find_a_wrong_field() -> None:
    [service] = documents(KUBERNETES / "service.yaml")
    service["spec"]["prots"] = service["spec"].pop("ports")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSION, strict=True)


@pytest.mark.slow
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


def test_kserves_pods_are_as_closed_as_those_of_kubernetes(pod: dict[str, Any], container: dict[str, Any]) -> None:
    [runtime], [service] = documents(KSERVE / "runtime.yaml"), documents(KSERVE / "inference-service.yaml")
    predictor = service["spec"]["predictor"]
    assert predictor["automountServiceAccountToken"] is pod["spec"]["automountServiceAccountToken"] is False
    of_pod, of_container = pod["spec"]["securityContext"], container["securityContext"]
    assert predictor["securityContext"]["seccompProfile"] == of_pod["seccompProfile"]
    [served] = runtime["spec"]["containers"]
    context = served["securityContext"]
    assert {key: context[key] for key in of_container} == of_container
    assert all(context[key] == of_pod[key] for key in ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile"))
    writable = {mount["mountPath"]: mount["name"] for mount in served["volumeMounts"]}
    others = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable.keys() == others
    assert set(writable.values()) == {volume["name"] for volume in runtime["spec"]["volumes"]}


def test_kserves_pod_is_one_that_kubernetes_takes() -> None:
    """KServe's kinds have no schema here; a pod of their parts has."""
    [runtime], [service] = documents(KSERVE / "runtime.yaml"), documents(KSERVE / "inference-service.yaml")
    parts = {name: part for name, part in service["spec"]["predictor"].items() if name != "model"}
    made = {"containers": runtime["spec"]["containers"], "volumes": runtime["spec"]["volumes"], **parts}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "made"}, "spec": made}, VERSION, strict=True
    )


# --- Ray on Kubernetes ---


@pytest.fixture(scope="module")
def ray_service() -> dict[str, Any]:
    [document] = documents(RAY / "rayservice.yaml")
    return document["spec"]


@pytest.fixture(scope="module")
def serve_config_of_service(ray_service: dict[str, Any]) -> dict[str, Any]:
    config = yaml.safe_load(ray_service["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def groups_of(ray_service: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of pods, that of the head first."""
    cluster = ray_service["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_ray_service_deploys_what_ray_build_makes_of_its_model_file(
    serve_config_of_service: dict[str, Any], tmp_path: Path
) -> None:
    machine = Machine(total_bytes=2**34, available_bytes=2**33, cores=4, engines=frozenset({"torch", "transformers"}))
    models = deployments([str(RAY / "model.yaml")], {"XDG_CACHE_HOME": str(tmp_path)}, machine)
    [application] = serve_config_of_service["applications"]
    front_end = application["args"]["front_end"]
    arguments = [front_end[name] for name in ("host", "port", "count", "drain_timeout_s")]
    assert serve_config_of_service == json.loads(json.dumps(serve_config(models, *arguments)))


@pytest.mark.slow
def test_ray_accepts_the_config_of_the_ray_service(
    ray_service: dict[str, Any], serve_config_of_service: dict[str, Any]
) -> None:
    schema: Any = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(serve_config_of_service)
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate({"applications": [{"name": "a"}]})
    assert ray_service["rayClusterConfig"]["rayVersion"] == version("ray")


def test_the_pods_of_the_ray_service_are_ones_that_kubernetes_takes(ray_service: dict[str, Any]) -> None:
    """KubeRay's kinds have no schema here; their templates of pods have."""
    for group in groups_of(ray_service):
        metadata = {"name": "made"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_every_pod_of_the_ray_service_has_a_front_end_that_kuberay_finds(
    ray_service: dict[str, Any], serve_config_of_service: dict[str, Any], server: Server
) -> None:
    front_end = serve_config_of_service["applications"][0]["args"]["front_end"]
    groups = groups_of(ray_service)
    assert front_end["count"] == 1 + sum(group["replicas"] for group in groups[1:])
    for group in groups:
        spec = group["template"]["spec"]
        [container] = spec["containers"]
        assert {port["name"]: port["containerPort"] for port in container["ports"]}["serve"] == front_end["port"]
        assert spec["terminationGracePeriodSeconds"] >= front_end["drain_timeout_s"] + 10
    answer = server.http.get("/-/healthz")
    assert (answer.status_code, answer.text) == (200, "success")


# --- docker compose ---


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    [document] = documents(COMPOSE / "compose.yaml")
    return document


def parts_of(mount: str) -> list[str]:
    """Return source, target and mode; a source with a default or a message has colons of its own."""
    variable, end, rest = mount.rpartition("}")
    source, *others = rest.split(":")
    return [variable + end + source, *others]


def test_compose_has_the_form_that_the_specification_gives_it(compose: dict[str, Any]) -> None:
    schema = jsonschema.Draft7Validator(json.loads((DATA / "compose_spec.json").read_text(encoding="utf-8")))
    schema.validate(compose)
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        schema.validate({"services": {"grafana": {**compose["services"]["grafana"], "prots": []}}})


def test_compose_names_files_volumes_and_services_that_are_there(compose: dict[str, Any]) -> None:
    services = compose["services"]
    build = services["lmi-server"]["build"]
    assert f" AS {build['target']}\n" in (COMPOSE / build["context"] / build["dockerfile"]).read_text(encoding="utf-8")
    sources = {parts_of(mount)[0] for service in services.values() for mount in service["volumes"]}
    files = {source for source in sources if source.startswith(".")}
    assert all((COMPOSE / file).is_file() for file in files)
    [model] = [source for source in sources if source.startswith("$")]
    assert sources - files - {model} == compose["volumes"].keys()
    assert model.startswith("${MODEL:?"), "the variable that docs/container.md sets"
    assert "MODEL=/path/to/model docker compose -f deploy/compose/compose.yaml up" in CONTAINER_PAGE
    assert {name for service in services.values() for name in service.get("depends_on", [])} <= services.keys()


def test_compose_fits_the_image_and_the_server(compose: dict[str, Any], server: Server) -> None:
    service = compose["services"]["lmi-server"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    [folders] = [line for line in dockerfile.splitlines() if "mkdir -p" in line]
    assert {parts_of(mount)[1] for mount in service["volumes"]} <= set(folders.split())
    settings, warnings = resolve_server(service.get("environment", {}), {})
    assert not warnings
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.drain_timeout + 10
    [scraped] = documents(COMPOSE / "prometheus.yml")[0]["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"lmi-server:{settings.port}"]
    assert service["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    path = scraped.get("metrics_path", "/metrics")
    assert server.http.get(path).headers["content-type"].startswith("text/plain; version=")


def test_grafana_finds_prometheus(compose: dict[str, Any]) -> None:
    services = compose["services"]
    [provisioned] = [
        mount for mount in services["grafana"]["volumes"] if "/etc/grafana/provisioning/datasources/" in mount
    ]
    [source] = documents(COMPOSE / parts_of(provisioned)[0])[0]["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    mounted = [parts_of(mount)[1] for mount in services[host]["volumes"]]
    assert "/etc/prometheus/prometheus.yml" in mounted, "where Prometheus' image reads it"
