"""The chart and the overlays of deploy/, rendered by helm and kubectl.

The objects of KEDA and of the Prometheus operator have no schema here: what they say of metrics is asked of a server,
and their alerts go through promtool.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifests import VERSION, documents, program, rendered, settings_of, variables_of
from paths import ROOT
from server_helpers import Server, serving

from lmi_server.configuration.server_settings import resolve_server

CHART = ROOT / "deploy" / "helm" / "lmi-server"
BASE = ROOT / "deploy" / "kubernetes"
OVERLAYS = ROOT / "deploy" / "overlays"
FOREIGN = ("ScaledObject", "PodMonitor", "PrometheusRule")  # kinds without a schema here

# What each of the objects that are off by default takes.
EVERYTHING: dict[str, Any] = {
    "model": {
        "name": "chat",
        "s3": {"uri": "s3://bucket/m/", "region": "eu-west-1", "endpoint": "https://s3.example", "secretName": "s3"},
        "options": {"rolling_batch": "auto", "max_rolling_batch_size": 32, "trust_remote_code": False, "dtype": "bf16"},
    },
    "hfToken": {"secretName": "hub"},
    "apiKeys": {"keys": ["sha256:" + "ab" * 32, "a key max_concurrent_requests=8"]},
    "managementKeys": {"secretName": "managers", "key": "file"},
    "settings": {"log_format": "json", "access_log_sample": 0.5, "max_request_size": 1000000},
    "extraEnv": [{"name": "A", "value": "b"}],
    "gpu": {"count": 2, "runtimeClassName": "nvidia"},
    "drainSeconds": 120,
    "cache": {"persistent": True, "storageClassName": "fast"},
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example"], "tls": [{"hosts": ["a.example"]}]},
    "keda": {"enabled": True, "minReplicas": 0, "serverAddress": "http://prometheus:9090", "wakeQuery": "sum(up) > 0"},
    "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 9000}]}]},
    "podMonitor": {"enabled": True, "secretName": "scraper", "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "serviceAccount": {"create": True, "annotations": {"eks.amazonaws.com/role-arn": "role"}},
    "podLabels": {"team": "a"},
    "podAnnotations": {"b": "c"},
    "nodeSelector": {"gpu": "a"},
    "tolerations": [{"key": "d", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "image": {"pullSecrets": [{"name": "registry"}]},
}
# The manifests of deploy/kubernetes, said by values.
AS_THE_BASE: dict[str, Any] = {
    "model": {"pvc": {"claimName": "lmi-server-model"}},
    "image": {"tag": "latest"},
    "cache": {"persistent": True},
    "hpa": {"enabled": True},
}


class Chart:
    """What the chart renders, by kind; kinds with several objects by kind and name."""

    def __init__(self, directory: Path, values: dict[str, Any], release: str = "lmi-server") -> None:
        file = directory / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        command = ("helm", "template", release, str(CHART), "--namespace", "serving", "--values", str(file))
        self.objects = rendered(*command)

    def __getitem__(self, kind: str) -> dict[str, Any]:
        [found] = [document for document in self.objects if document["kind"] == kind]
        return found

    @property
    def pod(self) -> dict[str, Any]:
        return self["Deployment"]["spec"]["template"]

    @property
    def container(self) -> dict[str, Any]:
        [container] = self.pod["spec"]["containers"]
        return container


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    return Chart(tmp_path_factory.mktemp("everything"), EVERYTHING)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


def without_labels(value: Any) -> Any:
    """Return a manifest without what only names a release of the chart."""
    if isinstance(value, list):
        return [without_labels(item) for item in value]
    if not isinstance(value, dict):
        return value
    left = ("app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart")
    return {key: without_labels(item) for key, item in value.items() if key not in left}


def merged(left: Any, right: Any) -> Any:
    """Return `right` over `left`, as helm merges values."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return right
    return left | {key: merged(left.get(key), value) for key, value in right.items()}


@pytest.mark.parametrize("values", [EVERYTHING, AS_THE_BASE, {"model": {"id": "owner/name"}}])
def test_what_the_chart_renders_is_valid(tmp_path: Path, values: dict[str, Any]) -> None:
    for document in Chart(tmp_path, values).objects:
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("release", ["lmi-server", "a", "b" * 53])
def test_names_and_labels_go_together(tmp_path: Path, release: str) -> None:
    values = {key: value for key, value in EVERYTHING.items() if key != "managementKeys"}
    chart = Chart(tmp_path, values, release)
    [name] = {document["metadata"]["name"] for document in chart.objects if document["kind"] == "Deployment"}
    assert name == (release if release == "lmi-server" else f"{release}-lmi-server"[:52])
    labels = chart.pod["metadata"]["labels"]
    for selector in (
        chart["Deployment"]["spec"]["selector"]["matchLabels"],
        chart["Service"]["spec"]["selector"],
        chart["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        chart["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        chart["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert selector["app.kubernetes.io/instance"] == release
    spec = chart.pod["spec"]
    assert {mount["name"] for mount in chart.container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == chart["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["api-keys"]["secret"]["secretName"] == chart["Secret"]["metadata"]["name"]
    [item] = volumes["api-keys"]["secret"]["items"]
    assert chart["Secret"]["stringData"][item["key"]].splitlines() == EVERYTHING["apiKeys"]["keys"]
    assert spec["serviceAccountName"] == chart["ServiceAccount"]["metadata"]["name"]
    assert chart["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == name
    [rule] = chart["Ingress"]["spec"]["rules"]
    assert {path["backend"]["service"]["name"] for path in rule["http"]["paths"]} == {name}


def test_the_chart_and_the_manifests_are_the_same_deployment(tmp_path: Path) -> None:
    chart = Chart(tmp_path, AS_THE_BASE)
    base = {document["kind"]: document for file in BASE.glob("*.yaml") for document in documents(file)}
    # What the API server fills in, and kustomize's tag.
    chart.pod["spec"].pop("serviceAccountName")
    chart.container.pop("imagePullPolicy")
    chart.container["image"] = chart.container["image"].removesuffix(":latest")
    chart["Service"]["spec"].pop("type")
    for kind in ("Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"):
        assert without_labels(chart[kind])["spec"] == base[kind]["spec"], kind
    [claim] = [each for each in documents(BASE / "volumes.yaml") if each["metadata"]["name"] == "lmi-server-cache"]
    assert without_labels(chart["PersistentVolumeClaim"])["spec"] == claim["spec"]


def test_the_server_takes_what_the_chart_gives_it(everything: Chart) -> None:
    variables = variables_of(everything.container)
    settings = settings_of(everything.container)
    assert (settings.drain_timeout, settings.max_request_size) == (120, 1000000)
    assert settings.api_keys_file == "/etc/lmi-server/api-keys/keys"
    assert settings.management_api_keys_file == "/etc/lmi-server/management-keys/keys"
    assert everything.pod["spec"]["terminationGracePeriodSeconds"] >= settings.drain_timeout + 5 + 10
    assert variables["OPTION_MAX_ROLLING_BATCH_SIZE"] == "32"
    assert variables["OPTION_TRUST_REMOTE_CODE"] == "false"
    assert everything.container["args"] == ["serve", "chat=s3://bucket/m/"]
    secrets = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in everything.container["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    assert secrets.keys() == {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert everything.container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert everything.container["image"].startswith("lmi-server-cuda:")


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({"id": "owner/name"}, ["serve", "model=owner/name"]),
        ({"id": "owner/name", "name": "chat"}, ["serve", "chat=owner/name"]),
        ({"pvc": {"claimName": "a"}}, ["serve"]),
        ({"pvc": {"claimName": "a", "subPath": "b/c"}, "name": "chat"}, ["serve", "chat=/opt/ml/model"]),
    ],
)
def test_where_the_model_comes_from_is_an_argument(tmp_path: Path, model: dict[str, Any], args: list[str]) -> None:
    chart = Chart(tmp_path, {"model": model})
    assert chart.container["args"] == args
    mounted = [mount for mount in chart.container["volumeMounts"] if mount["mountPath"] == "/opt/ml/model"]
    assert [mount.get("subPath") for mount in mounted] == ([model["pvc"].get("subPath")] if "pvc" in model else [])


@pytest.mark.slow
def test_autoscalers_and_probes_ask_for_what_the_server_has(everything: Chart, server: Server, tmp_path: Path) -> None:
    scaled = Chart(tmp_path, merged(AS_THE_BASE, {"hpa": {"running": 4}}))["HorizontalPodAutoscaler"]
    asked = {metric["pods"]["metric"]["name"] for metric in scaled["spec"]["metrics"]}
    queue, running, _wake = (trigger["metadata"] for trigger in everything["ScaledObject"]["spec"]["triggers"])
    for metadata in (queue, running):
        [name] = re.findall(r"\blmi_\w+", metadata["query"])
        asked.add(name)
    assert asked == {"lmi_queue_depth", "lmi_requests_in_flight"}
    assert all(server.metric(name) == 0 for name in asked)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server.http.get(everything.container[name]["httpGet"]["path"]).status_code == 200
    [endpoint] = everything["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert server.http.get(endpoint["path"]).status_code == 200
    [rule] = everything["Ingress"]["spec"]["rules"]
    known = server.http.get("/openapi.json").json()["paths"]
    assert all(any(path.startswith(each["path"]) for path in known) for each in rule["http"]["paths"])


def test_the_queries_of_keda_find_the_pods_of_this_release_alone(everything: Chart) -> None:
    query = everything["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    [(namespace, pod)] = re.findall(r'namespace="([^"]+)",pod=~"([^"]+)"', query)
    assert namespace == "serving"
    assert re.fullmatch(pod, "lmi-server-7f9c6d5b8-x2x9k")
    assert not re.fullmatch(pod, "lmi-server-other-7f9c6d5b8-x2x9k"), (
        "Prometheus matches whole values, as fullmatch does"
    )


PROMTOOL = [ROOT / ".venv" / "prometheus" / "usr" / "bin" / "promtool"]


def test_the_alerts_are_those_of_prometheus_for_the_pods_of_the_release(everything: Chart, tmp_path: Path) -> None:
    groups = everything["PrometheusRule"]["spec"]["groups"]
    [base] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    [group] = groups
    assert [rule["alert"] for rule in group["rules"]] == [rule["alert"] for rule in base["rules"]]
    for rule, original in zip(group["rules"], base["rules"], strict=True):
        named = len(re.findall(r"\b(?:lmi_[a-z_]+|up)\b(?=\{)", rule["expr"]))
        assert named == len(re.findall(r"\b(?:lmi_[a-z_]+|up)\b", rule["expr"])), "each selector says which job"
        assert rule["expr"].count('job="lmi-server",namespace="serving"') == named
        assert {**rule, "expr": ""} == {**original, "expr": ""}, "summaries keep their own braces"
    assert everything["PodMonitor"]["spec"]["jobLabel"] == "app.kubernetes.io/instance"
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": groups}))
    if PROMTOOL[0].exists():
        done = subprocess.run([*PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_deployment_that_is_scaled_to_zero_is_not_missing(everything: Chart, tmp_path: Path) -> None:
    if not PROMTOOL[0].exists():
        pytest.skip("promtool is not installed; `make setup` unpacks Debian's package")
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(everything["PrometheusRule"]["spec"]))
    wanted = {"series": 'kube_deployment_spec_replicas{namespace="serving",deployment="lmi-server"}'}
    tests = [
        {
            "interval": "1m",
            "input_series": [{**wanted, "values": f"{replicas}+0x60"}] if replicas is not None else [],
            "alert_rule_test": [{"eval_time": "30m", "alertname": "LmiServerMissing", "exp_alerts": []}],
        }
        for replicas in (0, 1, None)
    ]
    fired = []
    for test in tests:
        (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
        command = [*PROMTOOL, "test", "rules", str(tmp_path / "test.yml")]
        fired.append(subprocess.run(command, capture_output=True, check=False).returncode != 0)
    assert fired == [False, True, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of model.id, model.s3.uri and model.pvc.claimName; 0 are set"),
        ({"model": {"id": "a/b", "pvc": {"claimName": "c"}}}, "2 are set"),
        ({"hpa": {"enabled": True}, "keda": {"enabled": True}}, "hpa.enabled and keda.enabled are both true"),
        ({"keda": {"enabled": True}}, "needs keda.serverAddress"),
        ({"keda": {"enabled": True, "serverAddress": "http://p", "minReplicas": 0}}, "keda.wakeQuery is not set"),
        ({"hpa": {"enabled": True, "minReplicas": 9}}, "hpa.maxReplicas is below hpa.minReplicas"),
        ({"apiKeys": {"keys": ["a"], "secretName": "b"}}, "one of apiKeys.keys and apiKeys.secretName"),
        ({"managementKeys": {"keys": ["a"]}, "podMonitor": {"enabled": True}}, "podMonitor.secretName"),
        ({"ingress": {"enabled": True}}, "ingress.hosts"),
        ({"settings": {"drain_timeout": 9}}, "settings.drain_timeout: the chart sets it; use drainSeconds"),
        # Those that the schema refuses.
        ({"modle": {}}, "modle"),
        ({"gpu": {"count": "two"}}, "/gpu/count"),
        ({"model": {"id": "a/b; rm"}}, "/model/id"),
        ({"model": {"pvc": {"claimName": "c", "subPath": "../d"}}}, "/model/pvc/subPath"),
        ({"apiKeys": {"keys": ["a\nb"]}}, "/apiKeys/keys/0"),
        ({"hfToken": {"secretName": "a}, b: {"}}, "/hfToken/secretName"),
        ({"model": {"options": {"a b": 1}}}, "/model/options"),
        ({"model": {"options": {"device_map": {"a": 1}}}}, "/model/options/device_map"),
    ],
)
def test_values_that_do_not_go_together_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    given = merged({"model": {"id": "owner/name"}}, values) if values else {}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        Chart(tmp_path, given)
    assert message in refused.value.stderr.replace("'", "")


def test_the_schema_has_every_value_and_no_other() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any], place: str) -> None:
        properties = schema["properties"]
        assert schema["additionalProperties"] is False, place
        assert values.keys() == properties.keys(), place
        for key, value in values.items():
            if isinstance(value, dict) and "properties" in properties[key]:
                compare(value, properties[key], f"{place}.{key}")

    compare(*(yaml.safe_load((CHART / name).read_text()) for name in ("values.yaml", "values.schema.json")), "")
    json.loads((CHART / "values.schema.json").read_text())


def test_the_version_is_that_of_the_package() -> None:
    [chart] = documents(CHART / "Chart.yaml")
    assert f"\nversion = {chart['appVersion']}\n" in (ROOT / "setup.cfg").read_text(encoding="utf-8")


def test_helm_lints_and_packs_the_chart(tmp_path: Path) -> None:
    lint = [program("helm"), "lint", str(CHART), "--strict", "--set", "model.id=owner/name"]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    pack = [program("helm"), "package", str(CHART), "--destination", str(tmp_path)]
    subprocess.run(pack, capture_output=True, check=True)
    [archive] = tmp_path.glob("*.tgz")
    values = ("--set", "model.id=owner/name,prometheusRule.enabled=true")
    assert any(each["kind"] == "PrometheusRule" for each in rendered("helm", "template", "a", str(archive), *values))


# --- kustomize ---


@pytest.mark.slow
@pytest.mark.parametrize(("overlay", "gpus"), [("one-gpu", 1), ("four-gpus", 4)])
def test_an_overlay_is_the_base_with_gpus(overlay: str, gpus: int, tmp_path: Path) -> None:
    objects = rendered("kubectl", "kustomize", str(OVERLAYS / overlay))
    base = rendered("kubectl", "kustomize", str(BASE))
    for document in objects:
        kubernetes_validate.validate(document, VERSION, strict=True)
    of_base = [each for each in base if each["kind"] != "Deployment"]
    assert [each for each in objects if each["kind"] != "Deployment"] == of_base
    [deployment] = [each for each in objects if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    chart = Chart(tmp_path, {"model": {"id": "a/b"}, "gpu": {"count": gpus}})
    limit = chart.container["resources"]["limits"]["nvidia.com/gpu"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == limit == gpus
    assert spec["tolerations"] == chart.pod["spec"]["tolerations"]
    assert container["image"].split(":")[0] == chart.container["image"].split(":")[0] == "lmi-server-cuda"
    variables = variables_of(container)
    assert variables.get("OPTION_TENSOR_PARALLEL_DEGREE") == (str(gpus) if gpus > 1 else None)
    assert not resolve_server(variables, {})[1]
