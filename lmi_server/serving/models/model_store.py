"""Which models a server starts with: directories, a model store, specs, and `HF_MODEL_ID`. Nothing is loaded here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qsl

from lmi_server.artifacts.location import MODEL_FILE_SUFFIXES, RAY_MODEL_FILE, archive_stem, is_hub_id, path_of_file_url
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES
from lmi_server.configuration.model_file.application import models_of
from lmi_server.configuration.model_file.read import name_in_file, name_of_member
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.machine.environment import is_multi_model

HUB_VARIABLES = ("HF_MODEL_ID", "HF_REVISION", "HF_TASK")
_MODEL_ID = "OPTION_MODEL_ID"
LOAD_ALL = "ALL"
LOAD_NONE = "NONE"

SAGEMAKER_STORE = Path("/opt/ml/model")

_SEPARATOR = re.compile(r"[,\s]+")
_SPEC_KEYS = ("engine", "load_on_devices")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The origin and the settings of one version of a model.

    `url` is a local directory or archive, s3://bucket/prefix, or the id of a Hugging Face model. `settings` is the
    registration's layer of the configuration, by full key; `variables` are added to the environment.
    """

    url: str
    name: str
    version: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return "name", or "name:version"."""
        return self.name if self.version is None else f"{self.name}:{self.version}"


@dataclass(frozen=True, slots=True)
class Startup:
    """The models that command line and settings ask for. Paths may be relative; `load_models` is ALL, NONE, or specs.

    `fallback_store` is the model store if nothing is named, as in a container of SageMaker; it may be missing.
    """

    directories: Sequence[Path] = ()
    specs: Sequence[str] = ()
    model_store: Path | None = None
    load_models: str = LOAD_ALL
    fallback_store: Path = SAGEMAKER_STORE

    @property
    def store(self) -> Path | None:
        """Return the directory whose models are all loaded; None if specs or `load_models` say what is loaded."""
        if self.specs or self.load_models.strip().upper() != LOAD_ALL:
            return None
        nothing_named = self.model_store is None and not self.directories
        return self.fallback_store if nothing_named and self.fallback_store.is_dir() else self.model_store


def startup_sources(startup: Startup, environment: Mapping[str, str]) -> tuple[list[ModelSource], list[str]]:
    """Return the models to load, and warnings.

    If one directory is given and nothing else, `HF_MODEL_ID` names the weights of that model. Otherwise it is a model
    of its own. `OPTION_MODEL_ID` is the model if there is no other one. Raises ConfigurationError if a spec cannot be
    read, or two models have one name and version.
    """
    plain = [source for directory in startup.directories for source in _sources_at(directory)]
    named = [parse_spec(text, startup.model_store) for text in _specs(startup)]
    warnings: list[str] = []
    store = startup.store
    if store is not None:
        if not store.is_dir():
            warnings.append(f"model_store {store}: there is no such directory")
        elif is_one_model(store):
            plain.append(_directory_source(store))
        else:
            found, warnings = discover(store)
            named = [*found, *named]
    sources = _distinct([*_with_hub_model(plain, named, environment), *named])
    if not sources and startup.load_models.strip().upper() != LOAD_NONE:
        sources = _model_of_option(environment)
        if not sources:
            warnings.append(
                "no model is named; name a MODEL, --model-store, --models or HF_MODEL_ID, or POST it to /models"
            )
    return sources, warnings


def _specs(startup: Startup) -> Iterator[str]:
    listed = startup.load_models.strip()
    if listed.upper() not in (LOAD_ALL, LOAD_NONE):
        yield from (text for text in _SEPARATOR.split(listed) if text)
    for given in startup.specs:
        yield from _split(given)


def discover(store: Path) -> tuple[list[ModelSource], list[str]]:
    """Return the models in `store`, each a directory or an archive, and warnings about entries that are neither."""
    sources = list[ModelSource]()
    warnings = []
    for entry in _visible(store):
        if entry.is_dir() and not _visible(entry):
            warnings.append(f"{entry}: is empty and is no model")
        else:
            sources += _sources_at(_only_entry(entry))
    if not sources:
        warnings.append(f"model_store {store} holds no model")
    return list({source.url: source for source in sources}.values()), warnings


def is_one_model(store: Path) -> bool:
    """Return whether the store is itself a model directory: it holds files that are no models by themselves."""
    return any(not entry.is_dir() and not _is_model_by_itself(entry) for entry in _visible(store))


def _is_model_by_itself(file: Path) -> bool:
    return archive_stem(file.name) is not None or (
        file.suffix in MODEL_FILE_SUFFIXES and file.name != RAY_MODEL_FILE and file.stem != "workflow"
    )


def is_spec(text: str) -> bool:
    """Return whether an argument of the command line is a spec of a model, and not the path of a directory.

    What exists is a path, even if a model of the Hugging Face Hub has the same name.
    """
    named = text.startswith(("[", "file:")) or "=" in text or "://" in text or is_hub_id(text)
    return named and not os.path.exists(text)  # unlike Path.exists, for a text of any length


def named_source(argument: str) -> ModelSource:
    """Return the one model that an argument of the command line names: a path, or a spec without a store."""
    return parse_spec(argument) if is_spec(argument) else _directory_source(Path(argument))


def parse_spec(text: str, store: Path | None = None) -> ModelSource:
    """Return the model of "[name:version:engine:devices]=url", "name=url" or "url".

    The brackets may be missing, or stand around the whole. Relative paths are looked up in `store` first. What follows
    a "?" are settings of the model.
    """
    prefix, url = _prefix_and_url(text.strip())
    if not url:
        raise ConfigurationError(
            f'model "{excerpt(SECRETS.mask(text))}" has no URL; allowed: url or [name:version:engine:devices]=url'
        )
    name, version, *more = (*prefix.split(":", 3), "", "", "", "")[:4]
    url, settings = _split_query(url)
    settings |= {key: value for key, value in zip(_SPEC_KEYS, more, strict=True) if value and value != "*"}
    given_name = settings.pop("model_name", "")
    url = _in_store(url, store)
    given_name = name or given_name
    source = ModelSource(url, given_name or name_of(url), version or None, settings)
    return source if given_name else named_by_file(source)


def _prefix_and_url(spec: str) -> tuple[str, str]:
    if spec.startswith("[") and "]=" in spec:
        prefix, _, url = spec[1:].partition("]=")
        return prefix, url
    if spec.startswith("[") and spec.endswith("]"):
        spec = spec[1:-1]
    prefix, separator, url = spec.partition("=")
    return (prefix, url) if separator and "/" not in prefix and "?" not in prefix else ("", spec)


def name_of(url: str) -> str:
    """Return the name that LMI infers: the last part of the path without its suffix, in letters, digits and _."""
    if url.startswith("file:"):
        url = path_of_file_url(url)
    last = url.rstrip("/").rpartition("/")[2]
    if "://" not in url and "/" in url and not url.startswith((".", "/")) and not os.path.exists(url):
        last = url  # the id of a Hugging Face model: its owner is part of the name
    stem = archive_stem(last) or _without_suffix(last) if not url.endswith("/") else None
    return re.sub(r"\W", "_", stem or last, flags=re.ASCII) or "model"


def _model_file(url: str) -> Path | None:
    """Return the model file of Ray that a local path names, itself or as the configuration of its directory."""
    if url.endswith(MODEL_FILE_SUFFIXES) and os.path.isfile(url):
        return Path(url)
    inside = os.path.join(url, RAY_MODEL_FILE)
    is_configured = os.path.isfile(inside) and not os.path.exists(os.path.join(url, SERVING_PROPERTIES))
    return Path(inside) if is_configured else None


def _without_suffix(name: str) -> str:
    """Return the name of a file without the suffix of a model in one file."""
    suffix = next((suffix for suffix in (".gguf", *MODEL_FILE_SUFFIXES) if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _sources_at(path: Path) -> list[ModelSource]:
    """Return the models at a path: several if it is an application file of Ray Serve LLM."""
    is_file = path.suffix in MODEL_FILE_SUFFIXES and path.is_file()
    return [_directory_source(Path(url)) for url in (models_of(path) if is_file else [str(path)])]


def _directory_source(directory: Path) -> ModelSource:
    path = directory.absolute()
    return named_by_file(ModelSource(str(path), name_of(str(path))))


def named_by_file(source: ModelSource) -> ModelSource:
    """Return a model without a name from the user under the name in its model file of Ray, if it has such a file."""
    url = path_of_file_url(source.url) if source.url.startswith("file:") else source.url
    file = _model_file(url)
    name = name_of_member(url) if file is None else name_in_file(file)
    return source if name is None else replace(source, name=name)


def _visible(directory: Path) -> list[Path]:
    """Return the entries, sorted, without dot-files. Raises ConfigurationError if they cannot be read."""
    try:
        return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ConfigurationError(
            f"{directory}: cannot be read: {error.strerror}; this server runs as the user {os.getuid()}"
        ) from error


def _only_entry(entry: Path) -> Path:
    """Return the only sub-directory or archive in `entry`; otherwise `entry` itself.

    A folder code/ is no model: it has the script that SageMaker's framework containers run.
    """
    if not entry.is_dir():
        return entry
    inside = _visible(entry)
    is_model = len(inside) == 1 and inside[0].name != "code"
    if is_model and (inside[0].is_dir() or archive_stem(inside[0].name) is not None):
        return inside[0]
    return entry


def _split(given: str) -> Iterator[str]:
    """Yield the specs of one flag. Commas and spaces separate them, unless the whole is a path that exists."""
    if os.path.exists(given.rpartition("=")[2]):
        yield given
        return
    yield from (text for text in _SEPARATOR.split(given) if text)


def _split_query(url: str) -> tuple[str, dict[str, str]]:
    if "?" not in url or os.path.exists(url):
        return url, {}
    path, _, query = url.partition("?")
    return path, dict(parse_qsl(query, keep_blank_values=True))


def _in_store(url: str, store: Path | None) -> str:
    if "://" in url or url.startswith("file:"):
        return url
    if store is not None and os.path.exists(store / url):
        return str((store / url).absolute())
    return str(Path(url).absolute()) if os.path.exists(url) else url


def _with_hub_model(
    plain: Sequence[ModelSource], named: Sequence[ModelSource], environment: Mapping[str, str]
) -> list[ModelSource]:
    """Return `plain` and the model of HF_MODEL_ID, which is one of `plain` or an additional one."""
    variables = {name: environment[name] for name in HUB_VARIABLES if environment.get(name, "").strip()}
    if "HF_MODEL_ID" not in variables:
        return list(plain)
    if len(plain) == 1 and not named:
        return [ModelSource(plain[0].url, plain[0].name, variables=variables)]
    url = variables["HF_MODEL_ID"].strip()
    return [*plain, ModelSource(_in_store(url, None), name_of(url), variables=variables)]


def _model_of_option(environment: Mapping[str, str]) -> list[ModelSource]:
    """Return the model of `OPTION_MODEL_ID`. On a multi-model endpoint it is an option of every model instead."""
    url = environment.get(_MODEL_ID, "").strip()
    return [ModelSource(_in_store(url, None), name_of(url))] if url and not is_multi_model(environment) else []


def _distinct(sources: Sequence[ModelSource]) -> list[ModelSource]:
    found: dict[str, ModelSource] = {}
    for source in sources:
        other = found.setdefault(source.label, source)
        if other.url != source.url:
            raise ConfigurationError(
                f"two models are named {source.label}: {other.url} and {source.url}; rename one, or write name=url"
            )
    return list(found.values())
