"""The tasks that generate text: continuing prompts, text to text, summaries and translations.

They call model.generate(): transformers 5 has no pipeline for text2text-generation, summarization and translation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from handlers.tasks import padding
from handlers.tasks.generation.parameters import LOWERED, PARAMETERS
from handlers.tasks.generation.task import GenerationTask, Prompt
from handlers.tasks.options import TRANSLATION, PipelineOptions
from handlers.tasks.task import read_text, same_names
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field

logger = logging.getLogger(__name__)


class TextGeneration(GenerationTask):
    """Continues prompts with a causal language model."""

    parameters: Mapping[str, Field] = MappingProxyType({**PARAMETERS, **same_names(return_full_text=fields.boolean)})
    auto_class = AutoModelForCausalLM
    padding_side = "left"
    default_new_tokens = 30  # the default of LMI

    def __init__(self, path: str, options: PipelineOptions) -> None:
        super().__init__(path, options)
        self._pads = self._thread.submit(padding.is_harmless, self.model, self.tokenizer.pad_token_id or 0).result()
        if not self._pads:
            logger.info("padding changes the answers of %s: only prompts of one length run together", path)

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Prompt:
        text = read_text(value)
        self.text_length.check(text, self.max_length)
        ids = self.tokenizer(text)["input_ids"]
        if not ids:
            raise RequestError("inputs: an empty text is not allowed; send a prompt")
        if self.max_length and len(ids) >= self.max_length:
            raise ContextLengthError.from_counts(len(ids), 1, self.max_length)
        return Prompt(text, ids)

    def fit(self, inputs: Sequence[Prompt], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Lower max_new_tokens to what the context has room for behind the longest prompt, as LMI's engines do."""
        longest = max(len(prompt.ids) for prompt in inputs)
        unasked = 1 if self._limits_itself() else self.default_new_tokens
        asked = parameters.get("max_new_tokens", parameters.get("max_length", longest + unasked) - longest)
        if not self.max_length or longest + asked <= self.max_length:
            return parameters
        lowered = {name: value for name, value in parameters.items() if name != "max_length"}
        return {**lowered, "max_new_tokens": self.max_length - longest, LOWERED: longest}

    def result(self, prompt: Prompt, text: str, parameters: Mapping[str, Any]) -> Any:
        before = prompt.text if parameters.get("return_full_text", True) else ""
        return {"generated_text": before + text}

    def new_tokens(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output[:, batch["input_ids"].shape[1] :]

    def context(self, prompt: Prompt) -> Sequence[int]:
        return prompt.ids


class TextToText(GenerationTask):
    """Generates with an encoder and a decoder: text2text-generation, summarization, translation."""

    parameters: Mapping[str, Field] = MappingProxyType({**PARAMETERS, **same_names(truncation=fields.boolean)})
    auto_class = AutoModelForSeq2SeqLM
    padding_side = "right"
    default_new_tokens = 256  # the default of the pipelines of transformers 4

    def __init__(self, task: str, path: str, options: PipelineOptions) -> None:
        super().__init__(path, options)
        self._key = _RESULT_KEYS.get(task, "translation_text")
        specific = (getattr(self.model.config, "task_specific_params", None) or {}).get(task, {})
        self._prefix = specific.get("prefix", "")
        self._defaults = {name: value for name, value in specific.items() if name in PARAMETERS}

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Prompt:
        text = read_text(value)
        if not parameters.get("truncation", False) and self.max_length:
            self.text_length.check(text, self.max_length + 1)
        ids = self.encode(self._prefix + text, parameters)
        if self.max_length and len(ids) > self.max_length:
            raise ContextLengthError(
                f"an input has {len(ids)} tokens, and the model takes at most {self.max_length}; send a shorter one, "
                "or send truncation=true in parameters"
            )
        return Prompt(text, ids)

    def encode(self, text: str, parameters: Mapping[str, Any]) -> list[int]:
        cut = parameters.get("truncation", False) and self.max_length
        limits = {"truncation": True, "max_length": self.max_length} if cut else {}
        return self.tokenizer(text, **limits)["input_ids"]  # type: ignore[no-any-return]

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super().arguments(parameters)
        arguments.pop("truncation", None)
        return arguments

    def result(self, prompt: Prompt, text: str, parameters: Mapping[str, Any]) -> Any:
        return {self._key: text}

    def new_tokens(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output[:, 1:]  # the first token is the decoder's start token

    def context(self, prompt: Prompt) -> Sequence[int]:
        return ()


_RESULT_KEYS = {"text2text-generation": "generated_text", "summarization": "summary_text"}


class Translation(TextToText):
    """Translates. For a model of many languages, `src_lang` and `tgt_lang` or the name of the task say which ones."""

    parameters: Mapping[str, Field] = MappingProxyType(
        {**TextToText.parameters, **same_names(src_lang=fields.string, tgt_lang=fields.string)}
    )

    def __init__(self, task: str, path: str, options: PipelineOptions) -> None:
        super().__init__(task, path, options)
        found = TRANSLATION.fullmatch(task)
        self._languages = {"src_lang": found[1], "tgt_lang": found[2]} if found and not self._prefix else {}
        self._many = hasattr(self.tokenizer, "src_lang")

    def encode(self, text: str, parameters: Mapping[str, Any]) -> list[int]:
        if self._many:
            self._target(parameters)
            self.tokenizer.src_lang = self._language("src_lang", parameters)
        elif {"src_lang", "tgt_lang"} & parameters.keys():
            raise RequestError("parameters.src_lang and tgt_lang are for models of many languages; leave them out")
        return super().encode(text, parameters)

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super().arguments(parameters)
        if self._many:
            arguments["forced_bos_token_id"] = self._target(parameters)
        return arguments

    def _target(self, parameters: Mapping[str, Any]) -> int:
        """Return the token of the target language, with which the translation begins."""
        language = self._language("tgt_lang", parameters)
        return int(self.tokenizer.convert_tokens_to_ids(self._token_of(language)))

    def _language(self, name: str, parameters: Mapping[str, Any]) -> str:
        language = parameters.get(name, self._languages.get(name))
        if language is None:
            raise RequestError(f"parameters.{name} is missing; send the code of a language that the model knows")
        if self.tokenizer.convert_tokens_to_ids(self._token_of(language)) in (None, self.tokenizer.unk_token_id):
            raise fields.not_allowed(f"parameters.{name}", language, "send the code of a language that the model knows")
        return str(language)

    def _token_of(self, language: str) -> str:
        tokens = getattr(self.tokenizer, "lang_code_to_token", None) or {}  # in M2M100 the token of en is __en__
        return str(tokens.get(language, language))
