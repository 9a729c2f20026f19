"""Sizes of LMCache's caches for this machine, for code that configures LMCache itself. A GB is 1024 cubed bytes."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping

from lmi_server.machine.environment import process_environment, set_variables
from lmi_server.machine.memory import free_and_total

logger = logging.getLogger(__name__)

LMCACHE_DIR = "/tmp/lmcache"  # LMI's value  # nosec B108

_GB = 1024**3
_FORMATS = (".safetensors", ".bin")  # only files of the first format that is there count: the others are copies
_MIN_RESERVED = 0.2  # of memory or disk; twice the model if that is more
_CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def get_available_cpu_memory() -> float:
    """Return the GB of main memory that are free."""
    return free_and_total()[0] / _GB


def calculate_cpu_cache_size(properties: Mapping[str, str], model_size_gb: float) -> float:
    """Return the GB of main memory that one worker of the engine may cache in."""
    return _share(get_available_cpu_memory(), properties, model_size_gb)


def calculate_disk_cache_size(properties: Mapping[str, str], model_size_gb: float) -> float:
    """Return the GB that one worker of the engine may cache on the disk of /tmp; 0 if its size is unknown."""
    try:
        total = shutil.disk_usage(os.path.dirname(LMCACHE_DIR)).total / _GB
    except OSError as error:
        logger.warning("nothing is cached on disk: %s", error)
        return 0
    return _share(total, properties, model_size_gb)


def get_directory_size_gb(path: str) -> float:
    """Return the GB of the weights in a directory."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    size = _weights((file, os.path.getsize(file)) for file in files if os.path.exists(file))
    if not size:
        logger.warning("%s has no weights (%s)", path, ", ".join(_FORMATS))
    return size


def calculate_model_size_from_hf_api(model_id: str) -> float:
    """Return the GB of the weights of a model on the Hugging Face Hub. Raises ValueError if it has none."""
    from huggingface_hub import HfApi

    siblings = HfApi().model_info(model_id, files_metadata=True).siblings or []
    size = _weights((file.rfilename, file.size or 0) for file in siblings)
    if not size:
        raise ValueError(f"{model_id} has no weights ({', '.join(_FORMATS)}) on the Hub")
    return size


def get_model_size_gb(model_id_or_path: str) -> float:
    """Return the GB of the weights of a directory, or of a model on the Hub. Raises RuntimeError if it is unknown."""
    if os.path.isdir(model_id_or_path):
        size = get_directory_size_gb(model_id_or_path)
        if not size:
            raise RuntimeError(f"{model_id_or_path} has no weights ({', '.join(_FORMATS)}); name the model's directory")
        return size
    try:
        return calculate_model_size_from_hf_api(model_id_or_path)
    except Exception as error:  # the border to huggingface_hub
        raise RuntimeError(f"the size of {model_id_or_path} is unknown: {error}; check option.model_id") from error


def set_lmcache_env_vars(cpu_cache_gb: float, disk_cache_gb: float) -> None:
    """Set the variables that LMCache reads when the engine starts."""
    set_variables(
        {
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(int(cpu_cache_gb)),
            "LMCACHE_MAX_LOCAL_DISK_SIZE": str(int(disk_cache_gb)),
            "LMCACHE_LOCAL_DISK": f"file://{LMCACHE_DIR}/",
            "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
            "LMCACHE_EXTRA_CONFIG": json.dumps({"use_odirect": True}),
            "PYTHONHASHSEED": "0",  # LMCache finds entries by hashes, which all workers must compute alike
        }
    )


def apply_lmcache_auto_config(model_path: str, properties: dict[str, str]) -> dict[str, str]:
    """Configure LMCache if the property `lmcache_auto_config` is true; return the properties with its connector.

    Raises RuntimeError if another property forbids it, or if the size of the model is unknown.
    """
    if not _is_true(properties, "lmcache_auto_config"):
        return properties
    if _is_true(properties, "enable_expert_parallel"):
        raise RuntimeError(
            "option.lmcache_auto_config=true cannot size caches with option.enable_expert_parallel=true; unset one of"
            " them, or set option.lmcache_config_file"
        )
    if "lmcache_config_file" in properties:
        raise RuntimeError(
            f"option.lmcache_config_file={properties['lmcache_config_file']} and option.lmcache_auto_config=true"
            " exclude each other; unset one of them"
        )
    replaced = sorted(name for name in process_environment() if name.startswith("LMCACHE_"))
    if replaced:
        logger.warning("option.lmcache_auto_config=true may replace the values of %s", ", ".join(replaced))
    size = get_model_size_gb(model_path)
    set_lmcache_env_vars(calculate_cpu_cache_size(properties, size), calculate_disk_cache_size(properties, size))
    return {**properties, "kv_transfer_config": json.dumps(_CONNECTOR)}


def _is_true(properties: Mapping[str, str], name: str) -> bool:
    return properties.get(name, "false").lower() == "true"


def _share(gigabytes: float, properties: Mapping[str, str], model_size_gb: float) -> float:
    reserved = max(2 * model_size_gb, _MIN_RESERVED * gigabytes)
    return max(0.0, gigabytes - reserved) / int(properties.get("tensor_parallel_degree", 1))


def _weights(files: Iterable[tuple[str, int]]) -> float:
    listed = list(files)
    sizes = (sum(size for name, size in listed if name.endswith(ending)) for ending in _FORMATS)
    return next((size / _GB for size in sizes if size), 0.0)
