"""Tasks that generate text in static batches: all sequences start together, and the batch ends with the longest.

They call model.generate(): transformers 5 has no pipeline for text2text-generation, summarization and translation.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, StoppingCriteria
from transformers.generation import BaseStreamer

from handlers.checkpoints.transformers_loading import eos_token_ids, load_model, load_tokenizer
from handlers.rolling_batch.detokenizer import IncrementalDetokenizer, StopMatcher
from handlers.tasks.options import TRANSLATION, PipelineOptions
from handlers.tasks.task import Task, named, read_text
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import LEAST_TEMPERATURE
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field

_COUNT = fields.integer(1)

_PARAMETERS = {
    **named(
        max_new_tokens=fields.MAX_TOKENS,
        max_length=fields.MAX_TOKENS,
        min_new_tokens=fields.integer(0),
        min_length=fields.integer(0),
        do_sample=fields.boolean,
        temperature=fields.TEMPERATURE,
        top_k=fields.top_k,
        top_p=fields.PROBABILITY,
        typical_p=fields.PROBABILITY,
        min_p=fields.MIN_P,
        repetition_penalty=fields.REPETITION,
        no_repeat_ngram_size=fields.integer(0),
        num_beams=_COUNT,
        length_penalty=fields.number(lambda value: True, "a number"),
        early_stopping=fields.boolean,
        seed=fields.SEED,
        stop=fields.stop_strings,
        include_stop_str_in_output=fields.boolean,
    ),
    "stop_sequences": Field("stop", fields.stop_strings),
}
# Parameters that this module applies itself; generate() does not get them.
_OUR_OWN = frozenset({"seed", "stop", "include_stop_str_in_output", "return_full_text", "src_lang", "tgt_lang"})
_SAMPLING = frozenset({"temperature", "top_k", "top_p", "typical_p", "min_p"})


class Prompt(NamedTuple):
    """One input: its text and its token ids."""

    text: str
    ids: list[int]


class _Stopped(StoppingCriteria):
    """Ends a batch if its client has left."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.now, dtype=torch.bool, device=input_ids.device)


class _Steps(BaseStreamer):
    """Puts the tokens of each step into a queue, as a list with one per sequence."""

    def __init__(self, tokens: queue.SimpleQueue[list[int] | None]) -> None:
        self._tokens = tokens
        self._is_prompt = True  # generate() puts the prompt first

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._tokens.put(value.reshape(-1).tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the end of the future reports the end, also if generate() raises."""


class _GrowingText:
    """The text of one sequence, token by token, up to its end or to a stop sequence."""

    def __init__(
        self, tokenizer: Any, before: Sequence[int], eos: frozenset[int], parameters: Mapping[str, Any]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens=True)
        include_stop = parameters.get("include_stop_str_in_output", False)
        self._stop = StopMatcher(tuple(parameters.get("stop", ())), include_stop)
        self._eos = eos
        self._ended = False

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; "" after the end of the sequence, while others of the batch go on."""
        if self._ended or token in self._eos:
            self._ended = True
            return ""
        text, self._ended = self._stop.feed(self._detokenizer.feed(token))
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the batch."""
        text, _ = self._stop.feed(self._detokenizer.flush())
        return text + self._stop.flush()


class GenerationTask(Task):
    """The base of both kinds of models that generate text: decoders, and encoders with a decoder."""

    parameters: Mapping[str, Field] = MappingProxyType(_PARAMETERS)
    auto_class: Any
    padding_side: str
    default_new_tokens: int

    def __init__(self, path: str, options: PipelineOptions) -> None:
        self._tokenizer = load_tokenizer(path, options)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = load_model(self.auto_class, path, options)
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or 0
        self.max_length = options.max_model_len or positions
        self._eos = eos_token_ids(self._model, self._tokenizer)
        self._defaults: dict[str, Any] = {}  # the parameters that config.json sets for this task
        # libgomp keeps a team of threads for each thread that ever ran a parallel operation, and slows down once they
        # are more than the cores. A stream needs a second thread beside the main one, so all of generate() runs in it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")

    @property
    def model(self) -> Any:
        return self._model

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        sequences = self._thread.submit(self._generate, inputs, parameters).result()
        return [
            self.result(prompt, self._text_of(prompt, ids, parameters), parameters)
            for prompt, ids in zip(inputs, sequences, strict=True)
        ]

    def check_stream(self, parameters: Mapping[str, Any]) -> None:
        if parameters.get("num_beams", 1) > 1:
            raise RequestError(
                "parameters.num_beams: beam search has no tokens to stream before its end; send 1, or stream=false"
            )

    def stream(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Iterator[list[str]]:
        tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        stopped = _Stopped()
        running = self._thread.submit(self._generate, inputs, parameters, _Steps(tokens), stopped)
        running.add_done_callback(lambda _: tokens.put(None))
        texts = [self._growing_text(prompt, parameters) for prompt in inputs]
        try:
            while (step := tokens.get()) is not None:
                pieces = [text.feed(token) for text, token in zip(texts, step, strict=True)]
                if any(pieces):
                    yield pieces
            running.result()  # raises whatever generate() raised
            rest = [text.flush() for text in texts]
            if any(rest):
                yield rest
        finally:
            stopped.now = True  # also if the client has left: the batch ends at its next step

    def details(self) -> Mapping[str, Any]:
        return {
            "model": type(self._model).__name__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
            "threads": torch.get_num_threads(),
        }

    def result(self, prompt: Prompt, text: str, parameters: Mapping[str, Any]) -> Any:
        """Return the result for one input whose generated text is `text`."""
        raise NotImplementedError

    def new_tokens(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the new tokens in the output of generate(), (sequences, tokens)."""
        raise NotImplementedError

    def context(self, prompt: Prompt) -> Sequence[int]:
        """Return the tokens that the generated text continues; the detokenizer needs them for spaces."""
        raise NotImplementedError

    def _generate(
        self,
        inputs: Sequence[Prompt],
        parameters: Mapping[str, Any],
        steps: _Steps | None = None,
        stopped: _Stopped | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each sequence, padded to the longest."""
        if "seed" in parameters:
            torch.manual_seed(parameters["seed"])
        ids = [prompt.ids for prompt in inputs]
        padded = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side=self.padding_side)
        batch = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
        stop = list(parameters.get("stop", ()))
        with torch.inference_mode():
            output = self._model.generate(
                **{name: tensor.to(self._model.device) for name, tensor in batch.items()},
                **self.arguments(parameters),
                pad_token_id=self._tokenizer.pad_token_id,
                streamer=steps,
                stopping_criteria=[stopped] if stopped is not None else None,
                **({"stop_strings": stop, "tokenizer": self._tokenizer} if stop else {}),
            )
        return self.new_tokens(output, batch).tolist()  # type: ignore[no-any-return]

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of generate() beside the prompts."""
        asked = {name: value for name, value in parameters.items() if name not in _OUR_OWN}
        arguments = {**self._defaults, **asked}
        if not {"max_new_tokens", "max_length"} & asked.keys() and not self._limits_itself():
            arguments["max_new_tokens"] = self.default_new_tokens
        elif "max_new_tokens" in asked:
            arguments.pop("max_length", None)
        samples = arguments.get("do_sample", self._model.generation_config.do_sample)
        if not samples or arguments.get("temperature", 1.0) < LEAST_TEMPERATURE:
            arguments = {name: value for name, value in arguments.items() if name not in _SAMPLING}
            arguments["do_sample"] = False
        return arguments

    def _limits_itself(self) -> bool:
        """Return whether the model's files limit the length of an answer."""
        configured = self._model.generation_config
        own = configured.max_length not in (None, _LIBRARY_MAX_LENGTH) or configured.max_new_tokens is not None
        return own or bool({"max_new_tokens", "max_length"} & self._defaults.keys())

    def _growing_text(self, prompt: Prompt, parameters: Mapping[str, Any]) -> _GrowingText:
        return _GrowingText(self._tokenizer, self.context(prompt), self._eos, parameters)

    def _text_of(self, prompt: Prompt, ids: list[int], parameters: Mapping[str, Any]) -> str:
        text = self._growing_text(prompt, parameters)
        return "".join(map(text.feed, ids)) + text.flush()


_LIBRARY_MAX_LENGTH = 20  # the default of transformers


class TextGeneration(GenerationTask):
    """Continues prompts with a causal language model."""

    parameters: Mapping[str, Field] = MappingProxyType({**_PARAMETERS, **named(return_full_text=fields.boolean)})
    auto_class = AutoModelForCausalLM
    padding_side = "left"
    default_new_tokens = 30  # the default of LMI

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Prompt:
        text = read_text(value)
        ids = self._tokenizer(text)["input_ids"]
        if not ids:
            raise RequestError("inputs: an empty text is not allowed; send a prompt")
        new = parameters.get("max_new_tokens", max(0, parameters.get("max_length", 0) - len(ids)) or 1)
        if self.max_length and len(ids) + new > self.max_length:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and {new} new ones are asked for, but the model's context has "
                f"{self.max_length}; shorten the prompt or lower max_new_tokens"
            )
        return Prompt(text, ids)

    def result(self, prompt: Prompt, text: str, parameters: Mapping[str, Any]) -> Any:
        before = prompt.text if parameters.get("return_full_text", True) else ""
        return {"generated_text": before + text}

    def new_tokens(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output[:, batch["input_ids"].shape[1] :]

    def context(self, prompt: Prompt) -> Sequence[int]:
        return prompt.ids


class TextToText(GenerationTask):
    """Generates with an encoder and a decoder: text2text-generation, summarization, translation."""

    parameters: Mapping[str, Field] = MappingProxyType({**_PARAMETERS, **named(truncation=fields.boolean)})
    auto_class = AutoModelForSeq2SeqLM
    padding_side = "right"
    default_new_tokens = 256  # the default of the pipelines of transformers 4

    def __init__(self, task: str, path: str, options: PipelineOptions) -> None:
        super().__init__(path, options)
        self._key = _RESULT_KEYS.get(task, "translation_text")
        specific = (getattr(self._model.config, "task_specific_params", None) or {}).get(task, {})
        self._prefix = specific.get("prefix", "")
        self._defaults = {name: value for name, value in specific.items() if name in _PARAMETERS}

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Prompt:
        text = read_text(value)
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
        return self._tokenizer(text, **limits)["input_ids"]  # type: ignore[no-any-return]

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
        {**TextToText.parameters, **named(src_lang=fields.string, tgt_lang=fields.string)}
    )

    def __init__(self, task: str, path: str, options: PipelineOptions) -> None:
        super().__init__(task, path, options)
        found = TRANSLATION.fullmatch(task)
        self._languages = {"src_lang": found[1], "tgt_lang": found[2]} if found and not self._prefix else {}
        self._many = hasattr(self._tokenizer, "src_lang")

    def encode(self, text: str, parameters: Mapping[str, Any]) -> list[int]:
        if self._many:
            self._target(parameters)
            self._tokenizer.src_lang = self._language("src_lang", parameters)
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
        return int(self._tokenizer.convert_tokens_to_ids(self._token_of(language)))

    def _language(self, name: str, parameters: Mapping[str, Any]) -> str:
        language = parameters.get(name, self._languages.get(name))
        if language is None:
            raise RequestError(f"parameters.{name} is missing; send the code of a language that the model knows")
        if self._tokenizer.convert_tokens_to_ids(self._token_of(language)) in (None, self._tokenizer.unk_token_id):
            raise fields.not_allowed(f"parameters.{name}", language, "send the code of a language that the model knows")
        return str(language)

    def _token_of(self, language: str) -> str:
        tokens = getattr(self._tokenizer, "lang_code_to_token", None) or {}  # in M2M100 the token of en is __en__
        return str(tokens.get(language, language))
