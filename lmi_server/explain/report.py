"""Prints an explanation as text that reads in 80 columns, on a terminal or in a pipe: no key or value is broken."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from lmi_server.configuration.checks.memory_estimate import gib
from lmi_server.configuration.declaration import written
from lmi_server.contract.texts.quoting import for_terminal
from lmi_server.explain.explanation import ExplainedOption, Explanation

_INDENT = "  "
_MEANING = "      "
_WIDEST_KEY = 36  # longer keys push their values to the right


def print_explanation(explanation: Explanation, console: Console, with_defaults: bool) -> None:
    """Print first what decides: model, handler and reason, the values that some layer sets, and the problems."""
    for style, line in _lines(explanation, console.width, with_defaults):
        console.print(Text(for_terminal(line), style=style), soft_wrap=True)


def _lines(explanation: Explanation, width: int, with_defaults: bool) -> Iterator[tuple[str, str]]:
    """Yield every line with its style."""
    decided = [option for option in explanation.options if option.layer != "default"]
    defaults = [option for option in explanation.options if option.layer == "default"]
    yield "bold", f"{explanation.name}: {explanation.model}"
    yield "", f"handler {explanation.handler}: {explanation.handler_reason}"
    if explanation.division is not None:
        yield "", f"devices: {explanation.division}"
    options = [*decided, *explanation.unknown]
    yield from _section("Decided", _values(options, explanation.model_dir, width))
    yield from _section("Problems", _indent(explanation.problems), "red")
    yield from _section("Not available here", _indent(explanation.unavailable), "red")
    yield from _section("Files", _indent(explanation.files), "red")
    yield from _section("Warnings", _indent(explanation.warnings), "yellow")
    yield from _section("Worker command", _indent([shlex.join(explanation.worker_command)]))
    yield from _section("MPI launcher", _indent(_launcher(explanation)))
    variables = [f"{name}={value}" for name, value in explanation.worker_environment.items()]
    yield from _section("Worker environment", _indent(variables))
    yield from _section("Environment of the engine", _indent(explanation.environment))
    yield from _section("Engine arguments", _pairs(explanation.engine_arguments))
    yield from _section("Memory of one worker, on each of its devices", _pairs(_memory(explanation.memory)))
    if with_defaults:
        yield from _section("Defaults", _values(defaults, explanation.model_dir, width))
    else:
        yield "", ""
        yield "", f"{len(defaults)} keys have their defaults: --all shows them"


def _section(title: str, lines: Iterable[str], style: str = "") -> Iterator[tuple[str, str]]:
    """Yield the title and the lines; nothing if there are no lines."""
    for number, line in enumerate(lines):
        if not number:
            yield "", ""
            yield "italic", title
        yield style, line


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return (f"{_INDENT}{line}" for line in lines)


def _values(options: Sequence[ExplainedOption], model_dir: str, width: int) -> Iterator[str]:
    """Yield key, value and origin of each option, and what it means below."""
    widest = max((len(option.key) for option in options if len(option.key) <= _WIDEST_KEY), default=0)
    for option in options:
        value = written(option.value).replace("\n", "\\n")
        line = f"{_INDENT}{option.key:<{widest}}  {value}"
        origin = _origin(option, model_dir)
        if origin and len(line) + 2 + len(origin) <= width:
            yield f"{line}  {origin}"
        else:
            yield line
            yield from ([f"{_MEANING}{origin}"] if origin else [])
        meaning = f"{option.meaning} [{option.note}]" if option.note else option.meaning
        yield from textwrap.wrap(
            meaning,
            max(40, width),
            initial_indent=_MEANING,
            subsequent_indent=_MEANING,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _origin(option: ExplainedOption, model_dir: str) -> str:
    """Return file and line, or the layer; nothing for a default."""
    if option.layer == "default":
        return ""
    origin = (option.place or option.layer).removeprefix(f"{model_dir}/")
    return f"{option.layer}, {origin}" if option.layer in ("engine alias", "deprecated key") else origin


def _launcher(explanation: Explanation) -> Sequence[str]:
    """Return a line about mpirun; empty if the worker is one process, or if mpirun is not installed."""
    mpirun = explanation.machine["mpirun"]
    if "WORLD_SIZE" not in explanation.worker_environment or mpirun is None:
        return ()
    return [f"{mpirun['implementation']} {mpirun['version']}: {mpirun['path']}"]


def _pairs(pairs: Mapping[str, Any]) -> Iterator[str]:
    widest = max(map(len, pairs), default=0)
    return (f"{_INDENT}{name:<{widest}}  {value}" for name, value in pairs.items())


def _memory(memory: Mapping[str, Any]) -> Mapping[str, str]:
    per_token, fit, tokens = memory["kv_bytes_per_token"], memory["kv_tokens_that_fit"], memory["kv_tokens"]
    needed = f"{gib(memory['kv_bytes'])} for {tokens} tokens" if tokens else "unknown: config.json names no context"
    unquantized, reserved = memory["unquantized_bytes"], memory["kv_reserved_bytes"]
    rows = {
        "devices": f"{memory['devices']} ({memory['device_kind']})",
        "weights": gib(memory["weights_bytes"]),
        "weights without quantisation": unquantized and gib(unquantized),
        "KV cache per token": "unknown" if per_token is None else f"{per_token} bytes",
        "KV cache that is needed at most": per_token is not None and needed,
        "states of recurrent layers": memory["state_bytes"] and gib(memory["state_bytes"]),
        "encoded images": memory["image_bytes"] and f"{gib(memory['image_bytes'])} at most",
        "KV cache that the worker reserves": reserved and gib(reserved),
        "KV cache that fits": fit is not None and f"{fit} tokens",
        "free": gib(memory["available_bytes"]),
    }
    return {name: text for name, text in rows.items() if text}
