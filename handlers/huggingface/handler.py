"""The huggingface handler: any transformers causal language model under the rolling batch (`option.rolling_batch`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.handler import RollingBatchHandler

if TYPE_CHECKING:
    from handlers.rolling_batch.engine_loading import LoadedModel


class HuggingFaceHandler(RollingBatchHandler):
    """Serves a directory that `AutoModelForCausalLM` and `AutoTokenizer` can load."""

    def load_model(self, model_dir: str, options: HuggingFaceOptions) -> LoadedModel:
        from handlers.huggingface.model import load

        return load(options.model_id or model_dir, options)
