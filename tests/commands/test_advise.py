"""`lmi-server advise`: every rule by the log line or the metrics that it reads, and the command on a live server."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked_servers import run_command
from server_helpers import connect, raw_request, serving

from lmi_server.advise.command import engine_of
from lmi_server.advise.evidence import Evidence, LoadSample, add_log, add_metrics
from lmi_server.advise.rules import OPTIONS, OWN, SGLANG, VLLM, Advice, advise
from lmi_server.bench.observation import Observation
from lmi_server.bench.server_metrics import read

DECODE = (
    "[2026-01-01 10:00:00 TP0] Decode batch. #running-req: {running}, #token: 370959, token usage: {usage}, "
    "gen throughput (token/s): 4594.01, #queue-req: {queued}"
)
PREFILL = "Prefill batch. #new-seq: 4, #new-token: {new}, #cached-token: {cached}, token usage: 0.10, #queue-req: 2"
RETRACTED = "decode out of memory happened, #retracted_reqs: {count}, #new_token_ratio: 0.9998 -> 1.0000"


def decode(queued: int, usage: float, running: int = 233) -> str:
    return DECODE.format(running=running, usage=usage, queued=queued)


def of_log(*lines: str, engine: str = "sglang") -> list[Advice]:
    evidence = Evidence(engine)
    add_log(evidence, lines)
    return advise(evidence)


HEALTHY = [decode(317, 0.95)] * 10


def test_a_healthy_server_is_left_alone() -> None:
    assert of_log(*HEALTHY, PREFILL.format(new=10, cached=90)) == []


@pytest.mark.parametrize(
    ("lines", "finding", "remedy"),
    [
        ([decode(0, 0.0, running=0)], "no request ran or waited at 1 looks", "look while the load is on"),
        ([decode(0, 0.95)] * 3 + [decode(9, 0.95)], "the queue was empty at 75% of 4 looks", "send more requests"),
        (
            [decode(501, 0.95)],
            "more than 500 requests waited in the engine at 100% of 1 looks",
            "send fewer at a time, or set --schedule-policy to fcfs",
        ),
        (
            [decode(9, 0.82)] * 6 + [decode(9, 0.95)] * 4,
            "requests waited in the engine while the KV cache was less than 90 % full at 60% of the looks",
            "lower --schedule-conservativeness, to 0.3",
        ),
        (
            [*HEALTHY, RETRACTED.format(count=2)],
            "2 requests lost their place in the KV cache at 10 looks",
            "raise --schedule-conservativeness, to 1.3",
        ),
        (
            [*HEALTHY, "KV cache pool is full. Retract requests. #retracted_reqs: 7, #new_token_ratio: 0.6 -> 0.9"],
            "7 requests lost their place",
            "raise --schedule-conservativeness",
        ),
        (
            [*HEALTHY, "server_args=ServerArgs(tp_size=4)", decode(300, 0.3)][10:],
            "the model is split over 4 GPUs, and its KV cache was 30% full at most",
            "split it over fewer and raise --dp-size",
        ),
        (
            [*HEALTHY, "max_total_num_tokens=665690, available_gpu_mem=13.50 GB"],
            "13.5 GB of each GPU are free",
            "raise --mem-fraction-static until 5 to 8 GB are left",
        ),
        (
            [*HEALTHY, PREFILL.format(new=1000, cached=1)],
            "0.1% of the prompt tokens were in the prefix cache",
            "set --schedule-policy to fcfs",
        ),
    ],
)
def test_each_rule_of_sglangs_guide(lines: Sequence[str], finding: str, remedy: str) -> None:
    found = [advice for advice in of_log(*lines) if advice.finding.startswith(finding)]
    assert len(found) == 1
    assert found[0].remedy.startswith(remedy)
    assert found[0].source == SGLANG


def test_what_helps_when_memory_runs_out_depends_on_the_phase() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    prefill = of_log(*HEALTHY, PREFILL.format(new=1, cached=9), error)
    assert [advice.remedy for advice in prefill] == [
        "lower --chunked-prefill-size to 4096 or 2048",
        "lower --mem-fraction-static, which helps prefill and decoding",
    ]
    decoding = of_log(*HEALTHY, error, error, engine="lmi")
    assert decoding[0] == Advice(
        "memory ran out 2 times during decoding", "lower option.max_rolling_batch_size", SGLANG
    )


def test_vllms_log_gets_vllms_settings() -> None:
    line = (
        "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 4 reqs, "
        "Waiting: 9 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%"
    )
    (found,) = of_log(line)
    assert (found.remedy, found.source) == ("raise --max-num-seqs", VLLM)


def test_metrics_say_where_requests_wait() -> None:
    """Outside of the engine, the number of requests that a worker takes is the limit."""
    text = (
        "lmi_queue_depth 7\nlmi_requests_in_flight 4\nlmi_handler_waiting_requests {}\nlmi_handler_kv_cache_usage 0.1"
    )
    assert engine_of(text) == "lmi"
    outside, inside = (Evidence("lmi"), Evidence("lmi"))
    add_metrics(outside, [Observation(0.0, read(text.format(0)))] * 2)
    assert [(advice.remedy, advice.source) for advice in advise(outside)] == [
        ("raise option.max_rolling_batch_size", OWN)
    ]
    add_metrics(inside, [Observation(0.0, read(text.format(3)))] * 2)
    assert advise(inside)[0].remedy.startswith("lower option.schedule_conservativeness")


def test_preemptions_of_vllm() -> None:
    before = read("vllm:num_requests_running 4\nvllm:num_requests_waiting 9\nvllm:num_preemptions_total 3")
    after = {**before, "retracted": 8.0}
    evidence = Evidence("lmi-vllm")
    add_metrics(evidence, [Observation(0.0, before), Observation(1.0, after)])
    (found,) = advise(evidence)
    assert found.finding.startswith("5 requests lost their place")
    assert found.remedy == "raise option.gpu_memory_utilization, or lower option.max_rolling_batch_size"


@pytest.mark.parametrize(
    ("metrics", "engine"),
    [
        ('lmi_queue_depth{model="m"} 0\nvllm:num_requests_running{model="m",model_name="m"} 0', "lmi"),
        ('lmi_queue_depth{model="m"} 0\nvllm:num_requests_running{model="m",worker="m-0",engine="0"} 0', "lmi-vllm"),
        ('vllm:num_requests_running{engine="0"} 0', "vllm"),
        ("sglang:num_running_reqs 0", "sglang"),
    ],
)
def test_an_engine_is_known_by_what_it_reports_itself(metrics: str, engine: str) -> None:
    """This server shows the values of every handler under vLLM's names, without a worker."""
    assert engine_of(metrics) == engine


def test_unknown_figures_give_no_advice() -> None:
    evidence = Evidence("lmi", [LoadSample(running=3.0)] * 5)
    assert advise(evidence) == []
    assert set(OPTIONS) == {"sglang", "vllm", "lmi", "lmi-vllm"}


@pytest.mark.slow
def test_a_live_server_and_its_log(tmp_path: Path) -> None:
    """One request runs, and none waits."""
    (tmp_path / "log").write_text("\n".join([*HEALTHY, RETRACTED.format(count=3)]))
    with serving(tmp_path, max_rolling_batch_size=4) as server:
        url = f"http://127.0.0.1:{server.port}"
        with connect(server, raw_request("wait")):  # it never ends by itself
            server.until("lmi_handler_running_requests", 1)
            done = run_command("advise", url, "--seconds", "0.1", "--json", "found", env=os.environ, cwd=tmp_path)
            logged = run_command("advise", url, "--seconds", "0", "--log", "log", env=os.environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "settings are named as in lmi." in done.stdout
    assert "the queue was empty at 100% of" in done.stdout
    assert json.loads((tmp_path / "found").read_text())[0]["source"] == SGLANG
    assert "raise option.schedule_conservativeness" in logged.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to look at: name the URL of a server"),
        (["models/mine"], "models/mine is no URL; name that of a server, such as http://127.0.0.1:8080"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1/metrics: "),
        (["--log", "nowhere"], "--log nowhere: [Errno 2]"),
        (["--log", "empty"], "empty has no line about a batch"),
    ],
)
def test_what_cannot_be_looked_at_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").write_text("")
    done = run_command("advise", *arguments, env=os.environ, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_live_server_whose_workers_are_full(tmp_path: Path) -> None:
    """The worker takes one request, the next one waits before it, and the KV cache has room."""
    with (
        serving(tmp_path, "fault_handlers:CachingHandler", max_rolling_batch_size=1) as server,
        connect(server, raw_request("wait")),
        connect(server, raw_request("wait")),
    ):
        server.until("lmi_queue_depth", 1)
        server.until("lmi_handler_running_requests", 1)
        url = f"http://127.0.0.1:{server.port}"
        done = run_command("advise", url, "--seconds", "0.1", "--json", "found", env=os.environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(each["remedy"], each["source"]) for each in json.loads((tmp_path / "found").read_text())] == [
        ("raise option.max_rolling_batch_size", OWN)
    ]
