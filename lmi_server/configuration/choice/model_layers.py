"""The layers of one model's configuration: reads them, and merges them once its handler is known."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmi_server.artifacts.location import RAY_MODEL_FILE
from lmi_server.configuration.choice.deciding_keys import ENTRY_POINT, MODEL_ID, ROLLING_BATCH, DecidingKeys
from lmi_server.configuration.choice.handler_choice import engine_alias
from lmi_server.configuration.choice.recommender import recommend, with_max_resolved
from lmi_server.configuration.declaration import Deprecated, Option, ValueMeans
from lmi_server.configuration.handlers import HandlerSpec
from lmi_server.configuration.layers import (
    Given,
    SortedKeys,
    from_file,
    from_values,
    from_variables,
    merge,
    sort_keys,
    without_none,
)
from lmi_server.configuration.model_directory.model_code import MODEL_CODE, framework_script
from lmi_server.configuration.model_file.read import read_model_file
from lmi_server.configuration.properties import parse_properties, read_properties
from lmi_server.machine import environment as env
from lmi_server.machine.inventory import Machine

SERVING_PROPERTIES = "serving.properties"
OLD_MODEL_ID = "option.s3url"
_NAME_MODEL = frozenset({ENTRY_POINT, MODEL_ID, OLD_MODEL_ID})


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers above the recommender (highest first) and the one below it, keys as they were written.

    The last of the `upper` layers holds the variables of text-generation-inference. `has_config`: the directory holds
    a model's config.json.
    """

    upper: tuple[Given, ...]
    lower: Given
    warnings: tuple[str, ...]
    has_config: bool

    def deciding_keys(self) -> DecidingKeys:
        """Return the keys that choose the handler, with the values that the engine implies.

        Only the handler's options class says which keys are spellings of one option. The other keys cannot be merged
        without it.
        """
        *upper, lower = (sort_keys(layer, DecidingKeys.declared_options()).known for layer in (*self.upper, self.lower))
        written = without_none(merge(upper), DecidingKeys.declared_options())
        return DecidingKeys.from_given(merge([written, engine_alias(written.get("engine")), lower]))


def read_layers(
    model_dir: Path, environment: Mapping[str, str], registration: Mapping[str, str], text: str | None = None
) -> ModelLayers:
    """Read the layers of the model in `model_dir`; `text` stands for the content of its file.

    Raises ConfigurationError if serving.properties cannot be read.
    """
    from_disk, warnings = _read_file(model_dir, text)
    hugging_face = env.hugging_face_variables(environment)
    names_model = bool(hugging_face)
    has_config = (model_dir / "config.json").is_file()
    if hugging_face and has_config:
        warnings.append(f"variable HF_MODEL_ID is ignored, because {model_dir} holds a model (config.json) itself")
        hugging_face = []
    variables = [*env.model_variables(environment), *hugging_face]
    lower = from_variables("environment default", env.default_variables(environment))
    named = (
        from_variables("sagemaker", env.sagemaker_overrides(environment)),
        from_values("registration", registration),
        from_disk,
        from_variables("environment", variables),
    )
    names_model = names_model or not _NAME_MODEL.isdisjoint(merge([*named, lower]))
    upper = (
        *named,
        {} if names_model else _from_files(model_dir, environment),
        from_variables("environment", env.text_generation_inference_variables(environment)),
    )
    return ModelLayers(tuple(map(_with_new_names, upper)), lower, tuple(warnings), has_config)


def _from_files(model_dir: Path, environment: Mapping[str, str]) -> Given:
    """Return the entry point that a directory for SageMaker's framework containers has.

    DJL Serving does not know these scripts: what is a model for it, by its configuration or a model.py, stays one.
    """
    if any((model_dir / name).exists() for name in (SERVING_PROPERTIES, MODEL_CODE)):
        return {}
    script = framework_script(model_dir, env.sagemaker_program(environment))
    return {} if script is None else from_values("model directory", {ENTRY_POINT: script})


def _with_new_names(layer: Given) -> Given:
    """Return the layer with option.s3url, which is LMI's old name of option.model_id, under the new name."""
    if OLD_MODEL_ID not in layer or MODEL_ID in layer:
        return layer
    renamed = replace(layer[OLD_MODEL_ID], spelling=OLD_MODEL_ID)
    return {MODEL_ID: renamed, **{key: source for key, source in layer.items() if key != OLD_MODEL_ID}}


def _read_file(model_dir: Path, text: str | None) -> tuple[Given, list[str]]:
    """Read serving.properties, or the model file of Ray in its place."""
    path, model_file = model_dir / SERVING_PROPERTIES, model_dir / RAY_MODEL_FILE
    if not path.exists() and os.path.lexists(model_file):
        read = read_model_file(model_file, text)
        return read.given, [*read.warnings, *read.only_on_clusters]
    if text is None and not path.exists():
        return {}, []
    properties = read_properties(path) if text is None else parse_properties(text, str(path))
    return from_file(properties, str(path)), list(properties.warnings)


def merge_layers(
    layers: ModelLayers, spec: HandlerSpec, declared: Sequence[Option], inferred_task: str | None, machine: Machine
) -> SortedKeys:
    """Merge the layers, and what the recommender adds to them, under the spellings of the `declared` options."""
    upper = [sort_keys(layer, declared) for layer in layers.upper]
    lower = sort_keys(layers.lower, declared)
    written = without_none(merge([layer.known for layer in upper]), declared)
    alias = sort_keys(engine_alias(written.get("engine"), spec.runs_user_code), declared)
    # Above the recommender: its advice depends on these values. Below it: variables that only set defaults.
    above = _with_replacements_of_deprecated(merge([written, alias.known]), declared)
    above = _with_workers_of_device_kind(above, machine)
    given = merge([above, lower.known])
    names_model = layers.has_config or MODEL_ID in given
    keys = DecidingKeys.from_given(given)
    recommended = from_values("recommender", recommend(spec, keys, inferred_task, machine, names_model))
    # "auto" asks for a recommendation; with none it stays, and the handler decides when it loads the model.
    left_open = {key for key in recommended if key in above and above[key].raw.lower() == "auto"}
    decided = {key: source for key, source in above.items() if key not in left_open}
    # A variable of text-generation-inference stands for keys of several handlers. This handler need not know all of
    # them; only a variable without any known key is worth a warning.
    *own, guests = upper
    ordered = [*upper, alias, lower]
    return SortedKeys(
        known=with_max_resolved(merge([decided, recommended, lower.known]), spec, machine),
        unknown=merge([layer.unknown for layer in (*own, alias, lower)]),
        warnings=(
            *(text for layer in ordered for text in layer.warnings),
            *_idle_variables(guests),
            *_closed_by_batches(above, left_open, keys),
        ),
        problems=tuple(text for layer in ordered for text in layer.problems),
    )


def _closed_by_batches(above: Given, left_open: Collection[str], keys: DecidingKeys) -> Iterator[str]:
    """Yield a warning if a dynamic batch has decided what option.rolling_batch=auto leaves open."""
    if ROLLING_BATCH in left_open and keys.batches_statically:
        yield (
            f"{above[ROLLING_BATCH].describe(ROLLING_BATCH)} means disable beside batch_size, which makes"
            " dynamic batches; remove batch_size for a rolling batch"
        )


def _with_replacements_of_deprecated(given: Given, declared: Sequence[Option]) -> Given:
    """Add the values that deprecated keys stand for, unless their keys are given themselves."""
    result = dict(given)
    for option in declared:
        for mark in option.marks:
            if isinstance(mark, Deprecated) and mark.becomes is not None and option.key in given:
                key, value = mark.becomes
                if given[option.key].is_true:
                    source = replace(given[option.key], layer="deprecated key", raw=value)
                    spelling, written = source.spelling or option.key, given[option.key].raw
                    result.setdefault(key, replace(source, spelling=spelling, written=written))
            if isinstance(mark, ValueMeans) and option.key in given:
                result |= _meaning(mark, option.key, result)
    return result


def _meaning(mark: ValueMeans, key: str, given: Given) -> Given:
    """Return what replaces a value that stands for another key's; nothing if the option has another value."""
    source, (other, raw) = given[key], mark.stands_for
    if source.raw.lower() != mark.value or (other in given and given[other].raw.lower() != raw):
        return {}
    shown = replace(source, spelling=source.spelling or key, written=source.raw)
    return {key: replace(shown, raw=mark.itself), other: replace(shown, raw=raw)}


def _with_workers_of_device_kind(given: Given, machine: Machine) -> Given:
    """Let gpu.minWorkers replace minWorkers on a machine with GPUs, and so on.

    A value of minWorkers from the registration call or from SageMaker stays, because both are made for this machine.
    """
    result = dict(given)
    for key in ("minWorkers", "maxWorkers"):
        special = given.get(f"{machine.device_kind}.{key}")
        overruled = key in given and given[key].layer in ("sagemaker", "registration")
        if special is not None and special.raw.isdecimal() and not overruled:
            result[key] = special
    return result


def _idle_variables(guests: SortedKeys) -> Iterator[str]:
    """Yield a warning for each variable none of whose keys this handler knows."""
    used = {source.variable for source in guests.known.values()}
    for name in dict.fromkeys(source.variable for source in guests.unknown.values()):
        if name not in used:
            yield f"variable {name} is ignored, because the handler has no such option"
