"""`lmi-server verify`: asks two versions of a model the same, and says what changed."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lmi_server.bench.prompt_files import read_prompts
from lmi_server.bench.workload import Prompt, RandomPrompts
from lmi_server.client.numbers import count, factor, fraction, seconds
from lmi_server.client.server_calls import Headers, ServerCalls, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.client.trial_server import LoadFailedError, TrialServer, trial_server
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import write_text
from lmi_server.verify import report
from lmi_server.verify.asking import Side
from lmi_server.verify.comparison import ComparisonSummary, Pair, compare, summarize
from lmi_server.verify.waiting import Unanswered, Waiting, lines_while_waiting

_WORDS = 48  # of a random prompt
_AT_ONCE = 8  # prompts that the old version is asked again
_SCHEMES = ("http://", "https://")
OLD, NEW = "old", "new"


def verify(
    old: Annotated[str, typer.Argument(help="URL of a server, model directory, or with --server a version.")],
    new: Annotated[str, typer.Argument(help="The same of what is to take its place.")],
    data: Annotated[
        Path | None, typer.Option(help="Prompts: a file for bench, or a captured one; random words without it.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Server of a model in two versions, which OLD and NEW name then.")
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model on servers.")] = "lmi",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value in place of that in the serving.properties of NEW.")
    ] = None,
    requests: Annotated[int, count("--requests", "Prompts at most.")] = 50,
    output_tokens: Annotated[int, count("--output-tokens", "Tokens of an answer at most.")] = 64,
    max_changed: Annotated[
        float | None,
        fraction("--max-changed", "Percent of answers that may change; the exit code is 1 beyond that.", 100),
    ] = None,
    max_slower: Annotated[
        float | None,
        factor("--max-slower", "Times as slow as before that new may be, at the lower end of the interval."),
    ] = None,
    timeout: Annotated[float, seconds("--timeout", "Seconds for an answer.")] = 600,
    load_timeout: Annotated[float | None, seconds("--load-timeout", "Seconds for loading a model directory.")] = None,
    header: Headers = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all answers and figures.")] = None,
) -> None:
    """Ask two versions of a model the same, greedily, and print which answers changed, by how much, and the speed."""
    with plain_configuration_errors(), tempfile.TemporaryDirectory() as directory:
        prompts = _prompts(data, requests)
        sides = Given(OLD, old, {}), Given(NEW, new, _settings(changes or ()))
        headers = dict(parse_headers(header or ()))
        log = Path(directory, "server.log")
        if old == new and not changes:
            typer.echo("OLD and NEW are the same: what differs is noise", err=True)
        with (
            lines_while_waiting() as waiting,
            open_sides(*sides, server, model, headers, log, load_timeout, waiting) as (before, after),
        ):
            pairs = list(_ask(prompts, before, after, output_tokens, timeout, waiting))
            waiting.do("asking old again, for the noise")
            noise = summarize(_ask_again(prompts, pairs, before, output_tokens, timeout))
    summary = summarize(pairs)
    for line in report.lines(summary, noise, pairs):
        typer.echo(line)
    if json_file is not None:
        with plain_configuration_errors():
            write_text(json_file, report.as_json(summary, noise, pairs))
    complaints = list(_complaints(summary, max_changed, max_slower))
    for complaint in complaints:
        typer.echo(f"not as it should be: {complaint}", err=True)
    if complaints:
        raise typer.Exit(1)


def _ask(
    prompts: Sequence[Prompt], old: Side, new: Side, output_tokens: int, timeout_s: float, waiting: Waiting
) -> Iterator[Pair]:
    """Yield the pair of each prompt. The one that is asked first changes from prompt to prompt.

    Raises ConfigurationError if one does not answer at all: the first time, or three times in a row.
    """
    unanswered = Unanswered(timeout_s)
    for side in (old, new):  # the first answer pays for what is made then
        waiting.do(f"waiting for the first answer of {side.title}, {side.server.url}")
        unanswered.count(side, side.ask(prompts[0], 2, timeout_s), 1)
    for number, prompt in enumerate(prompts):
        answers = {}
        for side in (new, old) if number % 2 else (old, new):
            waiting.do(f"prompt {number + 1} of {len(prompts)}: waiting for {side.title}")
            answers[side.title] = side.ask(prompt, output_tokens, timeout_s)
            unanswered.count(side, answers[side.title])
        yield compare(_excerpt(prompt), answers[old.title], answers[new.title])


def _ask_again(
    prompts: Sequence[Prompt], pairs: Sequence[Pair], old: Side, output_tokens: int, timeout_s: float
) -> list[Pair]:
    """Return the old answers to some prompts beside those to the same prompts at once: what rounding alone changes."""
    some = range(0, len(prompts), -(-len(prompts) // _AT_ONCE))
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        again = threads.map(lambda number: old.ask(prompts[number], output_tokens, timeout_s), some)
        return [
            compare(pairs[number].prompt, pairs[number].old, answer) for number, answer in zip(some, again, strict=True)
        ]


def _excerpt(prompt: Prompt) -> str:
    return prompt.text or str(prompt.messages[-1].get("content", ""))


def _prompts(data: Path | None, count: int) -> list[Prompt]:
    if data is None:
        return list(itertools.islice(RandomPrompts(_WORDS, 64).prompts(0), count))
    return read_prompts(data)[:count]


def _settings(changes: Sequence[str]) -> dict[str, str]:
    pairs = [change.partition("=") for change in changes]
    for key, separator, _ in pairs:
        if not (key and separator):
            raise ConfigurationError(f'--set "{key}" is not allowed; allowed: key=value')
    return {key.strip(): value.strip() for key, _, value in pairs}


def _complaints(summary: ComparisonSummary, max_changed: float | None, max_slower: float | None) -> Iterator[str]:
    if summary.failed_new > summary.failed_old:
        yield f"{summary.failed_new} requests failed, and {summary.failed_old} before"
    if summary.failed_old == summary.prompts:
        yield "no request was answered before, so that nothing was compared"
    elif not summary.compared:
        yield "no request was answered by both, so that nothing was compared"
    if max_changed is not None and summary.changed * 100 > max_changed * summary.compared:
        yield f"{summary.changed} of {summary.compared} answers changed; --max-changed {max_changed:g} percent"
    if max_slower is not None and summary.latency is not None and summary.latency.interval[0] > max_slower:
        low = summary.latency.interval[0]
        yield f"a token takes {low:.3f} times as long at least; --max-slower {max_slower:g}"


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says of one side. `settings` change those of a model directory."""

    title: str
    name: str
    settings: Mapping[str, str]

    @property
    def is_url(self) -> bool:
        return self.name.startswith(_SCHEMES)


@contextlib.contextmanager
def open_sides(
    old: Given,
    new: Given,
    server: str | None,
    model: str,
    headers: Mapping[str, str],
    log: Path,
    timeout_s: float | None,
    waiting: Waiting,
) -> Iterator[tuple[Side, Side]]:
    """Return both sides, ready to answer; models are unloaded at the end. Raises ConfigurationError."""
    if server is not None:
        calls = ServerCalls(server, headers)
        yield Side(old.title, calls, model, old.name), Side(new.title, calls, model, new.name)
        return
    with contextlib.ExitStack() as stack:
        started: list[TrialServer] = []

        def own_server() -> TrialServer:
            if not started:
                started.append(stack.enter_context(trial_server(log)))
            return started[0]

        before, after = (_side(given, model, headers, own_server, timeout_s, waiting) for given in (old, new))
        yield before, after


def _side(
    given: Given,
    model: str,
    headers: Mapping[str, str],
    own_server: Callable[[], TrialServer],
    timeout_s: float | None,
    waiting: Waiting,
) -> Side:
    if given.is_url:
        if given.settings:
            raise ConfigurationError(f"--set changes a model directory, and {given.name} is a server; leave it out")
        return Side(given.title, ServerCalls(given.name, headers), model)
    waiting.do(f"loading {given.title}, {given.name}")
    server = own_server()
    path = Path(given.name)
    place = str(path.resolve()) if path.exists() else given.name
    try:
        server.load(place, given.settings, timeout_s, name=given.title)
    except LoadFailedError as error:
        raise ConfigurationError(f"{given.name} does not load: {error}") from error
    return Side(given.title, ServerCalls(server.url, {}), given.title)
