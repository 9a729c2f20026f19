"""Tasks that generate text in static batches: all sequences start together, and the batch ends with the longest.

They call model.generate(): transformers 5 has no pipeline for text2text-generation, summarization and translation.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, StoppingCriteria
from transformers.generation import BaseStreamer

from handlers.checkpoints.placement import main_device
from handlers.checkpoints.transformers_loading import eos_token_ids, load_model, load_tokenizer
from handlers.rolling_batch.detokenizer import IncrementalDetokenizer, StopMatcher
from handlers.tasks import padding
from handlers.tasks.options import TRANSLATION, PipelineOptions
from handlers.tasks.task import Piece, Task, named, read_text
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import LEAST_TEMPERATURE, FinishReason, Usage
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field
from lmi_server.dialects.lmi.answer import room_note
from lmi_server.dialects.lmi.objects import Details, LmiToken

_log = logging.getLogger(__name__)

_COUNT = fields.integer(1)
_SWITCHED_OFF = fields.integer(0)
_NUMBER = fields.number(lambda value: True, "a number")
_SHARE = fields.number(lambda value: 0 <= value < 1, "a number from 0 to below 1 (0 is off)")


def _tokens(name: str, value: Any) -> int | list[int]:
    """Read one token id, or a list of them."""
    return list(fields.token_ids(name, value)) if isinstance(value, list) else fields.token_ids(name, [value])[0]


def _token_lists(name: str, value: Any) -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, "send a list of lists of token ids, such as [[12, 345]]")
    return [list(fields.token_ids(name, item)) for item in value]


def _length_penalty(name: str, value: Any) -> tuple[int, float]:
    """Read exponential_decay_length_penalty: the token from which the penalty grows, and by what factor."""
    if not isinstance(value, list) or len(value) != 2:
        raise fields.not_allowed(name, value, "send [start, factor], such as [20, 1.1]")
    return _SWITCHED_OFF(name, value[0]), _NUMBER(name, value[1])


def _sequence_bias(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise fields.not_allowed(name, value, "send a list such as [[[12, 345], -5.0]]")
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise fields.not_allowed(name, item, "send pairs of token ids and a bias, such as [[12, 345], -5.0]")
    return [[list(fields.token_ids(name, ids)), _NUMBER(name, bias)] for ids, bias in value]


_PARAMETERS = {
    **named(
        max_new_tokens=fields.MAX_TOKENS,
        max_length=fields.MAX_TOKENS,
        max_time=fields.number(lambda value: value > 0, "a number of seconds above 0"),
        min_new_tokens=_SWITCHED_OFF,
        min_length=_SWITCHED_OFF,
        do_sample=fields.boolean,
        temperature=fields.TEMPERATURE,
        top_k=fields.top_k,
        top_p=fields.PROBABILITY,
        top_h=fields.PROBABILITY,
        typical_p=fields.PROBABILITY,
        min_p=fields.MIN_P,
        epsilon_cutoff=_SHARE,
        eta_cutoff=_SHARE,
        repetition_penalty=fields.REPETITION,
        encoder_repetition_penalty=fields.REPETITION,
        no_repeat_ngram_size=_SWITCHED_OFF,
        encoder_no_repeat_ngram_size=_SWITCHED_OFF,
        bad_words_ids=_token_lists,
        suppress_tokens=fields.token_ids,
        begin_suppress_tokens=fields.token_ids,
        sequence_bias=_sequence_bias,
        forced_bos_token_id=_tokens,
        forced_eos_token_id=_tokens,
        eos_token_id=_tokens,
        exponential_decay_length_penalty=_length_penalty,
        guidance_scale=fields.number(lambda value: value > 0, "a number above 0 (1 is off)"),
        renormalize_logits=fields.boolean,
        remove_invalid_values=fields.boolean,
        use_cache=fields.boolean,
        num_return_sequences=_COUNT,
        num_beams=_COUNT,
        length_penalty=_NUMBER,
        early_stopping=fields.early_stopping,
        seed=fields.SEED,
        stop=fields.stop_strings,
        include_stop_str_in_output=fields.boolean,
    ),
    "stop_sequences": Field("stop", fields.stop_strings),
    "stop_strings": Field("stop", fields.stop_strings),
    "max_tokens": Field("max_new_tokens", fields.MAX_TOKENS),
    "min_tokens": Field("min_new_tokens", _SWITCHED_OFF),
    "details": Field("details", fields.boolean),
    # What text-generation-inference's clients always send.
    "best_of": Field(None, fields.one("send num_return_sequences")),
    "watermark": Field(None, fields.off("leave it out")),
    "decoder_input_details": Field(None, fields.off("leave it out, or serve the model under the rolling batch")),
    "ignore_eos": Field("ignore_eos", fields.boolean),
    "ignore_eos_token": Field("ignore_eos", fields.boolean),
}
_TOKENS = frozenset(
    {"bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "eos_token_id"}
    | {"forced_bos_token_id", "forced_eos_token_id"}
)
_LOWERED = "tokens of the longest prompt"  # set by `fitted` alone: no request can name it
# Parameters that this module applies itself; generate() does not get them.
_OUR_OWN = frozenset(
    {"seed", "stop", "include_stop_str_in_output", "return_full_text", "src_lang", "tgt_lang", "ignore_eos", "details"}
    | {_LOWERED}
)
_NO_TOKEN = -1  # as the end of a sequence: no token is
_SAMPLING = frozenset({"temperature", "top_k", "top_p", "top_h", "typical_p", "min_p", "epsilon_cutoff", "eta_cutoff"})


class Prompt(NamedTuple):
    """One input: its text and its token ids."""

    text: str
    ids: list[int]


class NewTokens(NamedTuple):
    """The new tokens of one sequence, padded to the longest of its batch; `log_probs` only if they were asked for."""

    ids: list[int]
    log_probs: list[float] | None = None


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
        self.finish_reason: FinishReason = "length"  # unless something else ends it
        self.tokens = 0

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; "" after the end of the sequence, while others of the batch go on."""
        if self.finish_reason != "length":
            return ""
        self.tokens += 1
        if token in self._eos:
            self.finish_reason = "eos_token"
            return ""
        text, stopped = self._stop.feed(self._detokenizer.feed(token))
        if stopped:
            self.finish_reason = "stop_sequence"
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
        self.max_length = options.max_model_len or max(positions, 0)  # XLNet says -1: it has no limit
        self._eos = eos_token_ids(self._model, self._tokenizer)
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._defaults: dict[str, Any] = {}  # the parameters that config.json sets for this task
        # libgomp keeps a team of threads for each thread that ever ran a parallel operation, and slows down once they
        # are more than the cores. A stream needs a second thread beside the main one, so all of generate() runs in it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._pads = True

    @property
    def model(self) -> Any:
        return self._model

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        each = parameters.get("num_return_sequences", 1)
        results: dict[int, list[Any]] = {}
        for places in self._batches(inputs):
            together = [inputs[place] for place in places]
            sequences = self._thread.submit(self._generate, together, parameters).result()
            for number, place in enumerate(places):
                own = sequences[number * each : (number + 1) * each]
                results[place] = [self._result(inputs[place], new, parameters) for new in own]
        return [results[place] for place in range(len(inputs))]

    def items(self, result: Any) -> Sequence[Any]:
        """Return the sequences of one input: an answer lists those of all inputs one after the other."""
        return result  # type: ignore[no-any-return]

    def check_stream(self, parameters: Mapping[str, Any]) -> None:
        if parameters.get("num_beams", 1) > 1:
            raise RequestError(
                "parameters.num_beams: beam search has no tokens to stream before its end; send 1, or stream=false"
            )
        if parameters.get("num_return_sequences", 1) != 1:
            raise RequestError(
                "parameters.num_return_sequences: a stream of a static batch has one text for each input; leave it out,"
                " or send stream=false"
            )

    def stream(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Iterator[list[Piece]]:
        if len(self._batches(inputs)) > 1:
            raise RequestError(
                "inputs: a stream of this model takes texts of the same number of tokens; send each in its own request"
            )
        tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        stopped = _Stopped()
        running = self._thread.submit(self._generate, inputs, parameters, _Steps(tokens), stopped)
        running.add_done_callback(lambda _: tokens.put(None))
        texts = [self._growing_text(prompt, parameters) for prompt in inputs]
        try:
            while (step := tokens.get()) is not None:
                yield [Piece(text.feed(token), token) for text, token in zip(texts, step, strict=True)]
            running.result()  # raises whatever generate() raised
            yield [Piece(text.flush(), -1, text.finish_reason, text.tokens) for text in texts]
        finally:
            stopped.now = True  # also if the client has left: the batch ends at its next step

    def details(self) -> Mapping[str, Any]:
        return {
            "model": type(self._model).__name__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(main_device(self._model)),
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

    def _batches(self, inputs: Sequence[Prompt]) -> list[list[int]]:
        """Return the places of the inputs that run together: all, or those of one length if padding changes answers."""
        if self._pads:
            return [list(range(len(inputs)))]
        batches: dict[int, list[int]] = {}
        for place, prompt in enumerate(inputs):
            batches.setdefault(len(prompt.ids), []).append(place)
        return list(batches.values())

    def _generate(
        self,
        inputs: Sequence[Prompt],
        parameters: Mapping[str, Any],
        steps: _Steps | None = None,
        stopped: _Stopped | None = None,
    ) -> list[NewTokens]:
        """Return the new tokens of each sequence, those of one input after each other."""
        if "seed" in parameters:
            torch.manual_seed(parameters["seed"])
        ids = [prompt.ids for prompt in inputs]
        padded = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side=self.padding_side)
        batch = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
        stop = list(parameters.get("stop", ()))
        scored = parameters.get("details", False)
        with torch.inference_mode():
            output = self._model.generate(
                **{name: tensor.to(main_device(self._model)) for name, tensor in batch.items()},
                **self.arguments(parameters),
                pad_token_id=self._tokenizer.pad_token_id,
                streamer=steps,
                stopping_criteria=[stopped] if stopped is not None else None,
                **({"stop_strings": stop, "tokenizer": self._tokenizer} if stop else {}),
                **({"return_dict_in_generate": True, "output_logits": True} if scored else {}),
            )
        if not scored:
            return [NewTokens(ids) for ids in self.new_tokens(output, batch).tolist()]
        new = self.new_tokens(output.sequences, batch)
        return list(map(NewTokens, new.tolist(), _log_probs(output, new).tolist()))

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
        if parameters.get("ignore_eos"):
            arguments["eos_token_id"] = _NO_TOKEN
        return arguments

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Raise RequestError for token ids that the model has not: on a GPU they would end its process."""
        for name in _TOKENS & parameters.keys():
            unknown = [token for token in _flat_tokens(name, parameters[name]) if token >= self._vocabulary]
            if unknown:
                raise RequestError(
                    f"parameters.{name}: token id {unknown[0]} is not in the vocabulary of {self._vocabulary} tokens"
                )

    def _limits_itself(self) -> bool:
        """Return whether the model's files limit the length of an answer."""
        configured = self._model.generation_config
        own = configured.max_length not in (None, _LIBRARY_MAX_LENGTH) or configured.max_new_tokens is not None
        return own or bool({"max_new_tokens", "max_length"} & self._defaults.keys())

    def _growing_text(self, prompt: Prompt, parameters: Mapping[str, Any]) -> _GrowingText:
        return _GrowingText(self._tokenizer, self.context(prompt), self._ends(parameters), parameters)

    def _ends(self, parameters: Mapping[str, Any]) -> frozenset[int]:
        """Return the tokens that end a sequence of a request with these parameters."""
        if parameters.get("ignore_eos"):
            return frozenset()
        asked = parameters.get("eos_token_id")
        if asked is None:
            return self._eos
        return frozenset(asked if isinstance(asked, list) else [asked])

    def _result(self, prompt: Prompt, new: NewTokens, parameters: Mapping[str, Any]) -> Any:
        text = self._growing_text(prompt, parameters)
        pieces = [text.feed(token) for token in new.ids]
        result = self.result(prompt, "".join(pieces) + text.flush(), parameters)
        if new.log_probs is not None:
            result["details"] = self._details(prompt, new.log_probs[: text.tokens], new.ids, text)
            if _LOWERED in parameters:
                result["details"].note = room_note(Usage(parameters[_LOWERED], 0, room=parameters["max_new_tokens"]))
        return result

    def _details(self, prompt: Prompt, log_probs: list[float], ids: list[int], text: _GrowingText) -> Details:
        special = self._tokenizer.all_special_ids
        details = Details(text.finish_reason, text.tokens, prompt.text)
        details.tokens = [
            LmiToken(token, self._tokenizer.decode([token]), log_prob, token in special)
            for token, log_prob in zip(ids, log_probs, strict=False)  # `ids` goes on with padding
        ]
        return details


def _flat_tokens(name: str, value: Any) -> list[int]:
    """Return the token ids in the value of a parameter."""
    if isinstance(value, int):
        return [value]
    if name == "sequence_bias":
        return [token for ids, _ in value for token in ids]
    return [token for item in value for token in (item if isinstance(item, list) else [item])]


def _log_probs(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own log probability of each new token, (sequences, tokens), of what generate() returned."""
    sequences = torch.arange(len(tokens), device=tokens.device)
    beams = getattr(output, "beam_indices", None)  # which row of each step a sequence has come from
    steps = []
    for step, logits in enumerate(output.logits[: tokens.shape[1]]):
        rows = sequences if beams is None else beams[:, step].clamp_min(0)
        steps.append(logits[rows].float().log_softmax(-1)[sequences, tokens[:, step]])
    return torch.stack(steps, dim=1)


_LIBRARY_MAX_LENGTH = 20  # the default of transformers


class TextGeneration(GenerationTask):
    """Continues prompts with a causal language model."""

    parameters: Mapping[str, Field] = MappingProxyType({**_PARAMETERS, **named(return_full_text=fields.boolean)})
    auto_class = AutoModelForCausalLM
    padding_side = "left"
    default_new_tokens = 30  # the default of LMI

    def __init__(self, path: str, options: PipelineOptions) -> None:
        super().__init__(path, options)
        self._pads = self._thread.submit(padding.is_harmless, self._model, self._tokenizer.pad_token_id or 0).result()
        if not self._pads:
            _log.info("padding changes the answers of %s: only prompts of one length run together", path)

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Prompt:
        text = read_text(value)
        ids = self._tokenizer(text)["input_ids"]
        if not ids:
            raise RequestError("inputs: an empty text is not allowed; send a prompt")
        if self.max_length and len(ids) >= self.max_length:
            raise ContextLengthError.of(len(ids), 1, self.max_length)
        return Prompt(text, ids)

    def fitted(self, inputs: Sequence[Prompt], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Lower max_new_tokens to what the context has room for behind the longest prompt, as LMI's engines do."""
        longest = max(len(prompt.ids) for prompt in inputs)
        unasked = 1 if self._limits_itself() else self.default_new_tokens
        asked = parameters.get("max_new_tokens", parameters.get("max_length", longest + unasked) - longest)
        if not self.max_length or longest + asked <= self.max_length:
            return parameters
        lowered = {name: value for name, value in parameters.items() if name != "max_length"}
        return {**lowered, "max_new_tokens": self.max_length - longest, _LOWERED: longest}

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
