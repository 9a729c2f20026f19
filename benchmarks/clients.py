"""Compares the figures of `lmi-server bench` with those of vLLM's and guidellm's clients, on the same server.

    python -m benchmarks.clients --guidellm /path/to/bin/guidellm
    python -m benchmarks.clients --guidellm /path/to/bin/guidellm --model models/smollm2-135m-instruct

Without --model the server is `benchmarks.paced_server`, which sends tokens at fixed times and takes next to no
processor time: what the clients take from it does not matter then. It records the times, so that each client is also
compared with what was true of its own requests. With a model, clients and server share the processors, and what a
client takes of them (printed, as cores) slows the server down; requests per second of the server's processor time do
not depend on that. Each client runs alone, `--rounds` times in turn; the figures are the medians of the rounds.
guidellm needs an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from benchmarks.figures import parser_of, show
from benchmarks.servers import MODEL, Server, serving, started
from lmi_server.bench.records import Record, summary
from lmi_server.processes.usage import measure_usage

ROOT = Path(__file__).parents[1]
TOKENIZER = MODEL.resolve()
SAMPLE_S = 0.2
LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p99")
Figures = Mapping[str, float]


def main() -> None:
    """Run the clients and print a table."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as directory, _server(asked, Path(directory)) as server:
        clients: dict[str, Callable[[], Figures]] = {
            "ours": lambda: _ours(asked, server, Path(directory)),
            "vllm": lambda: _vllm(asked, server, Path(directory)),
        }
        if asked.guidellm:
            clients["guidellm"] = lambda: _guidellm(asked, server, Path(directory))
        rounds: dict[str, list[Figures]] = {name: [] for name in clients}
        truths: dict[str, list[Figures]] = {name: [] for name in clients}
        for number in range(asked.rounds):
            for name, run in clients.items():
                rounds[name].append(run())
                if asked.model is None:
                    truths[name].append(_truth(server, asked.requests))
                print(f"round {number + 1}, {name}: done", file=sys.stderr)
    found = {name: _medians(figures) for name, figures in rounds.items()}
    ours = found["ours"]
    _print("as the clients say", found, {f"ours/{name}": (ours, found[name]) for name in found if name != "ours"})
    if asked.model is None:
        true = {name: _medians(figures) for name, figures in truths.items()}
        _print("as the server wrote them", true, {f"{name}/true": (found[name], true[name]) for name in true})
    if asked.json_file:
        asked.json_file.write_text(json.dumps({"clients": rounds, "true": truths}, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="model directory; without it, the server with fixed times")
    parser.add_argument("--first-ms", type=float, default=200, help="time to the first token of that server")
    parser.add_argument("--token-ms", type=float, default=20, help="time per further token of that server")
    parser.add_argument("--guidellm", help="the command guidellm; without it, that client is left out")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, dest="json_file", help="file for the figures of each round")
    return parser.parse_args()


@contextlib.contextmanager
def _server(asked: argparse.Namespace, directory: Path) -> Iterator[Server]:
    """Serve the model, or tokens at fixed times."""
    log = directory / "log"
    if asked.model is not None:
        with serving(asked.model, log=log) as server:
            yield server
        return
    arguments = ("benchmarks.paced_server", "{port}", str(asked.first_ms), str(asked.token_ms))
    with started(sys.executable, "-m", *arguments, log=log) as server:
        server.wait_until_ready()
        yield server


def _truth(server: Server, requests: int) -> Figures:
    """Return the figures of the last requests of a client as the paced server wrote them: those before were to try."""
    with urlopen(f"{server.url}/records", timeout=60) as answer:
        seen = json.load(answer)[-requests:]
    records = [
        Record(
            due=request["begin"],
            sent=request["begin"],
            first=request["tokens"][0],
            end=request["tokens"][-1],
            gaps=[after - before for before, after in itertools.pairwise(request["tokens"])],
            events=len(request["tokens"]),
        )
        for request in seen
    ]
    return _of_summary(summary(records, {}))


def _of_summary(run: Mapping[str, Any]) -> Figures:
    latencies = {f"{name} {statistic}": run[f"{name}_ms"][statistic] for name in LATENCIES for statistic in STATISTICS}
    return {"requests/s": run["requests_per_s"], "output tokens/s": run["output_tokens_per_s"], **latencies}


# --- the clients ---


def _ours(asked: argparse.Namespace, server: Server, directory: Path) -> Figures:
    shape = ["--input-tokens", asked.input_tokens, "--output-tokens", asked.output_tokens]
    load = ["--concurrency", asked.concurrency, "--requests", asked.requests, "--json", directory / "ours.json"]
    # A tokenizer of the model, as the others have it; the words of the echo handler are no tokens of it.
    tokens = ["--tokenizer", TOKENIZER] if asked.model else []
    cost = _run([sys.executable, "-m", "lmi_server", "bench", server.url, *shape, *load, *tokens], asked, server)
    (run,) = json.loads((directory / "ours.json").read_text())["runs"].values()
    return _with_cost(_of_summary(run), cost)


def _vllm(asked: argparse.Namespace, server: Server, directory: Path) -> Figures:
    options = {
        "backend": "openai",
        "base-url": server.url,
        "endpoint": "/v1/completions",
        "model": "lmi",
        "tokenizer": TOKENIZER,
        "dataset-name": "random",
        "random-input-len": asked.input_tokens,
        "random-output-len": asked.output_tokens,
        "num-prompts": asked.requests,
        "max-concurrency": asked.concurrency,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-dir": directory,
        "result-filename": "vllm.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    script = ROOT / "tests" / "models" / "vllm_bench.py"
    cost = _run([sys.executable, script, "--save-result", "--ignore-eos", *words], asked, server)
    found = json.loads((directory / "vllm.json").read_text())
    latencies = {
        f"{name} {statistic}": found[f"{statistic}_{name}_ms"] for name in LATENCIES for statistic in STATISTICS
    }
    rates = {"requests/s": found["request_throughput"], "output tokens/s": found["output_throughput"]}
    return _with_cost({**rates, **latencies}, cost)


def _guidellm(asked: argparse.Namespace, server: Server, directory: Path) -> Figures:
    options = {
        "backend": f"kind=openai_http,target={server.url},model=lmi,request_format=/v1/completions",
        "profile": f"kind=concurrent,streams={asked.concurrency}",
        "constraint": f"kind=max_requests,count={asked.requests}",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens={asked.input_tokens},output_tokens={asked.output_tokens}",
        "output": f"kind=json,path={directory / 'guidellm.json'}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    cost = _run([asked.guidellm, "run", *words, "--disable-console"], asked, server)
    (benchmark,) = json.loads((directory / "guidellm.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    # Its inter-token latency is a mean per request, which is TPOT elsewhere; its own TPOT has the first token in it.
    names = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms"}
    figures = {
        "requests/s": _successful(metrics["requests_per_second"])["mean"],
        "output tokens/s": _successful(metrics["output_tokens_per_second"])["mean"],
        **{f"{name} {key}": value for name, metric in names.items() for key, value in _statistics(metrics[metric], 1)},
        **{f"e2el {key}": value for key, value in _statistics(metrics["request_latency"], 1000)},
    }
    return _with_cost(figures, cost)


def _statistics(metric: Mapping[str, Any], factor: float) -> Iterator[tuple[str, float]]:
    found = _successful(metric)
    yield "mean", factor * found["mean"]
    yield "median", factor * found["median"]
    yield "p99", factor * found["percentiles"]["p99"]


def _successful(metric: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = metric["successful"]
    return found


def _run(command: list[Any], asked: argparse.Namespace, server: Server) -> tuple[float, float]:
    """Run a client; return the processor time per second that it and the server took meanwhile."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        ended = threading.Event()
        samples: list[tuple[float, float, float]] = []

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                if _connections(server) > asked.concurrency // 2:  # while it loads, it asks for one thing at a time
                    taken = (measure_usage(pid).cpu_s for pid in (process.pid, server.pids()[0]))
                    samples.append((time.monotonic(), *taken))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            process.wait()
        finally:
            ended.set()
            thread.join()
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{output.read()}")
    if len(samples) < 2:
        raise SystemExit(f"{words[0]} ended before its use of the processors was seen; give more --requests")
    seconds, client_s, server_s = (last - first for first, last in zip(samples[0], samples[-1], strict=True))
    return client_s / seconds, server_s / seconds


def _connections(server: Server) -> int:
    """Return how many connections to the server are open."""
    found = psutil.Process(server.pids()[0]).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


def _with_cost(figures: Figures, cost: tuple[float, float]) -> Figures:
    client, server = cost
    per_server_s = figures["requests/s"] / server if server else 0.0
    return {**figures, "client, cores": client, "server, cores": server, "requests/server CPU s": per_server_s}


# --- what is printed ---


def _medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def _print(title: str, figures: Mapping[str, Figures], pairs: Mapping[str, tuple[Figures, Figures]]) -> None:
    """Print the figures of each client, and the ratios of pairs of them."""
    rows = [
        (
            name,
            *(f"{each[name]:.2f}" if name in each else "" for each in figures.values()),
            *(_ratio(one.get(name), other.get(name)) for one, other in pairs.values()),
        )
        for name in figures["ours"]
    ]
    show(("", *figures, *pairs), rows, title)


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.3f}" if value is not None and other else ""


if __name__ == "__main__":
    main()
