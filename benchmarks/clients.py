"""Compares the figures of `lmi-server bench` with those of vLLM's and guidellm's clients, on the same server.

    python -m benchmarks.clients --guidellm /path/to/bin/guidellm
    python -m benchmarks.clients --guidellm /path/to/bin/guidellm --model models/smollm2-135m-instruct

Without --model the server is the echo handler with a fixed time per token, which takes next to no processor time: what
the clients take from the server does not matter then. Each client runs alone, `--rounds` times in turn; the figures are
the medians of the rounds. guidellm needs an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from lmi_server.machine.ports import free_port
from lmi_server.machine.process_tree import end_with_parent

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "models" / "smollm2-135m-instruct"
START_S = 900
Figures = Mapping[str, float]


def main() -> None:
    """Run the clients and print a table."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as directory, _server(asked, Path(directory)) as url:
        clients: dict[str, Callable[[], Figures]] = {
            "ours": lambda: _ours(asked, url, Path(directory)),
            "vllm": lambda: _vllm(asked, url, Path(directory)),
        }
        if asked.guidellm:
            clients["guidellm"] = lambda: _guidellm(asked, url, Path(directory))
        rounds: dict[str, list[Figures]] = {name: [] for name in clients}
        for number in range(asked.rounds):
            for name, run in clients.items():
                rounds[name].append(run())
                print(f"round {number + 1}, {name}: done", file=sys.stderr)
    _print({name: _medians(found) for name, found in rounds.items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory; without it, the echo handler with fixed times")
    parser.add_argument("--token-ms", type=float, default=20, help="time per token of the echo handler")
    parser.add_argument("--guidellm", help="the command guidellm; without it, that client is left out")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


@contextlib.contextmanager
def _server(asked: argparse.Namespace, directory: Path) -> Iterator[str]:
    """Serve the model, or the echo handler, at the URL."""
    model = asked.model
    if model is None:
        model = directory / "echo"
        model.mkdir()
        properties = f"option.entryPoint=djl_python.echo\noption.echo_delay_ms={asked.token_ms:g}\n"
        (model / "serving.properties").write_text(properties)
    port = free_port(None)
    command = [sys.executable, "-m", "lmi_server", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        _await(process, f"http://127.0.0.1:{port}", directory / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urlopen(f"{url}/metrics", timeout=5) as answer:
            if any(line.startswith(b"lmi_model_ready") and line.endswith(b" 1.0\n") for line in answer):
                return
        time.sleep(0.2)
    raise SystemExit(f"the server does not start:\n{log.read_text()}")


# --- the clients ---


def _ours(asked: argparse.Namespace, url: str, directory: Path) -> Figures:
    shape = ["--input-tokens", asked.input_tokens, "--output-tokens", asked.output_tokens]
    load = ["--concurrency", asked.concurrency, "--requests", asked.requests, "--json", directory / "ours.json"]
    # A tokenizer of the model, as the others have it; the words of the echo handler are no tokens of it.
    tokens = ["--tokenizer", TOKENIZER] if asked.model else []
    _run([sys.executable, "-m", "lmi_server", "bench", url, *shape, *load, *tokens])
    (run,) = json.loads((directory / "ours.json").read_text())["runs"].values()
    latencies = {
        f"{name} {statistic}": run[f"{name}_ms"][statistic]
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "p99")
    }
    return {"requests/s": run["requests_per_s"], "output tokens/s": run["output_tokens_per_s"], **latencies}


def _vllm(asked: argparse.Namespace, url: str, directory: Path) -> Figures:
    options = {
        "backend": "openai",
        "base-url": url,
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
    _run([sys.executable, ROOT / "tests" / "models" / "vllm_bench.py", "--save-result", "--ignore-eos", *words])
    found = json.loads((directory / "vllm.json").read_text())
    latencies = {
        f"{name} {statistic}": found[f"{statistic}_{name}_ms"]
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "p99")
    }
    return {"requests/s": found["request_throughput"], "output tokens/s": found["output_throughput"], **latencies}


def _guidellm(asked: argparse.Namespace, url: str, directory: Path) -> Figures:
    options = {
        "backend": f"kind=openai_http,target={url},model=lmi,request_format=/v1/completions",
        "profile": f"kind=concurrent,streams={asked.concurrency}",
        "constraint": f"kind=max_requests,count={asked.requests}",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens={asked.input_tokens},output_tokens={asked.output_tokens}",
        "output": f"kind=json,path={directory / 'guidellm.json'}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    _run([asked.guidellm, "run", *words, "--disable-console"])
    (benchmark,) = json.loads((directory / "guidellm.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    # Its inter-token latency is a mean per request, which is TPOT elsewhere; its own TPOT has the first token in it.
    names = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms"}
    return {
        "requests/s": _successful(metrics["requests_per_second"])["mean"],
        "output tokens/s": _successful(metrics["output_tokens_per_second"])["mean"],
        **{f"{name} {key}": value for name, metric in names.items() for key, value in _statistics(metrics[metric], 1)},
        **{f"e2el {key}": value for key, value in _statistics(metrics["request_latency"], 1000)},
    }


def _statistics(metric: Mapping[str, Any], factor: float) -> Iterator[tuple[str, float]]:
    found = _successful(metric)
    yield "mean", factor * found["mean"]
    yield "median", factor * found["median"]
    yield "p99", factor * found["percentiles"]["p99"]


def _successful(metric: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = metric["successful"]
    return found


def _run(command: list[Any]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


# --- what is printed ---


def _medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def _print(found: Mapping[str, Figures]) -> None:
    others = [name for name in found if name != "ours"]
    print("".join(f"{title:>16}" for title in ("", *found, *(f"ours/{name}" for name in others))))
    for name, value in found["ours"].items():
        cells = [f"{figures[name]:.2f}" if name in figures else "" for figures in found.values()]
        ratios = [f"{value / found[other][name]:.3f}" if name in found[other] else "" for other in others]
        print("".join(f"{cell:>16}" for cell in (name, *cells, *ratios)))


if __name__ == "__main__":
    main()
