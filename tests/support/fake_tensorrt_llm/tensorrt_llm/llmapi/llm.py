"""The class LLM of the PyTorch backend, and what the other one has in common with it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Literal

from tensorrt_llm.executor import Executor, LoRARequest, RequestOutput, record
from tensorrt_llm.llmapi import llm_args
from tensorrt_llm.llmapi.llm_args import BaseLlmArgs, TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput"]


class TransformersTokenizer:
    """The package's own wrapper around a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str, *arguments: Any, **keywords: Any) -> list[int]:
        return list(self.tokenizer.encode(text, *arguments, **keywords))

    def decode(self, ids: list[int], *arguments: Any, **keywords: Any) -> str:
        return str(self.tokenizer.decode(ids, *arguments, **keywords))


class BaseLLM:
    args_class: type[BaseLlmArgs]

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        self._check_names(kwargs)
        self.args = self.args_class(**given, **kwargs)
        record(
            "llm",
            backend=self.args_class.__name__,
            arguments=self.args.model_dump(mode="json", exclude_unset=True),
            plugins=_plugins(kwargs.get("build_config")),
            config=read(Path(model) / "config.json"),
        )
        self._workspace: tempfile.TemporaryDirectory[str] | None = None
        self._engine_dir = self._build(Path(model))
        self._executor: Executor | None = None
        self.tokenizer = None if skip_tokenizer_init else _load_tokenizer(tokenizer or self._engine_dir)
        self._executor = Executor(self.tokenizer, self._batch_size(), self._reports_statistics())

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.args_class.model_fields:
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")

    def _build(self, model: Path) -> Path:
        raise NotImplementedError

    def _batch_size(self) -> int:
        return self.args.max_batch_size or 2048

    def _reports_statistics(self) -> bool:
        return True

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or SamplingParams()
        params.set_up(self.tokenizer)
        inputs = {"prompt": inputs} if isinstance(inputs, str) else inputs
        inputs = {"prompt_token_ids": inputs} if isinstance(inputs, list) else inputs
        ids = inputs.get("prompt_token_ids") or self.tokenizer.encode(inputs["prompt"])
        self._check(len(ids), params)
        if lora_request is not None and not self.args.enable_lora:
            raise ValueError("LoRA is not enabled")
        lora = None if lora_request is None else vars(lora_request)
        bias = None if params.embedding_bias is None else list(params.embedding_bias.shape)
        names = [name for name in SamplingParams.__dataclass_fields__ if name not in ("embedding_bias", "stop_words")]
        given = {name: getattr(params, name) for name in names} | {"embedding_bias": bias}
        record("request", params=given, lora=lora, streaming=streaming, cache_salt=cache_salt, prompt_tokens=len(ids))
        return self._executor.submit(ids, inputs.get("prompt"), params, lora_request, streaming)

    def _check(self, prompt: int, params: SamplingParams) -> None:
        if prompt > (self.args.max_num_tokens or 8192):
            raise ValueError(f"The sum of prompt length ({prompt}) should not exceed max_num_tokens")

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return []

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        assert self._executor is not None
        results = self._executor.statistics
        if results is None:
            return _nothing()
        results.timeout = timeout or 2
        return results

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return []

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        return _nothing()

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
            if self._workspace is not None:
                self._workspace.cleanup()
            record("shutdown")


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    for values in ():
        yield values


class LLM(BaseLLM):
    args_class = TorchLlmArgs

    def _check_names(self, names: Iterable[str]) -> None:
        engines = getattr(llm_args, "TrtLlmArgs", None)  # a version without engines does not know its names either
        others = set() if engines is None else engines.model_fields.keys() - TorchLlmArgs.model_fields.keys()
        specific = sorted({*names} & others)
        if specific:
            raise ValueError(
                f"The following arguments are specific to TensorRT backend and are not supported in PyTorch: {specific}"
            )
        super()._check_names(names)

    def _build(self, model: Path) -> Path:
        check_checkpoint(model)
        fail_if_asked("memory")
        return model

    def _reports_statistics(self) -> bool:
        assert isinstance(self.args, TorchLlmArgs)
        return self.args.enable_iter_perf_stats


def _plugins(build: Any) -> dict[str, Any]:
    return {} if build is None else build.plugin_config.model_dump(mode="json", exclude_unset=True)


def progress(text: str) -> None:
    print(f"Loading Model: {text}", file=sys.stderr, flush=True)


def fail_if_asked(kind: str) -> None:
    if os.environ.get("FAKE_TENSORRT_LLM_FAIL") != kind:
        return
    if kind == "build":
        raise RuntimeError("Engine building failed, please check error log.")
    raise RuntimeError("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMalloc(ptr, n): out of memory")


def check_checkpoint(model: Path) -> None:
    if not read(model / "config.json"):
        raise ValueError(f"Failed to infer model format because no config.json exists in {model}")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _load_tokenizer(place: Any) -> TransformersTokenizer | None:
    from transformers import PreTrainedTokenizerFast

    if not (Path(place) / "tokenizer.json").is_file():
        return None
    return TransformersTokenizer(PreTrainedTokenizerFast.from_pretrained(str(place)))
