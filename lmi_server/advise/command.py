"""`lmi-server advise`: says what to change about a live server, by its metrics and its log."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmi_server.advise.evidence import Evidence, add_log, add_metrics
from lmi_server.advise.rules import Advice, advise
from lmi_server.bench.observation import Observer
from lmi_server.bench.server_metrics import fetch_text, is_lmi_server, read, reports_vllm
from lmi_server.client import numbers
from lmi_server.client.server_calls import Headers, parse_headers, remedy
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import write_text


def advise_server(
    url: Annotated[
        str | None, typer.Argument(help="The server, such as http://127.0.0.1:8080; without one only --log is read.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Log of the server: lines of this server, of SGLang or of vLLM.")
    ] = None,
    seconds: Annotated[float, numbers.delay("--seconds", "For how long the metrics are read, once a second.")] = 30,
    header: Headers = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the advice.")] = None,
) -> None:
    """Look at a server under load, and say with figures what would make it faster."""
    with plain_configuration_errors():
        if url is None and log is None:
            raise ConfigurationError("nothing to look at: name the URL of a server, or a file with its log by --log")
        if url is not None and "://" not in url:
            raise ConfigurationError(f"{url} is no URL; name that of a server, such as http://127.0.0.1:8080")
        evidence = Evidence()
        if log is not None:
            add_log(evidence, _lines(log))
        if url is not None:
            _watch(evidence, url, dict(parse_headers(header or ())), seconds)
        if not evidence.samples:
            raise ConfigurationError(f"{log} has no line about a batch, neither this server's, SGLang's nor vLLM's")
    found = advise(evidence)
    _print(Console(), evidence, found)
    if json_file is not None:
        with plain_configuration_errors():
            write_text(json_file, json.dumps([asdict(advice) for advice in found], indent=2) + "\n")


def _watch(evidence: Evidence, url: str, headers: dict[str, str], seconds: float) -> None:
    """Add what the metrics of a server say in the next seconds. Raises ConfigurationError if it has none."""
    metrics = f"{url.rstrip('/')}/metrics"
    try:
        text = fetch_text(metrics, headers)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{metrics}: {error}{remedy(error)}") from error
    if not read(text):
        raise ConfigurationError(f"{metrics} has no metrics of this server, vLLM, SGLang or text-generation-inference")
    evidence.engine = engine_of(text)
    with Observer(metrics, headers).watching() as seen:
        time.sleep(seconds)
    add_metrics(evidence, seen)


def engine_of(metrics: str) -> str:
    """Return the engine whose metrics these are, a key of `rules.OPTIONS`."""
    has_vllm = reports_vllm(metrics)
    if is_lmi_server(metrics):
        return "lmi-vllm" if has_vllm else "lmi"
    return "vllm" if has_vllm else "sglang"


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--log {log}: {error}") from error


def _print(console: Console, evidence: Evidence, found: list[Advice]) -> None:
    looks = f"{len(evidence.busy)} of {len(evidence.samples)} looks show load"
    console.print(f"{looks}; settings are named as in {evidence.engine}.", highlight=False)
    for advice in found:
        console.print(
            f"- {advice.finding}: {advice.remedy}. ({advice.source})", markup=False, highlight=False, soft_wrap=True
        )
    if not found:
        console.print("No rule finds anything to change.")
