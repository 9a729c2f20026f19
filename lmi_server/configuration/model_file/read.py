"""Reads a model file of Ray, and says which keys of serving.properties it stands for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_server.artifacts.location import MODEL_FILE_SUFFIXES, NO_WORKFLOWS, RAY_MODEL_NAME
from lmi_server.configuration.engine import load_engine_type
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.layers import Given, Source, nearest_key, spellings
from lmi_server.configuration.model_file.application import MEMBER, is_application, member
from lmi_server.configuration.model_file.chat_template import chat_template
from lmi_server.configuration.model_file.checking import validate, without_effect
from lmi_server.configuration.model_file.llm_config import LlmConfigFile, LoraSection
from lmi_server.configuration.model_file.positions import KeyPath, YamlDocument, read_document
from lmi_server.configuration.model_file.rayllm import RayLlmFile
from lmi_server.configuration.model_file.serve_sections import MirrorSection
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import ConfigurationError

_ENGINES: Mapping[str, tuple[str, str]] = {
    "VLLMEngine": ("option.rolling_batch", "vllm"),
    "vLLM": ("option.rolling_batch", "vllm"),
    "TRTLLMEngine": ("option.rolling_batch", "trtllm"),
    "EmbeddingEngine": ("option.task", "text-embedding"),
}
# vLLM's names of options that every handler has.
OUR_NAMES: Mapping[str, str] = {
    "max_num_seqs": "max_rolling_batch_size",
    "max_num_batched_tokens": "max_rolling_batch_prefill_tokens",
    "tensor_parallel_size": "tensor_parallel_degree",
    "pipeline_parallel_size": "pipeline_parallel_degree",
    "quantization": "quantize",
}
# Of the options that every handler has, these may stand in engine_kwargs; the others are no matter of an engine.
_COMMON = frozenset(
    {"trust_remote_code", "revision", "dtype", "enable_lora", "max_rolling_batch_size", "tensor_parallel_degree"}
    | {"pipeline_parallel_degree", *OUR_NAMES}
)


_NAME = re.compile(r"[A-Za-z0-9_][\w.:@+=-]{0,254}", re.ASCII)  # as in a registration


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file: typed, and as the layer `given` of keys in full.

    `warnings` name keys without effect anywhere, `only_on_clusters` those without effect on one machine.
    """

    content: RayLlmFile | LlmConfigFile
    document: YamlDocument
    given: Given
    warnings: tuple[str, ...]
    only_on_clusters: tuple[str, ...]

    @property
    def model_id(self) -> str:
        """Return the name by which requests ask for the model."""
        content = self.content
        return (
            content.engine_config.model_id if isinstance(content, RayLlmFile) else content.model_loading_config.model_id
        )


def read_model_file(path: Path, text: str | None = None) -> ModelFile:
    """Read RayLLM's YAML, or an LLMConfig; `text` stands for the content of the file.

    Raises ConfigurationError with all problems, one per line.
    """
    document, of_application = read_document(path, text), tuple[str, ...]()
    if is_application(document):
        document, of_application = member(document, _named_beside(path))
    kind = _kind(document)
    content, document = validate(document, kind)
    keys = _LayerKeys(document)
    rayllm = isinstance(content, RayLlmFile)
    problems = list(_of_rayllm(content, keys) if isinstance(content, RayLlmFile) else _of_llm_config(content, keys))
    if problems:
        raise ConfigurationError.from_problems(problems)
    environment = (("engine_config",) if rayllm else ()) + ("runtime_env",)
    return ModelFile(
        content=content,
        document=document,
        given=keys.given,
        warnings=(*of_application, *without_effect(document, content), *_torn_apart(document, content)),
        only_on_clusters=tuple(_only_on_clusters(document, environment)),
    )


def _named_beside(path: Path) -> str | None:
    """Return which model of an application file a model directory has; None if it is not said."""
    name = path.with_name(RAY_MODEL_NAME)
    return name.read_text(encoding="utf-8") if name.is_file() else None


def path_name(model_id: str) -> str:
    """Return the name of a model as a path takes it: team--chat for team/chat, as RayLLM has it."""
    return model_id.replace("/", "--")


def name_in_file(path: Path) -> str | None:
    """Return the name that a model file gives its model; None if there is none that a path can have.

    What is wrong with the file, its reader says.
    """
    try:
        data = read_document(path).data
    except ConfigurationError:
        return None
    sections = [data.get(key) for key in ("engine_config", "model_loading_config")] if isinstance(data, dict) else []
    ids = [section.get("model_id") for section in sections if isinstance(section, dict)]
    return next((_allowed_name(found) for found in ids if isinstance(found, str)), None)


def name_of_member(url: str) -> str | None:
    """Return the name of a model of an application file, FILE#MODEL_ID; None for any other URL."""
    file, _, member_id = url.partition(MEMBER)
    return _allowed_name(member_id) if file.endswith(MODEL_FILE_SUFFIXES) else None


def _allowed_name(model_id: str) -> str | None:
    return name if _NAME.fullmatch(name := path_name(model_id)) else None


def _kind(document: YamlDocument) -> type[RayLlmFile | LlmConfigFile]:
    data = document.data if isinstance(document.data, dict) else {}
    if "workflow" in data:
        raise ConfigurationError(f"{document.file}: {NO_WORKFLOWS}")
    if "engine_config" in data:
        return RayLlmFile
    if "model_loading_config" in data:
        return LlmConfigFile
    raise ConfigurationError(
        f"{document.file}: is no model file; it needs engine_config (RayLLM), model_loading_config (LLMConfig),"
        " or llm_configs (build_openai_app)"
    )


class _LayerKeys:
    """Collects the layer: each key in full with the place in the file that it comes from."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.given: dict[str, Source] = {}

    def add(self, key: str, value: Any, path: KeyPath, raw: str | None = None) -> None:
        self.given[key] = Source(
            "model file",
            as_text(value) if raw is None else raw,
            file=self.document.file,
            line=self.document.line(path),
            spelling=self.document.name(path),
            written=as_text(value),
        )

    def has(self, *path: str) -> bool:
        return path in self.document.lines


def _of_rayllm(content: RayLlmFile, keys: _LayerKeys) -> Iterator[str]:
    """Add the keys of RayLLM's file; yield problems."""
    engine = content.engine_config
    top = ("engine_config",)
    keys.add("option.served_model_name", engine.model_id, (*top, "model_id"))
    mirrors = {name: getattr(engine, name) for name in ("s3_mirror_config", "gcs_mirror_config")}
    copies = {name: None if mirror is None else mirror.bucket_uri for name, mirror in mirrors.items()}
    places: dict[KeyPath, str | None] = {
        **{(*top, name, "bucket_uri"): uri for name, uri in copies.items()},
        (*top, "model_local_path"): engine.model_local_path,
        (*top, "hf_model_id"): engine.hf_model_id,
        (*top, "model_id"): engine.model_id,
    }
    _add_location(keys, places)
    if engine.type is not None:
        key, raw = _ENGINES[engine.type]
        keys.add(key, engine.type, (*top, "type"), raw)
    if engine.tokenizer_id is not None:
        keys.add("option.tokenizer", engine.tokenizer_id, (*top, "tokenizer_id"))
    yield from _add_engine_arguments(keys, engine.engine_kwargs, (*top, "engine_kwargs"))
    if engine.max_total_tokens is not None and "max_model_len" not in engine.engine_kwargs:
        keys.add("option.max_model_len", engine.max_total_tokens, (*top, "max_total_tokens"))
    yield from _add_workers(keys, content)
    _add_generation(keys, content)
    yield from _add_variables(keys, engine.runtime_env, (*top, "runtime_env"))
    if content.multiplex_config is not None:
        path = ("multiplex_config", "max_num_models_per_replica")
        _add_adapters(keys, content.multiplex_config.max_num_models_per_replica, path)
    _add_limits(keys, content)


def _of_llm_config(content: LlmConfigFile, keys: _LayerKeys) -> Iterator[str]:
    """Add the keys of an LLMConfig; yield problems."""
    loading = content.model_loading_config
    top = ("model_loading_config",)
    keys.add("option.served_model_name", loading.model_id, (*top, "model_id"))
    source = loading.model_source
    bucket = source.bucket_uri if isinstance(source, MirrorSection) else None
    places: dict[KeyPath, str | None] = {
        (*top, "model_source", "bucket_uri"): bucket,
        (*top, "model_source"): source if isinstance(source, str) else None,
        (*top, "model_id"): loading.model_id,
    }
    _add_location(keys, places)
    if loading.tokenizer_source is not None:
        keys.add("option.tokenizer", loading.tokenizer_source, (*top, "tokenizer_source"))
    if content.llm_engine is not None:
        key, raw = _ENGINES[content.llm_engine]
        keys.add(key, content.llm_engine, ("llm_engine",), raw)
    yield from _add_engine_arguments(keys, content.engine_kwargs, ("engine_kwargs",))
    if content.lora_config is not None:
        _add_lora(keys, content.lora_config)
    yield from _add_variables(keys, content.runtime_env or {}, ("runtime_env",))
    _add_limits(keys, content)


def _add_location(keys: _LayerKeys, places: Mapping[KeyPath, str | None]) -> None:
    """Add where the weights are: the first of `places` that is given; a path is relative to the file."""
    path, text = next((path, text) for path, text in places.items() if text is not None)
    keys.add("option.model_id", text, path, _beside(keys, text))


def _add_engine_arguments(keys: _LayerKeys, arguments: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
    known = engine_argument_names()
    for name, value in arguments.items():
        here = (*path, name)
        if known and name not in known:
            nearest = nearest_key(name, sorted(known))
            advice = f"did you mean {nearest}?" if nearest else "it is no argument of the engine"
            yield f"{keys.document.place(here)}: unknown key {keys.document.name(here)}; {advice}"
        elif value is not None:
            keys.add(f"option.{OUR_NAMES.get(name, name)}", value, here)


def engine_argument_names() -> frozenset[str]:
    """Return the names that may stand in engine_kwargs; empty if vLLM, whose names these are, is not installed."""
    specs = [spec for spec in HANDLERS.specs if spec.reads_checkpoint]
    engines = frozenset[str]().union(*(load_engine_type(spec).argument_names() for spec in specs))
    options = [option for spec in specs for option in load_options_type(spec).declared_options()]
    declared = {key.removeprefix("option.") for key in spellings(options)}
    of_all = {key.removeprefix("option.") for key in spellings(ModelOptions.declared_options())}
    return engines | (declared - of_all) | _COMMON if engines else frozenset()


def _add_workers(keys: _LayerKeys, content: RayLlmFile) -> Iterator[str]:
    """Add the degree of tensor parallelism, unless engine_kwargs has it; both must agree."""
    path = ("scaling_config", "num_workers")
    if not keys.has(*path):
        return
    workers, arguments = content.scaling_config.num_workers, content.engine_config.engine_kwargs
    stages = arguments.get("pipeline_parallel_size", 1)
    degree = arguments.get("tensor_parallel_size", workers // stages if isinstance(stages, int) and stages else 0)
    if not (isinstance(degree, int) and isinstance(stages, int) and degree * stages == workers):
        allowed = "tensor_parallel_size x pipeline_parallel_size of engine_kwargs"
        yield f'{keys.document.label(path)} = "{workers}" is not allowed; allowed: {allowed}'
    elif "tensor_parallel_size" not in arguments:
        keys.add("option.tensor_parallel_degree", workers, path, str(degree))


def _add_generation(keys: _LayerKeys, content: RayLlmFile) -> None:
    generation, path = content.engine_config.generation, ("engine_config", "generation")
    if generation.prompt_format is not None:
        template = chat_template(generation.prompt_format)
        keys.add("option.chat_template", "...", (*path, "prompt_format"), template)
    if generation.stopping_sequences:
        keys.add("option.stop_sequence", generation.stopping_sequences, (*path, "stopping_sequences"))


def _add_variables(keys: _LayerKeys, environment: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
    """Add the environment variables of the workers, as option.env has them."""
    variables = environment.get("env_vars") or {}
    here = (*path, "env_vars")
    if not isinstance(variables, dict):
        yield f"{keys.document.label(here)} is not allowed; allowed: a mapping of names to texts"
        return
    for name, value in variables.items():
        if "," in str(value):
            yield f'{keys.document.label((*here, name))} = "{value}" is not allowed; allowed: a text without a comma'
    if variables:
        keys.add("option.env", variables, here, ",".join(f"{name}={as_text(text)}" for name, text in variables.items()))


def _add_adapters(keys: _LayerKeys, max_adapters: int, path: KeyPath) -> None:
    keys.add("option.enable_lora", max_adapters, path, "true")
    keys.add("option.max_cpu_loras", max_adapters, path)


def _add_lora(keys: _LayerKeys, lora: LoraSection) -> None:
    max_adapters, path = lora.max_num_adapters_per_replica, ("lora_config", "max_num_adapters_per_replica")
    _add_adapters(keys, max_adapters, path)
    store = lora.dynamic_lora_loading_path
    if store is not None:
        here = ("lora_config", "dynamic_lora_loading_path")
        keys.add("option.dynamic_lora_loading_path", store, here, _beside(keys, store))
        keys.add("option.max_num_adapters_per_replica", max_adapters, path)


def _beside(keys: _LayerKeys, text: str) -> str:
    """Return the path that `text` is relative to the file, or `text` if there is no such file."""
    local = Path(keys.document.file).parent / text
    return str(local) if "://" not in text and local.exists() else text


def _add_limits(keys: _LayerKeys, content: RayLlmFile | LlmConfigFile) -> None:
    """Add the limits of one replica, which hold for the workers of one machine too."""
    max_ongoing, queued = content.deployment_config.max_ongoing_requests, content.deployment_config.max_queued_requests
    batch = keys.given.get("option.max_rolling_batch_size")
    if max_ongoing is not None and (batch is None or (batch.raw.isdecimal() and int(batch.raw) > max_ongoing)):
        keys.add("option.max_rolling_batch_size", max_ongoing, ("deployment_config", "max_ongoing_requests"))
    if queued is not None and queued > 0:
        keys.add("job_queue_size", queued, ("deployment_config", "max_queued_requests"))


def _torn_apart(document: YamlDocument, content: RayLlmFile | LlmConfigFile) -> Iterator[str]:
    """Yield a warning if the ranks of a replica are to be on different nodes, where no cluster starts them."""
    section = content.deployment_config
    bundles, strategy = section.placement_group_bundles, section.placement_group_strategy
    path: KeyPath = ("deployment_config", "placement_group_strategy")
    if isinstance(content, RayLlmFile):
        workers = content.scaling_config.num_workers
        if strategy is None:
            strategy, path = content.scaling_config.placement_strategy, ("scaling_config", "placement_strategy")
    else:
        group, workers = content.placement_group_config, _degree(content.engine_kwargs)
        if strategy is None and group is not None:
            bundles, strategy, path = bundles or group.bundles, group.strategy, ("placement_group_config", "strategy")
    workers = len(bundles) if bundles else workers
    if strategy == "STRICT_SPREAD" and workers > 1:
        yield (
            f"{document.label(path)} = STRICT_SPREAD puts the {workers} workers of a replica on as many nodes, and they"
            " have to be on one; use STRICT_PACK"
        )


def _degree(arguments: Mapping[str, Any]) -> int:
    """Return how many workers the engine's arguments ask for."""
    sizes = [arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int))


def _only_on_clusters(document: YamlDocument, environment: KeyPath) -> Iterator[str]:
    """Yield a warning for each part of Ray's runtime environment that one machine does not honour."""
    top = document.data
    for part in environment:
        top = top.get(part) or {}
    for name in top:
        if name != "env_vars":
            path = (*environment, name)
            remedy = "; put a requirements.txt into the model directory" if name in ("pip", "uv", "conda") else ""
            yield f"{document.label(path)} has an effect on a cluster of Ray only{remedy}"


def as_text(value: Any) -> str:
    """Return a value of YAML as serving.properties would have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
