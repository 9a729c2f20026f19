"""Writes what is generated in docs/, but for the keys: `python -m scripts.docs_pages`.

That is docs/commands.md (the commands with their options), docs/errors.md (statuses and types), and the table in
docs/one-gpu.md (which model fits on which GPU). lmi_server.explain.reference_page writes the pages of keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from lmi_server.commands.cli import app
from lmi_server.contract import errors
from lmi_server.contract.errors import LmiServerError
from lmi_server.dialects.errors import error_reply
from lmi_server.ray.recommendation.accelerators import ACCELERATORS, FAMILIES, FURTHER_FAMILIES
from lmi_server.ray.recommendation.recommendation import find_model, for_degree, memory_on

DOCS = Path(__file__).parent.parent / "docs"
GPUS = ("T4", "L4", "A10G", "A100-40G", "A100-80G", "H100", "H200")
CONTEXT = 8192
_TABLE = re.compile(r"(<!-- table of GPUs -->\n).*?(<!-- end of table -->)", re.DOTALL)
_GENERATED = "This page is generated (`python -m scripts.docs_pages`)."


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    one_gpu = (DOCS / "one-gpu.md").read_text(encoding="utf-8")
    return {
        "commands.md": commands_page(),
        "errors.md": errors_page(),
        "one-gpu.md": _TABLE.sub(lambda marks: f"{marks[1]}\n{gpu_table()}\n{marks[2]}", one_gpu),
    }


# --- commands ---


def commands_page() -> str:
    """Return a section for each command, with its arguments and options."""
    head = f"# Commands\n\nEvery command of `lmi-server` with its arguments and options. {_GENERATED}\n"
    return "\n".join((head, *_sections(typer.main.get_command(app), "lmi-server")))


def _sections(command: Any, name: str) -> Iterator[str]:
    """Yield the section of a command, or those of the commands of a group."""
    for each, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _sections(inner, f"{name} {each}")
    if hasattr(command, "commands"):
        return
    rows = [(_written(each), " ".join((each.help or "").split())) for each in command.params if not each.hidden]
    table = _table(("argument or option", "meaning"), rows) if rows else ""
    yield f"## {name}\n\n{' '.join((command.help or '').split())}\n\n{table}"


def _written(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


# --- errors ---


def errors_page() -> str:
    """Return a table of every error that the server raises, with its status in both APIs."""
    head = (
        "# Errors\n\nWhich status and type each error has, in OpenAI's form and in LMI's, and whether a client should"
        f" try again. {_GENERATED}\n\nThe message of an error names what is wrong and what helps. On OpenAI's paths"
        " (`/v1/...`)"
        ' the body is `{"error": {"message", "type", "param", "code"}}`, on LMI\'s `{"code", "type",'
        ' "message", "error"}`. `Retry-After` stands where a retry helps. If an answer fails after its first byte,'
        " its status stays and the stream ends with an error event.\n\n"
    )
    return head + _table(("error", "OpenAI: status, `code`", "LMI: status, `type`", "meaning"), _error_rows())


def _error_rows() -> Iterator[Sequence[str]]:
    for error in _classes(LmiServerError):
        made = error("message")
        (openai, _, body), (lmi, _, lmi_body) = (
            error_reply(route, made) for route in ("v1/completions", "invocations")
        )
        meaning = " ".join((error.__doc__ or "").split())
        yield (
            f"`{error.__name__}`",
            f"{openai} {_value(body, 'code')}".strip(),
            f"{lmi} {_value(lmi_body, 'type')}".strip(),
            meaning + (" Try again." if made.retry_after is not None else ""),
        )


def _classes(base: type[LmiServerError]) -> Iterator[type[LmiServerError]]:
    for each in base.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from _classes(each)


def _value(body: bytes, name: str) -> str:
    found = re.search(rf'"{name}":\s*"([^"]+)"', body.decode())
    return f"`{found[1]}`" if found else ""


# --- GPUs ---


def gpu_table() -> str:
    """Return which models of known families fit on one GPU of each kind, in 16 bits."""
    names = sorted({**FAMILIES, **FURTHER_FAMILIES}, key=_weights)
    heads = ("model", "weights", *(f"{name} ({ACCELERATORS[name].memory_gib:g} GiB)" for name in GPUS))
    rows = ((name, f"{_weights(name) / 2**30:.1f} GiB", *(_fit(name, gpu) for gpu in GPUS)) for name in names)
    return _table(heads, rows)


def _weights(name: str) -> int:
    return memory_on(find_model(name), ACCELERATORS["H200"], 1, CONTEXT).weights_bytes or 0


def _fit(name: str, gpu: str) -> str:
    """Return how many requests run, and the tokens of KV cache in thousands."""
    found = for_degree(find_model(name), ACCELERATORS[gpu], 1, "throughput", CONTEXT)
    if found is None:
        return "no"
    return f"{found.max_num_seqs} ({(found.memory.kv_tokens_that_fit or 0) // 1000}k)"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    for _name, _text in pages().items():
        (DOCS / _name).write_text(_text, encoding="utf-8")
