"""Where the model is that TensorRT-LLM loads: a built engine, a checkpoint, or a checkpoint with a changed config.json.

It imports nothing of TensorRT-LLM.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers.tensorrt_llm import package
from handlers.tensorrt_llm.engine_arguments import CONFIG_JSON
from handlers.tensorrt_llm.options import ENGINE_REPOSITORY, TensorRtLlmOptions
from lmi_server.contract.errors import ModelLoadError

_ENGINE = "rank0.engine"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Checkpoint:
    """What the LLM class loads. `built` is True if it is an engine; `temporary` is a directory to remove afterwards."""

    arguments: Mapping[str, Any]
    built: bool
    temporary: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Remove the temporary directory; the model is loaded."""
        if self.temporary is not None:
            self.temporary.cleanup()


def find(model_dir: str, options: TensorRtLlmOptions) -> Checkpoint:
    """Return the arguments of the LLM class with the place of the model.

    Raises ModelLoadError if there is no model, or if an engine that is built already cannot have the options.
    """
    arguments = dict(options.engine_arguments())
    changes = arguments.pop(CONFIG_JSON, {})
    if options.tokenizer is not None and (Path(model_dir) / options.tokenizer).exists():
        arguments["tokenizer"] = str(Path(model_dir) / options.tokenizer)
    engine = _engine(Path(model_dir), options)
    if engine is not None:
        return _of_engine(engine, Path(model_dir), arguments, options)
    place = arguments.get("model", model_dir)
    path = Path(model_dir) / place  # an absolute path replaces model_dir; a Hugging Face id is no path
    if path.is_dir():
        place = str(path)
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{path} holds no config.json and no built engine ({ENGINE_REPOSITORY}/**/{_ENGINE});"
                " set option.model_id"
            )
    if not changes:
        return Checkpoint({**arguments, "model": place}, built=False)
    if not path.is_dir():
        raise ModelLoadError(
            f"option.rotary_* changes config.json, and option.model_id={place} is no directory;"
            " download the model first"
        )
    changed = _with_changes(path, changes)
    return Checkpoint({**arguments, "model": changed.name}, built=False, temporary=changed)


def _engine(model_dir: Path, options: TensorRtLlmOptions) -> Path | None:
    """Return the directory of the engine that was built before: in the repository, or where the model is.

    Raises ModelLoadError if there are several, or if the installed package runs none.
    """
    if options.backend == "pytorch":
        return None
    engine = _built(model_dir, options)
    if engine is not None and options.runs_on == "pytorch":
        raise ModelLoadError(
            f"{engine} is an engine of TensorRT, and TensorRT-LLM {package.installed().version} runs models on PyTorch;"
            " set option.backend=pytorch to serve the checkpoint that option.model_id names, or"
            f" {package.to_have_engines()}"
        )
    return engine


def _built(model_dir: Path, options: TensorRtLlmOptions) -> Path | None:
    place = model_dir / (options.model_id or "")
    found = sorted((model_dir / ENGINE_REPOSITORY).rglob(_ENGINE)) or sorted((place / ENGINE_REPOSITORY).rglob(_ENGINE))
    if len(found) > 1:
        raise ModelLoadError(f"{model_dir / ENGINE_REPOSITORY} holds {len(found)} engines; leave one of them there")
    if found:
        return found[0].parent
    return place if (place / _ENGINE).is_file() else None


def _of_engine(engine: Path, model_dir: Path, arguments: dict[str, Any], options: TensorRtLlmOptions) -> Checkpoint:
    """Return the arguments for an engine: without what is built into it, and with the tokenizer beside it."""
    if options.save_mp_checkpoint_path is not None:
        raise ModelLoadError(f"{engine} is a built engine already; there is nothing to convert or to build")
    for name in ("build_config", "quant_config", "calib_config", "enable_build_cache", "dtype", "revision"):
        arguments.pop(name, None)
    if "tokenizer" not in arguments and not any((engine / name).is_file() for name in _TOKENIZERS):
        arguments["tokenizer"] = options.model_id or str(model_dir)
    return Checkpoint({**arguments, "model": str(engine)}, built=True)


def _with_changes(directory: Path, changes: Mapping[str, Any]) -> tempfile.TemporaryDirectory[str]:
    """Return a directory of links to the files of `directory`, with a config.json of its own.

    TensorRT-LLM has no argument for these values. It reads the file whatever the architecture is.
    """
    changed = tempfile.TemporaryDirectory(prefix="tensorrt_llm-")
    for path in directory.iterdir():
        if path.name != "config.json":
            (Path(changed.name) / path.name).symlink_to(path.absolute())
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= changes
    parameters = config.get("rope_parameters")  # where newer versions of transformers write both
    if isinstance(parameters, dict):
        theta = {"rope_theta": changes["rope_theta"]} if "rope_theta" in changes else {}
        config["rope_parameters"] = {**parameters, **changes.get("rope_scaling", {}), **theta}
    (Path(changed.name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return changed
