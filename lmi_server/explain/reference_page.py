"""Writes docs/configuration.md, the pages in docs/configuration/ and the tables of docs/ray-keys.md from declarations.

python -m lmi_server.explain.reference_page docs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from lmi_server.configuration.declaration import (
    Deprecated,
    DeprecatedValue,
    Documented,
    Mark,
    NoEffect,
    Option,
    Options,
    Unavailable,
    ValueMeans,
    written,
)
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, load_options_type
from lmi_server.configuration.model_file.checking import allowed_in_words
from lmi_server.configuration.model_file.llm_config import LlmConfigFile
from lmi_server.configuration.model_file.rayllm import RayLlmFile
from lmi_server.configuration.model_file.serve_sections import Section, section_of
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.machine.environment import VARIABLES

_ROLLING_BATCH = "option.rolling_batch"
_MODEL_FILES: dict[str, type[Section]] = {"RayLLM": RayLlmFile, "LLMConfig": LlmConfigFile}

_INTRODUCTION = """\
# Configuration

How a model and the server are configured, and where each key is described. This page and the pages of all keys are
generated from the declarations in the code (`python -m lmi_server.explain.reference_page docs`).

| page | what it lists |
| --- | --- |
{contents}
The pages of the handlers are in the table below.

A model directory holds a `serving.properties` with lines `key=value` (the grammar of Java's `.properties`, in UTF-8).
`lmi-server explain DIR` shows the value of each key and its source. `lmi-server check DIR` shows all errors at once.

The value of a key comes from the highest layer that has one:

1. SageMaker's overriding variables
2. the call that registers the model
3. `serving.properties`
4. `OPTION_<KEY>` (`option.<key>`), `ARGS_<KEY>` (other keys), `HF_MODEL_ID`, variables of text-generation-inference
5. values that an engine alias or a deprecated key stands for
6. values that follow from the model and the machine
7. variables that only set defaults
8. the defaults on these pages

If one layer has two spellings of a key, the first one on its page wins. With a wrong value a model does not start. An
unknown key gives a warning that names the most similar known key. Arguments of vLLM's engine are passed on to it, and a
`model.py` gets all unknown keys; all other handlers ignore them.

## Engine aliases

- `engine=DeepSpeed` is `engine=Python`, `option.mpi_mode=true`, `option.entryPoint=djl_python.deepspeed`.
- `engine=MPI` is `engine=Python`, `option.mpi_mode=true`, `option.entryPoint=djl_python.huggingface`.

A key that is given itself wins over the value that an alias stands for.

## Entry points

`option.entryPoint` is one of the names below, a Python file of the model directory, an absolute path, or a dotted
module.
With `djl_python.huggingface`, and without an entry point, `option.rolling_batch` chooses the handler.
"""

_LOG_LINES = """\
## The log lines of the rolling batch

While requests run, the scheduler writes such a line every five seconds:

    Decode batch. #running-req: 32, #token: 37061, token usage: 0.82, gen throughput (token/s): 933.01, #queue-req: 85

The more requests run together, the more tokens are generated in a second. The advice is SGLang's:

- `#queue-req` counts all requests of the model that wait. If it is often 0, the clients send too few requests at a time
  for the highest throughput; 50 to 500 are healthy. More of them only wait for longer.
- `token usage` is the share of the KV cache that running requests fill; above 0.9 it is well used. If it stays below
  0.9 while `#queue-req` is not 0 and fewer requests run than `option.max_rolling_batch_size` allows, lower
  `option.schedule_conservativeness`, to 0.3 for example. That happens if requests allow many tokens and end early.
- If `decode out of memory happened` is in the log often, raise `option.schedule_conservativeness`, to 1.3 for example.
  Now and then it does no harm.
- If memory runs out, lower `option.chunked_prefill_size` when it happens in prefill, and
  `option.max_rolling_batch_size` when it happens while decoding. A lower `option.mem_fraction_static` helps with both.
- `option.schedule_policy=lpm` is for requests that share prefixes. If none do, or if such requests are sent together,
  `fcfs` does as well at less cost. The policy chooses among the `option.schedule_window` oldest of the requests that
  wait; with 0 it chooses only among requests that have a place.
- If the device has memory left, several workers (`minWorkers`) serve more than one.
"""


_GENERATED = "This page is generated; [configuration.md](../configuration.md) says where values come from.\n"
_SETTINGS = "Each is a variable `SERVING_<KEY>`, a line of `config.properties` or a flag of `lmi-server serve`"


def reference_pages() -> dict[str, str]:
    """Return the text of each page by its path below docs/."""
    shared = {option.key: option for option in ModelOptions.declared_options()}
    general = [
        ("Keys of the model server", "The workers of a model, and how its requests wait", _keys_of(ServingOptions)),
        ("Keys of every handler", "What every handler knows beside its own keys", _keys_of(ModelOptions)),
        ("Settings of the server", _SETTINGS, _keys_of(ServerSettings)),
        ("Variables", "Which key each environment variable stands for, and in which layer", _variables()),
    ]
    of_handlers = [_handler_page(specs, shared) for specs in _by_options((*HANDLERS.specs, HANDLERS.java))]
    contents = "".join(f"| [{title}]({_path(title)}) | {purpose} |\n" for title, purpose, _ in general)
    index = "\n".join((_INTRODUCTION.format(contents=contents), _handlers()))
    pages = {
        _path(title): f"# {title}\n\n{purpose}.\n{_GENERATED}\n{body}"
        for title, purpose, body in (*general, *of_handlers)
    }
    return {"configuration.md": index, **pages}


def _path(title: str) -> str:
    """Return where the page with this title is, below docs/."""
    name = re.sub(r"\W+", "-", title.removeprefix("Keys of ").lower())
    return f"configuration/{name}.md"


def _handlers() -> str:
    rows = (
        (
            _link(spec),
            _names(spec.entry_points),
            _names(spec.rolling_batches),
            "yes" if spec.handler else "options only",
        )
        for spec in (*HANDLERS.specs, HANDLERS.java)
    )
    return _table(("Handler", "`option.entryPoint`", "`option.rolling_batch`", "In this version"), rows)


def _by_options(specs: Iterable[HandlerSpec]) -> Iterable[Sequence[HandlerSpec]]:
    """Return the handlers, grouped by their options class."""
    together: dict[str, list[HandlerSpec]] = {}
    for spec in specs:
        together.setdefault(spec.options, []).append(spec)
    return together.values()


def _title(specs: Sequence[HandlerSpec]) -> str:
    return f"Keys of {' and '.join(spec.title for spec in specs)}"


def _link(spec: HandlerSpec) -> str:
    [specs] = [specs for specs in _by_options((*HANDLERS.specs, HANDLERS.java)) if spec in specs]
    return f"[{spec.title}]({_path(_title(specs))})"


def _handler_page(specs: Sequence[HandlerSpec], shared: dict[str, Option]) -> tuple[str, str, str]:
    # A key that a handler declares just like ModelOptions stands once, on the page of all handlers.
    declared = load_options_type(specs[0]).declared_options()
    body = _keys([option for option in declared if not _is_same(option, shared.get(option.key))])
    if not specs[0].handler:
        body = f"This version checks and explains these keys; it cannot serve with them yet.\n\n{body}"
    if "scheduler" in specs[0].rolling_batches:
        body = f"{body}\n{_LOG_LINES}"
    return _title(specs), "What this handler has beside or in place of the keys of every handler", body


def _is_same(option: Option, other: Option | None) -> bool:
    return option == other and other is not None and option.description == other.description


def _keys_of(declaring: type[Options]) -> str:
    return _keys(declaring.declared_options())


def _keys(options: Sequence[Option]) -> str:
    rows = (
        (f"`{option.key}`", _code(written(option.default)), option.allowed, " ".join(_sentences(option)))
        for option in options
    )
    return _table(("Key", "Default", "Allowed", "Meaning"), rows)


def _sentences(option: Option) -> Iterator[str]:
    yield option.description
    if option.aliases:
        yield f"Also written {_names(option.aliases)}{', with the same value' if option.must_agree else ''}."
    for mark in option.marks:
        yield _sentence(mark, option)


def _sentence(mark: Mark, option: Option) -> str:
    match mark:
        case Deprecated():
            return f"Deprecated: {mark.advice}."
        case DeprecatedValue():
            return f"`{mark.value}` is deprecated: {mark.advice}."
        case Documented():
            return f"LMI's documentation has {_code(mark.default or '')}; {mark.reason}."
        case NoEffect():
            return f"No effect: {mark.reason}."
        case ValueMeans():
            return f"`{mark.value}` is the same as {_code('='.join(mark.stands_for))}."
        case Unavailable():
            return _limit(mark, option)


def _limit(mark: Unavailable, option: Option) -> str:
    """Return which values are not served and by whom; values that choose another handler are served by it."""
    refused = [value for value in option.choices if mark.applies(value)]
    chooses = option.key == _ROLLING_BATCH and mark in _marks(ModelOptions, option.key)
    left = [value for value in refused if not (chooses and _is_served(option.key, value))]
    if refused and not left:
        return "Each other value chooses the handler that serves it."
    named = _names(map(written, left)) or mark.shown
    values = f": {named}" if named else ""
    limited, free = _divide_by_limit(mark, option.key)
    if not free:
        return f"Not available in this version{values}; {mark.instead}."
    if len(limited) <= len(free):
        return f"Not available with {', '.join(limited)}{values}; {mark.instead}."
    return f"Only with {', '.join(free)}{values}; otherwise {mark.instead}."


def _is_served(key: str, value: Any) -> bool:
    """Return whether a handler serves this value."""
    return any(not _refuses(spec, key, value) for spec in HANDLERS.specs)


def _refuses(spec: HandlerSpec, key: str, value: Any) -> bool:
    marks = _marks(load_options_type(spec), key)
    return any(isinstance(mark, Unavailable) and mark.applies(value) for mark in marks)


def _divide_by_limit(mark: Unavailable, key: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return which handlers share a limit of the keys of every handler, and which lift it.

    A limit that one handler declares itself stands in its own section: none lifts it.
    """
    specs = (*HANDLERS.specs, HANDLERS.user_code)
    limited = [spec.title for spec in specs if mark in _marks(load_options_type(spec), key)]
    is_shared = mark in _marks(ModelOptions, key)
    return limited, [spec.title for spec in specs if is_shared and spec.title not in limited]


def _marks(declaring: type[Options], key: str) -> Sequence[Mark]:
    return next((option.marks for option in declaring.declared_options() if option.key == key), ())


def with_tables(page: str) -> str:
    """Return the page of the keys of Ray's model files with the present tables between its marks."""
    for name, section in _MODEL_FILES.items():
        head, start, rest = page.partition(f"<!-- keys of {name} -->\n")
        _, end, tail = rest.partition("<!-- end of keys -->\n")
        table = _table(("Key", "Allowed", "Meaning"), _rows(section, ""))
        page = "".join((head, start, "\n", table, "\n", end, tail))
    return page


def _rows(section: type[Section], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield f"`{key}`", allowed_in_words(field), " ".join(_sentences_on(field))
        nested = section_of(field.annotation)
        if nested is not None:
            yield from _rows(nested, f"{key}.")


def _sentences_on(field: FieldInfo) -> Iterator[str]:
    yield field.description or ""
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        former = extra["formerly"]
        yield f"Also written {_names(map(str, former))}." if isinstance(former, list) else ""
    for mark in field.metadata:
        if isinstance(mark, NoEffect):
            yield f"No effect: {mark.reason}."
        if isinstance(mark, Unavailable):
            yield f"{f'{mark.shown} is not' if mark.shown else 'Not'} available; {mark.instead}."


def _variables() -> str:
    rows = ((f"`{name}`", _names(keys), layer) for layer, names in VARIABLES.items() for name, keys in names.items())
    return _table(("Variable", "Key", "Layer"), rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _code(text: str) -> str:
    return f"`{text}`" if text else "none"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def write_pages(docs: Path) -> None:
    """Write the pages into the folder of the documents."""
    for name, text in reference_pages().items():
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8")
    page = docs / "ray-keys.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the folder that the pages go to: python -m lmi_server.explain.reference_page docs")
    write_pages(Path(sys.argv[1]))
