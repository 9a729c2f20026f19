"""The huggingface handler: any transformers causal language model under the rolling batch (`option.rolling_batch`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from handlers.checkpoints.chat_template import read_chat_template, with_prompt_beginning
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.handler import RollingBatchHandler

if TYPE_CHECKING:
    from handlers.rolling_batch.engine_loading import LoadedModel


class HuggingFaceHandler(RollingBatchHandler):
    """Serves a directory that `AutoModelForCausalLM` and `AutoTokenizer` can load."""

    def load_model(self, model_dir: str, options: HuggingFaceOptions) -> LoadedModel:
        from handlers.huggingface.model import load

        loaded = load(options.model_id or model_dir, options)
        if options.chat_template is not None:
            template = read_chat_template(options.chat_template, Path(model_dir))
            loaded.tokenizer.chat_template = with_prompt_beginning(template, loaded.tokenizer)
        return loaded
