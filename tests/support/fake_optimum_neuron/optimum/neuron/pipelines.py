"""Pipelines of diffusers with the sizes that they were compiled for."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

from optimum.neuron import calls, fail_to_load, fails


@functools.cache
def pipeline_class(name: str) -> type[Pipeline]:
    """Return the class with the name of optimum-neuron's."""
    return type(name, (Pipeline,), {"auto_model_class": getattr(diffusers, name.removeprefix("Neuron"))})


class Pipeline:
    auto_model_class: Any

    def __init__(self, path: str, sizes: dict[str, int]) -> None:
        self._path, self._sizes = path, sizes
        self._drawing = self.auto_model_class.from_pretrained(path, local_files_only=True)
        self.vae_scale_factor = self._drawing.vae_scale_factor
        static = {f"static_{side}": sizes[side] // self.vae_scale_factor for side in ("width", "height")}
        self.unet = SimpleNamespace(config=SimpleNamespace(neuron=static))
        self.neuron_configs = {"text_encoder": SimpleNamespace(batch_size=sizes["batch_size"])}
        self.num_images_per_prompt = sizes["num_images_per_prompt"]

    @classmethod
    def from_pretrained(
        cls,
        model_id: str,
        config: Any = None,
        export: bool = False,
        subfolder: str = "",
        revision: str = "main",
        force_download: bool = False,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        cache_dir: str | None = None,
        token: Any = None,
        **kwargs: Any,
    ) -> Pipeline | None:
        calls.append(("from_pretrained", {"class": cls.__name__, "model_id": model_id, "export": export, **kwargs}))
        fail_to_load()
        return (cls._export if export else cls._from_pretrained)(model_id, **kwargs)

    @classmethod
    def _from_pretrained(cls, model_id: str) -> Pipeline:
        stored = json.loads(Path(model_id, "unet", "model.neuron").read_text())
        return cls(stored["path"], stored["sizes"])

    @classmethod
    def _export(
        cls,
        model_id: str,
        torch_dtype: Any = torch.float32,
        tensor_parallel_size: int | None = 1,
        optlevel: str = "2",
        auto_cast: str | None = "matmul",
        auto_cast_type: str | None = "bf16",
        *,
        batch_size: int,
        height: int,
        width: int,
        num_images_per_prompt: int = 1,
    ) -> Pipeline | None:
        assert isinstance(torch_dtype, torch.dtype)
        sizes = {"batch_size": batch_size, "height": height, "width": width}
        if fails() == "no device":
            return None
        return cls(model_id, {**sizes, "num_images_per_prompt": num_images_per_prompt})

    def save_pretrained(self, save_directory: str, push_to_hub: bool = False) -> None:
        calls.append(("save_pretrained", {"save_directory": save_directory}))
        graph = Path(save_directory, "unet", "model.neuron")
        graph.parent.mkdir(parents=True)
        graph.write_text(json.dumps({"path": self._path, "sizes": self._sizes}))
        Path(save_directory, "model_index.json").write_text(json.dumps({"_class_name": type(self).__name__}))

    def set_progress_bar_config(self, **settings: Any) -> None:
        self._drawing.set_progress_bar_config(**settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if fails() == "core":
            raise RuntimeError("nrt_execute status=1202 message=hardware error")
        width, height = self._sizes["width"], self._sizes["height"]
        kwargs.pop("height", None)
        kwargs.pop("width", None)
        asked = (len(kwargs["prompt"]), kwargs.get("num_images_per_prompt", 1))
        if asked != (self._sizes["batch_size"], self.num_images_per_prompt):
            raise RuntimeError(f"Expected inputs of the shapes that were compiled, got {asked}")
        if kwargs.get("image"):
            kwargs["image"] = self._drawing.image_processor.preprocess(kwargs["image"], height=height, width=width)
        sides = {} if "Img2Img" in self.auto_model_class.__name__ else {"height": height, "width": width}
        return self._drawing(*args, **sides, **kwargs)
