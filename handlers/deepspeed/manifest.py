"""Reads the manifest of option.checkpoint: what `lmi-server partition` writes, or a list of files in DeepSpeed's form.

DeepSpeed's form is JSON with `type`, `checkpoints`, `version`, and sometimes `parallelization`, `tp_size`, `mp_size`,
`dtype`. With the types BLOOM and ds_model a plain list of files holds a whole model under the names of its Hugging Face
checkpoint; those are loaded here. Files by rank (`tp`, `non_tp`) have the layout of DeepSpeed's kernels, and those of
Megatron its own names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, FailFast, Field, ValidationError
from pydantic_core import from_json

from lmi_server.contract.texts.quoting import excerpt

SHARDS_MANIFEST = "ds_inference_config.json"
"""The manifest beside the weights, which names the files of each rank; DeepSpeed uses the same name."""
MANIFEST_TYPE = "lmi-server ranks"
"""The type of such a manifest; DeepSpeed's own has another type."""

_WHOLE = ("bloom", "ds_model")
_ORIGINAL = "remove the key to load the model's original weights, or split those with `lmi-server partition`"
_MAX_BYTES = 16 << 20  # of a manifest; the names of 100,000 files take less
_DTYPES = {
    "float": "float32",
    "float32": "float32",
    "half": "float16",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_File = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=255)]
# Only the first error is told: pydantic takes a kilobyte for each, and a file may hold millions.
_Names = Annotated[list[_File], FailFast()]


def _once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("a file is named twice, and would be loaded twice")
    return names


class _Files(BaseModel):
    tp: Annotated[list[_Names], FailFast()]


class Manifest(BaseModel):
    """What `lmi-server partition` writes beside the weights: `checkpoints` names the files of each rank."""

    tp_size: int
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    quantization: str | None
    checkpoints: _Files

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of all files, beside the manifest."""
        return tuple(name for names in self.checkpoints.tp for name in names)


class WholeModel(BaseModel):
    """DeepSpeed's list of files that hold a whole model together; `dtype` is None if the manifest says none."""

    checkpoints: Annotated[_Names, Field(min_length=1), AfterValidator(_once)]
    dtype: Literal["float32", "float16", "bfloat16"] | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of all files, beside the manifest."""
        return tuple(self.checkpoints)


def read_manifest(path: Path) -> Manifest | WholeModel:
    """Return the content of a manifest. Raises ValueError, with the reason and a remedy, if it cannot be loaded."""
    content = _content(path)
    kind = content.get("type")
    if kind != MANIFEST_TYPE:
        _refuse_layouts(path, content)
        content = {"checkpoints": content.get("checkpoints"), "dtype": _dtype(path, content.get("dtype"))}
    try:
        return Manifest.model_validate(content) if kind == MANIFEST_TYPE else WholeModel.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        again = "split the model again" if kind == MANIFEST_TYPE else "correct it"
        raise ValueError(f"{path} is damaged: {key}: {problem['msg']}; {again}") from error


def _content(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # a pipe or a device has no end
            raise ValueError("it is no file")
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
        content = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); name a manifest in the model directory") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object; name a manifest of weights")
    return content


def _refuse_layouts(path: Path, content: dict[str, Any]) -> None:
    """Raise ValueError for the forms of DeepSpeed whose weights are not those of a Hugging Face checkpoint."""
    kind = str(content.get("type", "none"))[:40]
    if kind.lower() == "megatron":
        raise ValueError(
            f"{path}: type={kind!r} has weights under Megatron's names; convert them to a Hugging Face"
            f" checkpoint, or {_ORIGINAL}"
        )
    if kind.lower() not in _WHOLE:
        raise ValueError(
            f"{path}: type={kind!r} is not known; allowed: BLOOM and ds_model with a list of files; {_ORIGINAL}"
        )
    if isinstance(content.get("checkpoints"), dict) or content.get("parallelization", "pp") != "pp":
        raise ValueError(
            f"{path}: parallelization='tp' is for DeepSpeed's kernels, which have a weight layout of their"
            f" own; {_ORIGINAL}"
        )
    for key in ("mp_size", "tp_size"):
        if content.get(key, 1) not in (0, 1):
            raise ValueError(
                f"{path}: {key}={excerpt(str(content[key]), 20)} says that the files are parts of ranks; {_ORIGINAL}"
            )


def _dtype(path: Path, named: Any) -> str | None:
    if named is None:
        return None
    found = _DTYPES.get(str(named).lower().removeprefix("torch."))
    if found is None:
        raise ValueError(f"{path}: dtype={str(named)[:20]!r} is not allowed; allowed: {', '.join(_DTYPES)}")
    return found


def manifest_problem(path: Path, degree: int) -> str | None:
    """Return what keeps `degree` ranks from loading the weights of a manifest."""
    try:
        content = read_manifest(path)
    except ValueError as error:
        return str(error)
    missing = next((name for name in content.files if not os.path.isfile(path.parent / name)), None)
    if isinstance(content, WholeModel):
        return None if missing is None else f"{path.parent} lacks {missing}, which {path.name} names; fetch it"
    if content.tp_size != degree:
        return (
            f"{path} was split for option.tensor_parallel_degree={content.tp_size}, but the degree is {degree};"
            f" split the model again, or set the degree to {content.tp_size}"
        )
    if missing is not None or len(content.checkpoints.tp) != degree:
        return f"{path.parent} lacks {missing or 'weights'} of {path.name}; split the model again"
    return None
