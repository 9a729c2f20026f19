"""From a model directory to a `ResolvedModel`: reads, layers, checks, and remembers where each value came from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lmi_server.configuration import environment as env
from lmi_server.configuration.check import build, contradictions, doubts, told, unavailable
from lmi_server.configuration.checkpoint import architectures, is_causal_lm, locate_model
from lmi_server.configuration.declaration import Option
from lmi_server.configuration.handlers import (
    DEFAULT_HANDLER,
    HandlerRow,
    entry_points,
    find_handler,
    load_options_type,
    options_type_of,
)
from lmi_server.configuration.layers import (
    Given,
    Source,
    from_file,
    from_values,
    from_variables,
    merge,
    sort_keys,
    unknown_key_warning,
)
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.properties import read_properties
from lmi_server.configuration.recommender import recommend
from lmi_server.errors import ConfigurationError

SERVING_PROPERTIES = "serving.properties"

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """One model, ready to be served.

    `model_dir` is absolute, `handler` is "module:Class". `sources` tells for each key in full ("option.dtype") where
    its value came from, unknown keys included.
    """

    name: str
    model_dir: str
    handler: str
    options: ModelOptions
    serving: ServingOptions
    sources: Mapping[str, Source]
    warnings: tuple[str, ...] = ()

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return every name under which requests may ask for the model, its own first."""
        return tuple(dict.fromkeys((self.name, *self.options.served_model_name)))

    def raw_options(self) -> dict[str, str]:
        """Return what was decided for "option." keys, without that prefix, for `rebuild_options` in a worker."""
        raw = {
            key.removeprefix("option."): source.raw
            for key, source in self.sources.items()
            if key.startswith("option.") and source.layer != "default"
        }
        return raw | {"model_id": str(self.options.model_id)}


def rebuild_options(handler: str, raw: Mapping[str, str]) -> ModelOptions:
    """Return the typed options of handler "module:Class" from `ResolvedModel.raw_options`."""
    return options_type_of(handler).from_raw(raw)


def resolve_model(
    directory: Path, environment: Mapping[str, str], registration: Mapping[str, str] = _NOTHING
) -> ResolvedModel:
    """Resolve the model in `directory`.

    `registration` holds what the registering call says, by key in full. Raises ConfigurationError with every problem,
    one a line.
    """
    model_dir = _checked_directory(directory)
    upper, lower, warnings = _read_layers(model_dir, environment, registration)
    row, problems = _choose_handler([*upper, lower], model_dir)
    options_type = ModelOptions if row is None else load_options_type(row)
    declared = (*ServingOptions.declared(), *options_type.declared())
    sources, unknown, doubtful = _stack(upper, lower, row, declared)
    serving, bad_serving = build(ServingOptions, sources)
    options, bad_options = build(options_type, sources)
    problems += [*bad_serving, *bad_options, *unavailable(serving, sources), *unavailable(options, sources)]
    problems += contradictions(serving, sources)
    location, misplaced = _locate(row, sources, model_dir)
    problems += misplaced
    if problems or row is None:
        raise ConfigurationError("\n".join(problems))
    return ResolvedModel(
        name=model_name(model_dir),
        model_dir=str(model_dir),
        handler=row.handler,
        options=options.model_copy(update={"model_id": location}),
        serving=serving,
        sources=MappingProxyType({**_default_sources(declared), **sources, **unknown}),
        warnings=(*warnings, *doubtful, *doubts(serving, sources), *doubts(options, sources)),
    )


def model_name(model_dir: Path) -> str:
    """Return the name that LMI gives a directory: its own, everything but ASCII letters, digits and _ replaced."""
    return re.sub(r"\W", "_", model_dir.name, flags=re.ASCII) or "model"


def _checked_directory(directory: Path) -> Path:
    model_dir = Path(os.path.abspath(directory))
    if not model_dir.exists():
        raise ConfigurationError(f"{model_dir}: there is no such directory")
    if not model_dir.is_dir():
        raise ConfigurationError(f"{model_dir}: is a file; name the directory that holds {SERVING_PROPERTIES}")
    return model_dir


def _read_layers(
    model_dir: Path, environment: Mapping[str, str], registration: Mapping[str, str]
) -> tuple[list[Given], Given, list[str]]:
    """Return the layers above the recommender (highest first), the one below it, and warnings."""
    from_disk, warnings = _read_file(model_dir / SERVING_PROPERTIES)
    hugging_face = env.hugging_face_variables(environment)
    if hugging_face and (model_dir / "config.json").is_file():
        warnings.append(f"variable HF_MODEL_ID is ignored, because {model_dir} holds a model (config.json) itself")
        hugging_face = []
    upper = [
        from_variables("sagemaker", env.sagemaker_overrides(environment)),
        from_values("registration", registration),
        from_disk,
        from_variables("environment", [*env.model_variables(environment), *hugging_face]),
    ]
    return upper, from_variables("environment default", env.default_variables(environment)), warnings


def _read_file(path: Path) -> tuple[Given, list[str]]:
    if not path.exists():
        return {}, []
    properties = read_properties(path)
    return from_file(properties, str(path)), list(properties.warnings)


def _choose_handler(layers: Sequence[Given], model_dir: Path) -> tuple[HandlerRow | None, list[str]]:
    """Return the row of the handler, or None and the problem."""
    key = "option.entryPoint"
    given = [layer[key] for layer in layers if key in layer and layer[key].raw]
    if given:
        row = find_handler(given[0].raw)
        refusal = f"{told(given[0], key)} is not available in this version; use {_entry_points()}"
        return row, [] if row else [refusal]
    if (model_dir / "model.py").exists():
        refusal = f"{model_dir / 'model.py'}: a handler of one's own is not available in this version; "
        return None, [refusal + f"remove the file or set {key} to {_entry_points()}"]
    return DEFAULT_HANDLER, []


def _entry_points() -> str:
    return " or ".join(entry_points())


def _stack(
    upper: Sequence[Given], lower: Given, row: HandlerRow | None, declared: Sequence[Option]
) -> tuple[Given, Given, list[str]]:
    """Return the sources of the declared keys that somebody decided, those of the unknown keys, and warnings."""
    layers = [sort_keys(layer, declared) for layer in (*upper, lower)]
    above = merge([layer.known for layer in layers[:-1]])
    below = layers[-1].known
    recommended = from_values("recommender", recommend(row, merge([above, below])))
    left_open = {key for key in recommended if key in above and above[key].raw.lower() == "auto"}
    decided = {key: source for key, source in above.items() if key not in left_open}
    unknown = merge([layer.unknown for layer in layers])
    warnings = [text for layer in layers for text in layer.warnings]
    warnings += [unknown_key_warning(key, source, declared) for key, source in unknown.items()]
    return merge([decided, recommended, below]), unknown, warnings


def _locate(row: HandlerRow | None, sources: Given, model_dir: Path) -> tuple[str, list[str]]:
    """Return where the model is, and the problems with that."""
    source = sources.get("option.model_id")
    try:
        location = locate_model(source.raw if source else None, model_dir)
    except ValueError as error:
        assert source is not None, "without a model_id the model is its directory"
        return str(model_dir), [f"{told(source, 'option.model_id')} {error}"]
    return location, list(_unfit(location, model_dir)) if row is not None and row.causal_lm_only else []


def _unfit(location: str, model_dir: Path) -> Iterator[str]:
    """Yield why a handler that generates text cannot serve the model at `location`."""
    if location == str(model_dir) and not (model_dir / "config.json").is_file():
        yield f"{model_dir}: holds no config.json, and option.model_id (or HF_MODEL_ID) names no other model"
    names = architectures(location)
    if names and not is_causal_lm(names):
        yield (
            f"{Path(location) / 'config.json'}: architecture {', '.join(names)} is not available in this version; "
            "use a causal language model (*ForCausalLM)"
        )


def _default_sources(declared: Sequence[Option]) -> Given:
    return {option.key: Source("default", str(option.default)) for option in declared}
