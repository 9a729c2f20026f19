"""`lmi-server tune`: searches the options of a model for the highest throughput within limits of latency."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lmi_server.bench.command import bench_target, parse_weights
from lmi_server.bench.prompt_files import read_prompts
from lmi_server.bench.reports.page import Table as PageTable
from lmi_server.bench.reports.page import markdown, page
from lmi_server.bench.workload import RandomPrompts, Recorded, Workload
from lmi_server.client import numbers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.client.trial_server import MODEL, trial_server
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import write_text
from lmi_server.machine.environment import process_environment
from lmi_server.tune.adapter_costs import BASE, Cost, adapter_costs
from lmi_server.tune.confirmation import candidate_of, choose, confirm
from lmi_server.tune.measurement import Limits, Measurement, Traffic
from lmi_server.tune.outcome import TuneTrial, baseline_of, pareto
from lmi_server.tune.report import SearchResult, confirmation_text, cost_table, sections
from lmi_server.tune.result import as_json, difference, tuned_properties
from lmi_server.tune.space import Space, check_space, grid, parse_space, space_of_script

if TYPE_CHECKING:
    from lmi_server.tune.search import Search


class Objective(StrEnum):
    """What a search raises."""

    THROUGHPUT = "throughput"
    GOODPUT = "goodput"


_DURATION = re.compile(r"([0-9.]+)(ms|s|)")
_NOT_INSTALLED = "lmi-server tune needs optuna; pip install lmi-server[tune] brings it"


def tune(
    directory: Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory with a serving.properties.")],
    option: Annotated[
        list[str] | None,
        typer.Option(help="What to try: NAME=8,16,32 or NAME=LOW:HIGH or NAME=LOW:HIGH:STEP; once per key."),
    ] = None,
    trials: Annotated[
        int,
        numbers.count(
            "--trials", "Settings to try, those of earlier calls included; 0 measures the configuration as it is.", 0
        ),
    ] = 40,
    use_grid: Annotated[
        bool, typer.Option("--grid", help="Try all combinations, as vLLM's auto_tune.sh does.")
    ] = False,
    max_p99_e2el: Annotated[str | None, typer.Option(help="Limit of the p99 end to end, such as 13s.")] = None,
    max_p99_ttft: Annotated[str | None, typer.Option(help="Limit of the p99 to the first token, as 500ms.")] = None,
    max_p99_tpot: Annotated[str | None, typer.Option(help="Limit of the p99 per output token, such as 50ms.")] = None,
    max_p99_itl: Annotated[str | None, typer.Option(help="Limit of the p99 from token to token, as 200ms.")] = None,
    min_cache_hit: Annotated[
        str | None, typer.Option(help="Share of prompt tokens that must come from the prefix cache, such as 30%.")
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to raise: output tokens per second, or requests per second within limits.")
    ] = Objective.THROUGHPUT,
    concurrency: Annotated[
        int, numbers.count("--concurrency", "Requests at a time, fewer where the limits demand it.")
    ] = 32,
    requests: Annotated[int, numbers.count("--requests", "Requests of the run that judges a setting.")] = 128,
    api: Annotated[str, typer.Option(help="API of the requests, as in lmi-server bench.")] = "completions",
    input_tokens: Annotated[
        int | None, numbers.count("--input-tokens", "Words of random prompts; 128 by default.")
    ] = None,
    output_tokens: Annotated[
        int | None, numbers.count("--output-tokens", "Tokens that each generates; 128 by default.")
    ] = None,
    shared_prefix: Annotated[
        float | None,
        numbers.fraction("--shared-prefix", "Share of random prompts that is the same in all; 0 by default."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Prompts, as in lmi-server bench.")] = None,
    adapters: Annotated[
        str | None, typer.Option(help="Adapters by weight, such as base=1,french=3, as they will be used.")
    ] = None,
    pairs: Annotated[
        int,
        numbers.count(
            "--confirm",
            "Turns in which the best setting and the configuration as it is are measured again; 0 for none.",
            0,
        ),
    ] = 6,
    load_timeout: Annotated[float, numbers.seconds("--load-timeout", "Seconds in which the model must load.")] = 1800,
    study: Annotated[Path, typer.Option(help="SQLite file of the search; the same call goes on where it was.")] = Path(
        "lmi-tune.sqlite"
    ),
    seed: Annotated[int, numbers.seed("Seed of the search and of the prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all that was found.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="File for a report: a page with plots, or Markdown if its name ends with .md.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the found values to the model's file.")] = False,
) -> None:
    """Search options of a model for the most output tokens per second within limits, and print what to change."""
    variables = process_environment()
    with plain_configuration_errors():
        properties = _properties_of(directory)
        space = {**space_of_script(variables), **parse_space(option or ())}
        if not space:
            raise ConfigurationError("nothing to try: give --option NAME=VALUES, such as max_rolling_batch_size=8,32")
        check_space(directory, space, variables)
        if use_grid:
            list(grid(space))
        p99_s = _limits(max_p99_e2el, max_p99_ttft, max_p99_tpot, max_p99_itl, variables)
        if objective is Objective.GOODPUT and not p99_s:
            raise ConfigurationError("--objective goodput needs a limit that requests keep, such as --max-p99-e2el 13s")
        limits = Limits(p99_s, _share("--min-cache-hit", min_cache_hit or "0"), objective is Objective.GOODPUT)
        workload = _workload(data, input_tokens, output_tokens, shared_prefix, variables)
        target = bench_target("http://127.0.0.1:1", api, MODEL, True, ())
        traffic = Traffic(target, workload, parse_weights(adapters), requests, concurrency, seed)
        model = _TunedModel(directory.resolve(), properties, load_timeout)
        # Another model, another file, other traffic or other limits are another search.
        what = {
            "directory": str(model.directory),
            "properties": properties.read_text(encoding="utf-8"),
            "limits": [dict(p99_s), limits.min_cache_hit, objective],
            "load": [concurrency, requests, api, dict(traffic.weights), repr(workload), seed],
        }
        console = Console()
        search = _open_search(study, what, space, seed, use_grid)
        result = _search(console, search, space, model, traffic, limits, trials, pairs, study.with_suffix(".log"))
        _print(console, result)  # first: the files may not be writable
        if json_file is not None:
            write_text(json_file, json.dumps(as_json(result), indent=2) + "\n")
        if report is not None:
            write = markdown if report.suffix == ".md" else page
            write_text(report, write(f"Search of {model.directory.name}", sections(result)))
        if result.best is None:
            raise typer.Exit(1)
        if result.best.settings and apply:
            write_text(properties, result.after)
            console.print(f"{properties} is changed.", highlight=False, soft_wrap=True)
        elif result.best.settings:
            console.print("Nothing is changed; --apply writes this.")


@dataclass(frozen=True, slots=True)
class _TunedModel:
    """The model whose options are searched, its serving.properties, and the seconds in which it must load."""

    directory: Path
    properties: Path
    load_timeout_s: float


def _open_search(study: Path, what: Mapping[str, Any], space: Space, seed: int, is_grid: bool) -> Search:
    try:
        from lmi_server.tune.search import Search
    except ImportError as error:
        raise ConfigurationError(f"{_NOT_INSTALLED} ({error})") from error
    return Search(study, what, space, seed, is_grid)


def _search(
    console: Console,
    search: Search,
    space: Space,
    model: _TunedModel,
    traffic: Traffic,
    limits: Limits,
    trials: int,
    pairs: int,
    log: Path,
) -> SearchResult:
    with contextlib.ExitStack() as servers:
        measurement = Measurement(
            str(model.directory),
            traffic,
            limits,
            model.load_timeout_s,
            lambda: servers.enter_context(trial_server(log)),
        )
        for trial in search.run(trials, measurement):
            console.print(_line(trial), markup=False, highlight=False, soft_wrap=True)
        candidate = candidate_of(search.trials)
        confirmation = (
            confirm(candidate, pairs, measurement, search.recall) if candidate is not None and pairs else None
        )
        best = choose(search.trials, confirmation)
        costs = _costs(search, measurement, model, traffic, best)
    before = after = model.properties.read_text(encoding="utf-8")
    if best is not None and best.settings:
        after = tuned_properties(before, best, baseline_of(search.trials), confirmation)
    return SearchResult(
        trials=search.trials,
        space=space,
        importances=search.importances,
        confirmation=confirmation,
        costs=costs,
        concurrency=traffic.concurrency,
        has_data=isinstance(traffic.workload, Recorded),
        unused_adapters=sorted({path.name for path in model.directory.glob("adapters/*/")} - set(traffic.weights)),
        after=after,
        difference=difference(before, after, str(model.properties)),
    )


def _costs(
    search: Search, measurement: Measurement, model: _TunedModel, traffic: Traffic, best: TuneTrial | None
) -> list[Cost]:
    """Return what the adapters in the traffic cost with the best setting; nothing if there are none."""
    if best is None or not set(traffic.weights) - {BASE}:
        return []

    def measure() -> list[dict[str, Any]]:
        server, settings = measurement.server, best.settings
        return [
            asdict(cost) for cost in adapter_costs(server, model.directory, settings, traffic, model.load_timeout_s)
        ]

    return [Cost(**cost) for cost in search.recall(f"adapter costs of trial {best.number}", measure)]


def _print(console: Console, result: SearchResult) -> None:
    if result.best is None:
        console.print("No setting keeps the limits; the lines above say why.", style="red")
        return
    console.print(_front(pareto(result.trials, "e2el_ms"), result.unit))
    for key, importance in result.importances.items():
        console.print(f"{key}: {importance:.0%} of the differences", highlight=False)
    if result.costs:
        console.print(_rich(cost_table(result.costs), "what adapters cost"))
    if result.confirmation is not None:
        console.print(confirmation_text(result), markup=False, highlight=False, soft_wrap=True)
    if result.best.settings:
        console.print(result.difference, markup=False, highlight=False, soft_wrap=True)
    elif result.confirmation is None:
        console.print("The configuration as it is is the best that was found.")


def _rich(table: PageTable, title: str) -> Table:
    shown = Table(*table.columns, title=title)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _line(trial: TuneTrial) -> str:
    outcome = trial.outcome
    settings = " ".join(f"{key.removeprefix('option.')}={value}" for key, value in trial.settings.items())
    name = f"trial {trial.number}: {settings}" if trial.settings else "as it is"
    if outcome.value is None:
        return f"{name}: {outcome.reason}"
    p99 = outcome.figures["e2el_ms"]["p99"] / 1000
    return (
        f"{name}: {outcome.value:.1f} {outcome.unit} at {outcome.concurrency} requests, "
        f"p99 end to end {p99:.2f} s{f' ({outcome.reason})' if outcome.reason else ''}"
    )


def _front(trials: Sequence[TuneTrial], unit: str) -> Table:
    columns = ("trial", unit, "p99 end to end, s", "settings")
    table = Table(*columns, title="none is both faster and better in its p99 end to end")
    for trial in trials:
        settings = "\n".join(f"{key}={value}" for key, value in trial.settings.items()) or "as it is"
        p99 = trial.outcome.figures["e2el_ms"]["p99"] / 1000
        table.add_row(str(max(trial.number, 0)), f"{trial.outcome.value or 0:.1f}", f"{p99:.2f}", settings)
    return table


# --- the arguments ---


def _properties_of(directory: Path) -> Path:
    path = directory / "serving.properties"
    if not path.is_file():
        raise ConfigurationError(f"{directory} has no serving.properties; name a model directory")
    return path


def _limits(
    e2el: str | None, ttft: str | None, tpot: str | None, itl: str | None, variables: Mapping[str, str]
) -> dict[str, float]:
    script = variables.get("MAX_LATENCY_ALLOWED_MS", "").strip()
    given = {"e2el": e2el or (f"{script}ms" if script else None), "ttft": ttft, "tpot": tpot, "itl": itl}
    return {name: _seconds(f"--max-p99-{name}", text) for name, text in given.items() if text is not None}


def _seconds(name: str, text: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:
        value = 0.0
    if found is None or value <= 0:
        raise ConfigurationError(f'{name} "{text}" is not allowed; allowed: seconds, such as 13s, or 500ms')
    return value / 1000 if found[2] == "ms" else value


def _share(name: str, given: str) -> float:
    try:
        value = float(given.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigurationError(f'{name} "{given}" is not allowed; allowed: a percentage, such as 30%')
    return value


def _workload(
    data: Path | None,
    input_tokens: int | None,
    output_tokens: int | None,
    shared_prefix: float | None,
    variables: Mapping[str, str],
) -> Workload:
    if data is not None:
        return Recorded(read_prompts(data), output_tokens)
    if shared_prefix is None:  # as in the script
        shared_prefix = _share("variable MIN_CACHE_HIT_PCT", variables.get("MIN_CACHE_HIT_PCT", "").strip() or "0")
    return RandomPrompts(
        input_tokens or _whole("INPUT_LEN", variables),
        output_tokens or _whole("OUTPUT_LEN", variables),
        shared_prefix,
    )


def _whole(name: str, variables: Mapping[str, str]) -> int:
    text = variables.get(name, "").strip() or "128"
    if not text.isdecimal() or not int(text):
        raise ConfigurationError(f'variable {name} is "{text}"; it takes a number of tokens above 0')
    return int(text)
