"""Directories with a serving.properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SERVER_KEYS = frozenset(
    {
        *("batch_size", "engine", "job_queue_size", "load_on_devices", "max_batch_delay", "max_idle_time"),
        *("max_worker_memory_mb", "maxWorkers", "minWorkers", "quarantine_time", "required_memory_mb"),
        *("reserved_memory_mb", "retry_threshold"),
    }
)
"""Keys of the model server itself, which have no "option." before them."""


def write_properties(directory: Path, **keys: Any) -> Path:
    """Make a directory whose serving.properties has these keys; those with a dot are keys in full."""
    directory.mkdir(parents=True, exist_ok=True)
    full = {key if key in SERVER_KEYS or "." in key else f"option.{key}": value for key, value in keys.items()}
    (directory / "serving.properties").write_text("\n".join(f"{key}={value}" for key, value in full.items()))
    return directory
