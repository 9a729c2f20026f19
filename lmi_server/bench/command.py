"""`lmi-server bench`: puts a load on a server, and says how fast it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from lmi_server.bench import dialects
from lmi_server.bench.arrivals import BURSTINESS, Arrivals, ClosedLoop, OpenLoop, Replay
from lmi_server.bench.client import Target
from lmi_server.bench.observation import Measured, Observer
from lmi_server.bench.progress import show_progress
from lmi_server.bench.prompt_files import read_prompts
from lmi_server.bench.records import LATENCIES
from lmi_server.bench.reports import terminal_report as report
from lmi_server.bench.reports.html_report import html_report
from lmi_server.bench.run import Run, RunLength
from lmi_server.bench.server_metrics import fetch
from lmi_server.bench.workload import Prompt, RandomPrompts, Recorded, Tokenizer, Workload, with_adapters
from lmi_server.client import numbers
from lmi_server.client.server_calls import Headers, address, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import write_text
from lmi_server.machine.environment import process_environment
from lmi_server.processes.usage import find_listener

_API_HELP = (
    "API of the server: chat and completions are OpenAI's, lmi is LMI's /invocations, tgi is /generate(_stream)."
)
_CONCURRENCY = numbers.NumberFlag("--concurrency", 1, numbers.MAX_COUNT, is_integer=True)


def bench(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8080.")],
    api: Annotated[str, typer.Option(help=_API_HELP)] = "completions",
    model: Annotated[str, typer.Option(help="Name of the model in OpenAI's requests.")] = "lmi",
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: so many requests at a time; 1,8,32 makes three runs.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: so many requests per second; 2,4,8 makes three runs.")
    ] = None,
    burstiness: Annotated[
        float,
        numbers.number_option(
            numbers.NumberFlag("--burstiness", *BURSTINESS, takes_infinity=True),
            "Shape of the gaps of an open loop: 1 is Poisson, less is bursts, inf is even.",
        ),
    ] = 1.0,
    ramp_to: Annotated[
        float | None, numbers.factor("--ramp-to", "Rate at the end of --duration, from --rate on.")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SPEED",
            help="Open loop: send the prompts of a captured file at their times, or those of --data so many times as "
            "fast.",
        ),
    ] = None,
    requests: Annotated[
        int | None, numbers.count("--requests", "Requests, or chats, of each run; 200 without --duration.")
    ] = None,
    duration: Annotated[
        float | None, numbers.seconds("--duration", "Seconds in which each run sends requests.")
    ] = None,
    timeout: Annotated[float, numbers.seconds("--timeout", "Seconds after which a request is given up.")] = 600,
    data: Annotated[
        Path | None, typer.Option(help="Prompts: JSON lines with prompt, messages or turns, or ShareGPT's JSON.")
    ] = None,
    input_tokens: Annotated[
        int, numbers.count("--input-tokens", "Tokens of random prompts; words without --tokenizer.")
    ] = 128,
    output_tokens: Annotated[
        int | None, numbers.count("--output-tokens", "Tokens that each request generates; 128 with random prompts.")
    ] = None,
    shared_prefix: Annotated[
        float, numbers.fraction("--shared-prefix", "Share of random prompts that is the same in all.")
    ] = 0.0,
    turns: Annotated[
        int | None,
        numbers.count(
            "--turns", "Turns of each chat: of random prompts, or the most of --data. An answer is sent back."
        ),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model directory with a tokenizer.json.")] = None,
    adapters: Annotated[
        str | None, typer.Option(help="Adapters by weight, such as base=1,french=3; base is the model without one.")
    ] = None,
    stream: Annotated[bool, typer.Option(help="Have answers streamed, without which only their end is timed.")] = True,
    header: Headers = None,
    slo: Annotated[
        str | None, typer.Option(help="Limits in milliseconds for the goodput: ttft=500,tpot=50,itl=200,e2el=5000.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="URL of the server's Prometheus metrics; URL/metrics by default.")
    ] = None,
    warmup: Annotated[int, numbers.count("--warmup", "Requests before the first run, which are not measured.", 0)] = 1,
    seed: Annotated[int, numbers.seed("Seed of prompts, gaps and adapters.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="File for a report with plots, which opens offline.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="File for a line per run.")] = None,
    records_file: Annotated[Path | None, typer.Option("--records", help="File for a line of JSON per request.")] = None,
) -> None:
    """Put a load on a server, this one or another, and print how fast it answers."""
    with plain_configuration_errors():
        data, speed = _replay_source(data, replay)
        workload = _workload(data, input_tokens, output_tokens, shared_prefix, tokenizer, turns)
        runs = _arrivals(concurrency, rate, burstiness, ramp_to, duration, speed, workload)
        length = RunLength(_requests(requests, duration, speed), duration, timeout)
        target = bench_target(url, api, model, stream, header or ())
        observer = observer_of(target, metrics)
        weights, limits = parse_weights(adapters), _limits(slo)

        def prompts(run: int) -> Iterator[Prompt]:
            # Others in each run: a prefix cache may still have those of an earlier one.
            return with_adapters(workload.prompts(seed + run), weights, seed + run)

        console = Console()
        measured = uvloop.run(_run(target, observer, runs, prompts, length, seed, warmup, console))
    summaries = {title: run.figures(limits) for title, run in measured.items()}
    report.print_runs(console, summaries)
    settings = {"url": url, "api": api, "seed": seed, "stream": stream, "slo": slo, "data": data and str(data)}
    with plain_configuration_errors():
        if json_file is not None:
            report.write_json(json_file, settings, summaries)
        if html_file is not None:
            write_text(html_file, html_report(settings, summaries, measured))
        if csv_file is not None:
            report.write_csv(csv_file, summaries)
        if records_file is not None:
            report.write_records(records_file, measured)
    if not any(found["completed"] for found in summaries.values()):
        raise typer.Exit(1)


async def _run(
    target: Target,
    observer: Observer,
    runs: Mapping[str, Arrivals],
    prompts: Callable[[int], Iterator[Prompt]],
    length: RunLength,
    seed: int,
    warmup: int,
    console: Console,
) -> dict[str, Measured]:
    """Return what each run gave. Raises ConfigurationError if the server cannot answer the requests before it."""
    if warmup:
        before = RunLength(warmup, None, length.timeout_s)
        first = await Run(target, ClosedLoop(1), prompts(-1), before).run(seed)
        if all(record.error for record in first):
            raise ConfigurationError(f"the server does not answer as it should: {first[0].error}")
    found = {}
    with show_progress(console) as show:
        for number, (title, arrivals) in enumerate(runs.items()):
            run = Run(target, arrivals, prompts(number), length)
            with observer.watching() as seen:
                records = await run.run(seed, show(title, length))
            found[title] = Measured(records, seen)
    return found


# --- the arguments ---


def bench_target(url: str, api: str, model: str, stream: bool, headers: Sequence[str]) -> Target:
    """Return where requests go. Raises ConfigurationError if the API or a header is not known."""
    if api not in dialects.NAMES:
        raise ConfigurationError(f'--api "{api}" is not allowed; allowed: {", ".join(dialects.NAMES)}')
    given = parse_headers(headers)
    host, port, prefix, tls = address(url)
    return Target(host, port, prefix, tls, given, model, dialects.dialect_of(api, stream), stream)


def observer_of(target: Target, metrics: str | None) -> Observer:
    """Return what to look at during a run. Raises ConfigurationError if `metrics` is given and cannot be read."""
    headers = dict(target.headers)
    pid = find_listener(target.host, target.port)
    if metrics is not None:
        try:
            fetch(metrics, headers)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--metrics {metrics}: {error}") from error
    return Observer(metrics or f"{target.url}/metrics", headers, pid, process_environment() if pid else None)


def _replay_source(data: Path | None, replay: str | None) -> tuple[Path | None, float | None]:
    """Return the file of the prompts, and how many times as fast as recorded they are sent; None without --replay.

    Raises ConfigurationError if --replay is neither a speed nor a file, or a file beside --data.
    """
    if replay is None:
        return data, None
    try:
        return data, _positive("--replay", str(float(replay)))
    except ValueError:
        if data is not None:
            raise ConfigurationError(f'--replay "{replay}" is a file beside --data; give one, or a speed') from None
        if not Path(replay).exists():
            raise ConfigurationError(f'--replay "{replay}" is neither a speed above 0 nor a file') from None
        return Path(replay), 1.0


def _workload(
    data: Path | None,
    input_tokens: int,
    output_tokens: int | None,
    shared_prefix: float,
    tokenizer: Path | None,
    turns: int | None,
) -> Workload:
    if data is not None:
        return Recorded(read_prompts(data), output_tokens, turns)
    return RandomPrompts(
        input_tokens,
        output_tokens or 128,
        shared_prefix,
        None if tokenizer is None else _tokenizer(tokenizer),
        turns or 1,
    )


def _tokenizer(directory: Path) -> Tokenizer:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigurationError("--tokenizer needs the package tokenizers: pip install tokenizers") from error
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    if not path.is_file():
        raise ConfigurationError(f"--tokenizer {directory}: there is no {path}")
    found: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return found


def _arrivals(
    concurrency: str | None,
    rate: str | None,
    burstiness: float,
    ramp_to: float | None,
    duration: float | None,
    replay: float | None,
    workload: Workload,
) -> dict[str, Arrivals]:
    if len([given for given in (concurrency, rate, replay) if given is not None]) > 1:
        raise ConfigurationError("--concurrency, --rate and --replay exclude each other: give one of them")
    if ramp_to is not None and (rate is None or duration is None):
        raise ConfigurationError("--ramp-to needs --rate, where it begins, and --duration")
    if replay is not None:
        return {"replay": Replay(_times(workload), replay)}
    if rate is not None:
        rates = [_positive("--rate", text) for text in rate.split(",")]
        return {f"{each:g} requests/s": OpenLoop(each, burstiness, ramp_to, duration or 0.0) for each in rates}
    counts = [_CONCURRENCY.parse(text) for text in (concurrency or "1").split(",")]
    return {f"concurrency {count}": ClosedLoop(count) for count in counts}


def _times(workload: Workload) -> tuple[float, ...]:
    times = [prompt.at for prompt in workload.recorded] if isinstance(workload, Recorded) else []
    if not times or None in times:
        raise ConfigurationError('--replay needs --data with lines that all have "at", the second of the request')
    return tuple(at for at in times if at is not None)


def _requests(requests: int | None, duration: float | None, replay: float | None) -> int | None:
    if requests is not None or duration is not None or replay is not None:
        return requests
    return 200


def _positive(name: str, text: str) -> float:
    return float(numbers.NumberFlag(name, 0, numbers.MAX_FACTOR, is_above=True).parse(text))


def parse_weights(text: str | None) -> dict[str, float]:
    """Return adapters by weight of NAME=WEIGHT,... Raises ConfigurationError if one is no number above 0."""
    return {name: _positive(f"--adapters {name}", value or "1") for name, value in _pairs(text)}


def _limits(text: str | None) -> dict[str, float]:
    limits = {name: _positive(f"--slo {name}", value) / 1000 for name, value in _pairs(text)}
    for name in limits:
        if name not in LATENCIES:
            raise ConfigurationError(f'--slo "{name}" is not allowed; allowed: {", ".join(LATENCIES)}')
    return limits


def _pairs(text: str | None) -> list[tuple[str, str]]:
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    return [(name.strip(), value.strip()) for name, _, value in pairs]
