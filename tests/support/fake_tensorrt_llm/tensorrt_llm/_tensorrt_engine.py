"""The class LLM of the backend that builds engines of TensorRT."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tensorrt_llm.llmapi.llm import BaseLLM, check_checkpoint, fail_if_asked, progress, read
from tensorrt_llm.llmapi.llm_args import BuildConfig, TrtLlmArgs
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class LLM(BaseLLM):
    args_class = TrtLlmArgs
    args: TrtLlmArgs

    def _build(self, model: Path) -> Path:
        if self.args.kv_cache_config.dtype != "auto":
            raise ValueError("KvCacheConfig.dtype must be auto in the TensorRT backend")
        if (model / "rank0.engine").is_file():
            return self._load_engine(model)
        check_checkpoint(model)
        self.args.build_config = self.args.build_config or BuildConfig()
        progress("[1/2]\tLoading HF model to memory")
        fail_if_asked("memory")
        progress("[2/2]\tBuilding TRT-LLM engine")
        fail_if_asked("build")
        self._workspace = tempfile.TemporaryDirectory(suffix="-llm-workspace")
        engine = Path(self._workspace.name)
        for rank in range(self.args.tensor_parallel_size * self.args.pipeline_parallel_size):
            (engine / f"rank{rank}.engine").write_bytes(b"fake engine")
        built = {"build_config": self.args.build_config.model_dump(mode="json"), "pretrained_config": {}}
        (engine / "config.json").write_text(json.dumps(built), encoding="utf-8")
        for name in _TOKENIZER_FILES:
            if (model / name).is_file():
                shutil.copy(model / name, engine / name)
        return engine

    def _load_engine(self, engine: Path) -> Path:
        if self.args.build_config is not None:
            progress("The build_config is ignored for model format of TLLM_ENGINE.")
        self.args.build_config = BuildConfig(**read(engine / "config.json")["build_config"])
        fail_if_asked("memory")
        return engine

    def save(self, engine_dir: str) -> None:
        shutil.copytree(self._engine_dir, engine_dir, dirs_exist_ok=True)

    def _batch_size(self) -> int:
        assert self.args.build_config is not None
        return self.args.build_config.max_batch_size

    def _check(self, prompt: int, params: SamplingParams) -> None:
        build = self.args.build_config
        assert build is not None
        if build.max_seq_len is not None and prompt + (params.max_tokens or 0) > build.max_seq_len:
            raise ValueError(f"The sum of prompt length ({prompt}) and max_tokens should not exceed max_seq_len")
        if params.use_beam_search and (params.best_of or 1) > build.max_beam_width:
            raise ValueError(f"sampling_params.best_of ({params.best_of}) cannot exceed max_beam_width")
        if params.prompt_logprobs and not build.gather_context_logits:
            raise ValueError(
                "`sampling_params.prompt_logprobs` requires `gather_context_logits=True` in the `BuildConfig`"
            )
        if params.logprobs and not self.args.gather_generation_logits:
            raise ValueError("`sampling_params.logprobs` requires `gather_generation_logits=True`")
