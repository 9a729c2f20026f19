"""The base of the tasks that generate text in static batches: all sequences start together.

A batch ends with its longest sequence.
"""

from __future__ import annotations

import queue
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from handlers.checkpoints.placement import main_device
from handlers.checkpoints.rotary import RotaryEmbeddings
from handlers.checkpoints.text_length import TextLength
from handlers.checkpoints.transformers_loading import eos_token_ids, load_model
from handlers.tasks.generation.parameters import (
    LOWERED,
    NO_TOKEN,
    OUR_OWN,
    PARAMETERS,
    SAMPLING,
    TOKEN_PARAMETERS,
    flat_tokens,
)
from handlers.tasks.generation.steps import GrowingText, StepQueue, StopFlag, log_probs_of
from handlers.tasks.options import PipelineOptions
from handlers.tasks.padding import load_padding_tokenizer
from handlers.tasks.task import Piece, Task
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import MIN_TEMPERATURE, Usage
from lmi_server.dialects.fields import Field
from lmi_server.dialects.lmi.answer import room_note
from lmi_server.dialects.lmi.objects import Details, LmiToken

_LIBRARY_MAX_LENGTH = 20  # the default of transformers


class Prompt(NamedTuple):
    """One input: its text and its token ids."""

    text: str
    ids: list[int]


class NewTokens(NamedTuple):
    """The new tokens of one sequence, padded to the longest of its batch; `log_probs` only if they were asked for."""

    ids: list[int]
    log_probs: list[float] | None = None


class GenerationTask(Task):
    """The base of both kinds of models that generate text: decoders, and encoders with a decoder."""

    parameters: Mapping[str, Field] = MappingProxyType(PARAMETERS)
    auto_class: Any
    padding_side: str
    default_new_tokens: int

    def __init__(self, path: str, options: PipelineOptions) -> None:
        self.tokenizer = load_padding_tokenizer(path, options)
        self.text_length = TextLength(self.tokenizer)
        self.model = load_model(self.auto_class, path, options)
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 0
        self.max_length = options.max_model_len or max(positions, 0)  # XLNet says -1: it has no limit
        self._eos = eos_token_ids(self.model, self.tokenizer)
        self._vocabulary = self.model.get_input_embeddings().num_embeddings
        self._defaults: dict[str, Any] = {}  # the parameters that config.json sets for this task
        # libgomp keeps a team of threads for each thread that ever ran a parallel operation, and slows down once they
        # are more than the cores. A stream needs a second thread beside the main one, so all of generate() runs in it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._pads = True
        self._rotary = RotaryEmbeddings(self.model)

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        each = parameters.get("num_return_sequences", 1)
        results: dict[int, list[Any]] = {}
        for places in self._batches(inputs, parameters):
            together = [inputs[place] for place in places]
            sequences = self._thread.submit(self._generate, together, parameters).result()
            for number, place in enumerate(places):
                own = sequences[number * each : (number + 1) * each]
                results[place] = [self._result(inputs[place], new, parameters) for new in own]
        return [results[place] for place in range(len(inputs))]

    def items(self, result: Any) -> Sequence[Any]:
        """Return the sequences of one input; an answer lists the sequences of all inputs in a row."""
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
        if len(self._batches(inputs, parameters)) > 1:
            raise RequestError(
                "inputs: a stream of this model takes texts of the same number of tokens; send each in its own request"
            )
        tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        stopped = StopFlag()
        running = self._thread.submit(self._generate, inputs, parameters, StepQueue(tokens), stopped)
        running.add_done_callback(lambda _: tokens.put(None))
        texts = [self._growing_text(prompt, parameters) for prompt in inputs]
        try:
            while (step := tokens.get()) is not None:
                yield [Piece(text.feed(token), token) for text, token in zip(texts, step, strict=True)]
            running.result()  # raises whatever generate() raised
            yield [Piece(text.flush(), -1, text.finish_reason, text.tokens) for text in texts]
        finally:
            stopped.now = True  # also if the client has left: the batch ends at its next step

    @abstractmethod
    def result(self, prompt: Prompt, text: str, parameters: Mapping[str, Any]) -> Any:
        """Return the result for one input whose generated text is `text`."""

    @abstractmethod
    def new_tokens(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the new tokens in the output of generate(), (sequences, tokens)."""

    @abstractmethod
    def context(self, prompt: Prompt) -> Sequence[int]:
        """Return the tokens that the generated text continues; the detokenizer needs them for spaces."""

    def _batches(self, inputs: Sequence[Prompt], parameters: Mapping[str, Any]) -> list[list[int]]:
        """Return the places of the inputs that run together: all, or all of one length if padding changes answers.

        It does if a sequence may grow beyond the length up to which the model's rotary embeddings stay the same.
        """
        batches: dict[int, list[int]] = {}
        for place, prompt in enumerate(inputs):
            length = len(prompt.ids)
            mixes = self._pads and self._rotary.may_mix(self._longest(length, parameters))
            batches.setdefault(0 if mixes else length, []).append(place)
        return list(batches.values())

    def _longest(self, length: int, parameters: Mapping[str, Any]) -> int | None:
        """Return how many tokens a prompt of `length` and its answer have at most; None if the model limits these."""
        arguments = self.arguments(parameters)
        if "max_new_tokens" in arguments:
            return int(length + arguments["max_new_tokens"])
        return max(length, int(arguments["max_length"])) if "max_length" in arguments else None

    def _generate(
        self,
        inputs: Sequence[Prompt],
        parameters: Mapping[str, Any],
        steps: StepQueue | None = None,
        stopped: StopFlag | None = None,
    ) -> list[NewTokens]:
        """Return the new tokens of each sequence, input by input."""
        self._rotary.forget()
        if "seed" in parameters:
            torch.manual_seed(parameters["seed"])
        ids = [prompt.ids for prompt in inputs]
        padded = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side=self.padding_side)
        batch = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
        stop = list(parameters.get("stop", ()))
        scored = parameters.get("details", False)
        with torch.inference_mode():
            output = self.model.generate(
                **{name: tensor.to(main_device(self.model)) for name, tensor in batch.items()},
                **self.arguments(parameters),
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=steps,
                stopping_criteria=[stopped] if stopped is not None else None,
                **({"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}),
                **({"return_dict_in_generate": True, "output_logits": True} if scored else {}),
            )
        if not scored:
            return [NewTokens(ids) for ids in self.new_tokens(output, batch).tolist()]
        new = self.new_tokens(output.sequences, batch)
        return list(map(NewTokens, new.tolist(), log_probs_of(output, new).tolist()))

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of generate() beside the prompts."""
        asked = {name: value for name, value in parameters.items() if name not in OUR_OWN}
        arguments = {**self._defaults, **asked}
        if not {"max_new_tokens", "max_length"} & asked.keys() and not self._limits_itself():
            arguments["max_new_tokens"] = self.default_new_tokens
        elif "max_new_tokens" in asked:
            arguments.pop("max_length", None)
        samples = arguments.get("do_sample", self.model.generation_config.do_sample)
        if not samples or arguments.get("temperature", 1.0) < MIN_TEMPERATURE:
            arguments = {name: value for name, value in arguments.items() if name not in SAMPLING}
            arguments["do_sample"] = False
        if parameters.get("ignore_eos"):
            arguments["eos_token_id"] = NO_TOKEN
        return arguments

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Raise RequestError for token ids that the model has not: on a GPU they would end its process."""
        for name in TOKEN_PARAMETERS & parameters.keys():
            unknown = [token for token in flat_tokens(name, parameters[name]) if token >= self._vocabulary]
            if unknown:
                raise RequestError(
                    f"parameters.{name}: token id {unknown[0]} is not in the vocabulary of {self._vocabulary} tokens"
                )

    def _limits_itself(self) -> bool:
        """Return whether the model's files limit the length of an answer."""
        configured = self.model.generation_config
        own = configured.max_length not in (None, _LIBRARY_MAX_LENGTH) or configured.max_new_tokens is not None
        return own or bool({"max_new_tokens", "max_length"} & self._defaults.keys())

    def _growing_text(self, prompt: Prompt, parameters: Mapping[str, Any]) -> GrowingText:
        return GrowingText(self.tokenizer, self.context(prompt), self._ends(parameters), parameters)

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
            if LOWERED in parameters:
                result["details"].note = room_note(Usage(parameters[LOWERED], 0, room=parameters["max_new_tokens"]))
        return result

    def _details(self, prompt: Prompt, log_probs: list[float], ids: list[int], text: GrowingText) -> Details:
        special = self.tokenizer.all_special_ids
        details = Details(text.finish_reason, text.tokens, prompt.text)
        details.tokens = [
            LmiToken(token, self.tokenizer.decode([token]), log_prob, token in special)
            for token, log_prob in zip(ids, log_probs, strict=False)  # `ids` goes on with padding
        ]
        return details
