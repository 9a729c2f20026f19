"""What /metrics says of requests, tokens, workers and processes, in both formats, under its own and vLLM's names."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text
from prometheus_client.samples import Exemplar
from server_helpers import Server, make_model, running, serving
from waiting import wait_until

from frontend.observability.metrics.collector import parse_engine_metrics
from frontend.observability.metrics.exposition import open_metrics as written
from frontend.observability.metrics.exposition import text_format

OPEN_METRICS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve one model with the adapter "own"."""
    model = make_model(tmp_path_factory.mktemp("metrics") / "model", enable_lora="true")
    (model / "adapters" / "own").mkdir(parents=True)
    with running(model, workers=1) as server:
        yield server


def chat(server: Server, model: str = "model", count: int = 4, stream: bool = False, **more: object) -> int:
    message = {"role": "user", "content": "a b c"}
    body = {"model": model, "messages": [message], "max_tokens": count, "stream": stream, **more}
    return server.http.post("/v1/chat/completions", json=body).status_code


def samples(server: Server, **labels: str) -> dict[str, float]:
    """Return the samples that have these labels, by name with what distinguishes them."""
    found = {}
    for family in plain_text(server.http.get("/metrics").text):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                rest = {key: value for key, value in sample.labels.items() if key not in labels}
                found[sample.name + "".join(f" {key}={value}" for key, value in sorted(rest.items()))] = sample.value
    return found


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def test_tokens_and_ends_count_by_adapter(server: Server) -> None:
    before = samples(server, model="model")
    assert chat(server) == 200
    assert chat(server, stream=True) == 200
    assert chat(server, "own", n=2) == 200
    assert server.http.post("/invocations", json={"inputs": "raise"}).status_code == 424
    changed = changes(before, samples(server, model="model"))
    wanted = {
        "lmi_requests_total code=200": 3,
        "lmi_requests_total code=424": 1,
        "lmi_requests_finished_total adapter= finish_reason=length": 2,
        "lmi_requests_finished_total adapter= finish_reason=error": 1,
        "lmi_requests_finished_total adapter=own finish_reason=length": 1,
        "lmi_prompt_tokens_total adapter=": 6,
        "lmi_prompt_tokens_total adapter=own": 4,  # with the name of the adapter, and once for both sequences
        "lmi_output_tokens_total adapter=": 8,
        "lmi_output_tokens_total adapter=own": 8,
        "lmi_request_duration_seconds_count": 4,
        "lmi_time_to_first_token_seconds_count": 3,
        "lmi_request_output_tokens_bucket le=5.0": 2,
        "lmi_request_output_tokens_bucket le=10.0": 3,
        "lmi_inter_token_latency_seconds_count": 3 + 3 + 6,
        "lmi_batch_size_bucket le=1.0": 4,
    }
    assert {name: changed.get(name) for name in wanted} == wanted


def test_vllms_names_have_the_same_values(server: Server) -> None:
    chat(server)
    own = samples(server, model="model")
    vllm = samples(server, model="model", model_name="model")
    pairs = {
        "vllm:time_to_first_token_seconds_count": "lmi_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "lmi_inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count": "lmi_request_duration_seconds_count",
        "vllm:num_requests_running": "lmi_requests_in_flight",
        "vllm:num_requests_waiting": "lmi_queue_depth",
    }
    assert {name: vllm[name] for name in pairs} == {name: own[other] for name, other in pairs.items()}
    assert vllm["vllm:generation_tokens_total"] == sum(
        value for name, value in own.items() if name.startswith("lmi_output_tokens_total")
    )
    assert vllm["vllm:request_success_total finished_reason=length"] >= 1


def test_a_client_that_leaves_counts_as_cancelled(server: Server) -> None:
    name = "lmi_requests_finished_total adapter= finish_reason=cancelled"
    before = samples(server, model="model").get(name, 0)
    with server.http.stream("POST", "/invocations", json={"inputs": "token-then-wait", "stream": True}) as answer:
        next(answer.iter_bytes())
    wait_until(lambda: samples(server, model="model").get(name) == before + 1, "the request counts as cancelled")


def test_what_a_handler_counts_is_a_counter(tmp_path: Path) -> None:
    with serving(tmp_path, "fault_handlers:CachingHandler") as server:
        server.until("lmi_handler_generated_tokens_total", 7)
        families = {family.name: family for family in plain_text(server.http.get("/metrics").text)}
    assert families["lmi_handler_generated_tokens"].type == "counter"
    assert families["lmi_handler_kv_cache_usage"].type == "gauge"
    sample = families["lmi_handler_generated_tokens"].samples[0]
    assert (sample.name, sample.labels) == (
        "lmi_handler_generated_tokens_total",
        {"model": "model", "worker": "model-0"},
    )


def test_the_version_is_a_label(server: Server) -> None:
    wanted = {f"lmi_build_info python_version={platform.python_version()} version={version('lmi-server')}": 1}
    assert wanted.items() <= samples(server).items()


def test_workers_and_processes_are_measured(server: Server) -> None:
    own = samples(server, model="model")
    assert own["lmi_model_load_seconds_count"] >= 1
    assert own["lmi_workers state=ready"] == 1
    assert own["lmi_worker_resident_memory_bytes worker=model-0"] > 10 << 20
    assert samples(server)["process_resident_memory_bytes"] > 10 << 20


def test_open_metrics_has_exemplars(server: Server) -> None:
    server.http.post("/invocations", json={"inputs": "a b"}, headers={"traceparent": PARENT})
    server.http.post("/invocations", json={"inputs": "a b"}, headers={"traceparent": "00-nonsense"})
    answer = server.http.get("/metrics", headers=OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    families = {family.name: family for family in open_metrics(answer.text)}
    found: list[Exemplar] = [
        sample.exemplar for sample in families["lmi_time_to_first_token_seconds"].samples if sample.exemplar
    ]
    assert {exemplar.labels["trace_id"] for exemplar in found} == {TRACE}
    assert {"vllm:generation_tokens", "Response_2XX", "lmi_requests"} <= families.keys()
    plain = server.http.get("/metrics", headers={"accept": "*/*"})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert TRACE not in plain.text


def test_what_engines_report_is_valid_in_both_formats() -> None:
    registry = CollectorRegistry()
    Counter("vllm:tokens", "Tokens.", ["engine"], registry=registry).labels("0").inc(5)
    own = generate_latest(registry)  # with a family vllm:tokens_created
    families = [each for worker in ("model-0", "model-1") for each in parse_engine_metrics(own, "model", worker)]
    plain = text_format(families).decode()
    assert 'vllm:tokens_total{engine="0",model="model",worker="model-1"} 5.0\n' in plain
    assert [family.name for family in plain_text(plain)] == ["vllm:tokens", "vllm:tokens_created"]
    assert [family.name for family in open_metrics(written(families).decode())] == ["vllm:tokens"]


def test_a_worker_that_dies_is_counted(server: Server) -> None:
    before = samples(server, model="model")
    assert server.http.post("/invocations", json={"inputs": "exit-once"}).status_code == 200  # by the next worker
    server.until("lmi_workers_ready", 1)
    changed = changes(before, samples(server, model="model"))
    assert (changed["lmi_worker_deaths_total"], changed["lmi_requests_retried_total"]) == (1, 1)
