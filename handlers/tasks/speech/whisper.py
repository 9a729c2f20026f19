"""Whisper by its sequential algorithm: a window of 30 seconds per step, which begins where the last segment ended.

transformers' generate() runs the algorithm for one sound from start to end. Here each call of it computes one window,
of several sounds if they have the same parameters, so that sounds take turns. The texts are those of the library.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from handlers.checkpoints.placement import main_device
from handlers.tasks.options import PipelineOptions
from handlers.tasks.speech.recognition import OF_RESULT, PARAMETERS, SpeechRecognition
from handlers.tasks.speech.segments import Segment, certain_tokens, join_tokens, score, without_padding
from handlers.tasks.speech.transcription import Transcription
from handlers.tasks.task import same_names
from lmi_server.contract.errors import RequestError
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field

_FRAMES_PER_TOKEN = 2  # the encoder's convolutions make one position, and times have one step, of two frames
_THRESHOLDS = ("no_speech_threshold", "logprob_threshold", "compression_ratio_threshold")
_MAX_BEAMS = 16  # each has a cache of its own
_LONGEST_PROMPT = 8192  # characters; the model reads the last tokens alone
_CONDITION = "condition_on_prev_tokens"
_MAX_TEMPERATURE = 0.5  # of a window that the next one reads: what is sampled may be nonsense, which would go on
_OURS = ("language", "prompt", "task", "return_timestamps", _CONDITION, *OF_RESULT)


class WhisperTranscription(Transcription):
    """A sound; the first `seek` frames of its `features` (1, mels, frames) are written down, as `segments`.

    `reads_on`: each window is written down with the text of those before it, and so alone.
    """

    def __init__(self, samples: Any, sampling_rate: int, parameters: Mapping[str, Any], window: int) -> None:
        super().__init__(samples, sampling_rate, parameters)
        self.features: Any = None
        self.mask: Any = None
        self.language: str | None = None
        self.beams = 1
        self.reads_on = False
        self.seek = 0
        self.segments: list[Segment] = []
        self.text = ""
        self._window = window
        shared = {name: value for name, value in parameters.items() if name not in ("language", *OF_RESULT)}
        self._shared = tuple(sorted(shared.items()))

    @property
    def frames(self) -> int:
        """How many frames the next window has."""
        return min(self._window, int(self.features.shape[-1]) - self.seek)

    @property
    def key(self) -> Hashable:
        if self.features is None or self.reads_on:
            return None
        return self.frames, self.with_times, self._shared

    @property
    def with_times(self) -> bool:
        """Whether the model writes times between the segments: the windows of a long sound need them."""
        return bool(self.parameters.get("return_timestamps")) or self.features.shape[-1] > self._window

    @property
    def rows(self) -> int:
        return self.beams


class Whisper(SpeechRecognition):
    """Writes down sounds, or translates what is said in them to English.

    With `details` a result also has the duration, the language, and the segments as OpenAI's API writes them.
    """

    parameters: Mapping[str, Field] = MappingProxyType(
        {
            **PARAMETERS,
            **same_names(
                language=fields.string,
                task=fields.one_of("transcribe", "translate"),
                prompt=fields.string,
                temperature=fields.TEMPERATURE,
                num_beams=fields.integer(1, _MAX_BEAMS),
                condition_on_prev_tokens=fields.boolean,
            ),
        }
    )

    def __init__(self, pipeline: Any, options: PipelineOptions) -> None:
        super().__init__(pipeline, options)
        self._config = config = pipeline.generation_config
        self._window = int(pipeline.feature_extractor.nb_max_frames)
        self._precision = pipeline.feature_extractor.chunk_length / self.model.config.max_source_positions
        self._first_time = getattr(config, "no_timestamps_token_id", self.model.config.vocab_size) + 1
        self._languages = getattr(config, "lang_to_id", None) or {}
        self._attention = self.model.config._attn_implementation
        self._decides_late = any(getattr(config, name, None) is not None for name in _THRESHOLDS)

    # --- requests ---

    def check(self, parameters: Mapping[str, Any]) -> None:
        super().check(parameters)
        if "language" in parameters:
            self._check_language(parameters["language"])
        if parameters.get("task") == "translate" and not self._is_multilingual:
            raise fields.not_allowed("parameters.task", "translate", "send transcribe: the model knows English alone")
        if "prompt" in parameters:
            self._prompt_ids(parameters["prompt"])
        if parameters.get("return_timestamps") == "char":
            raise fields.not_allowed("parameters.return_timestamps", "char", "send true (of segments) or word")
        if parameters.get("return_timestamps") == "word" and not getattr(self._config, "alignment_heads", None):
            raise RequestError(
                "parameters.return_timestamps: word needs alignment_heads in the model's generation_config.json, which"
                " are missing; send true"
            )
        if parameters.get("stride_length_s") and not parameters.get("chunk_length_s"):
            raise RequestError("parameters.stride_length_s is of chunks; send chunk_length_s with it, or leave it out")
        if parameters.get("chunk_length_s") and parameters.get("details"):
            raise RequestError("parameters.chunk_length_s: details are of whole sounds; leave one of the two out")
        if parameters.get("chunk_length_s") and parameters.get(_CONDITION):
            raise RequestError(f"parameters.{_CONDITION}: chunks do not read each other; leave chunk_length_s out")

    @property
    def _is_multilingual(self) -> bool:
        return bool(getattr(self._config, "is_multilingual", True)) and bool(self._languages)

    def _check_language(self, language: str) -> None:
        code = _code(language)
        known = f"<|{code}|>" in self._languages if self._is_multilingual else code == "en"
        if not known:
            codes = sorted(name.strip("<|>") for name in self._languages) if self._is_multilingual else ["en"]
            raise fields.not_allowed("parameters.language", language, f"send a code of {', '.join(codes)}")

    def _prompt_ids(self, prompt: str) -> Any:
        """Return the tokens of a prompt behind the token for what came before; the last ones if they are too many."""
        try:
            ids = self.tokenizer.get_prompt_ids(prompt[-_LONGEST_PROMPT:], return_tensors="pt")
        except ValueError as error:
            raise RequestError(f"parameters.prompt: {error} Leave special tokens out") from None
        longest = self.model.config.max_target_positions // 2 - 1
        return torch.cat([ids[:1], ids[1:][-(longest - 1) :]])

    def begin(self, samples: Any, parameters: Mapping[str, Any]) -> Transcription:
        if parameters.get("chunk_length_s"):
            given = {name: value for name, value in parameters.items() if name not in _OURS}
            if "return_timestamps" in parameters:
                given["return_timestamps"] = parameters["return_timestamps"]
            return self.begin_chunks(samples, parameters, {**given, **self._of_generate(parameters, [None])})
        one = WhisperTranscription(samples, self.sampling_rate, parameters, self._window)
        one.language = self._language_of(parameters)
        sampled = parameters.get("temperature", 0.0) > 0
        one.beams = 1 if sampled else parameters.get("num_beams", self._config.num_beams or 1)
        asked = parameters.get(_CONDITION, getattr(self._config, _CONDITION, None))
        one.reads_on = bool(asked) and parameters.get("temperature", 0.0) < _MAX_TEMPERATURE
        return one

    def _language_of(self, parameters: Mapping[str, Any]) -> str | None:
        """Return the token of the language that the request or the model's files name; None if it is to be found."""
        named_one = parameters.get("language", getattr(self._config, "language", None))
        return None if named_one is None else f"<|{_code(named_one.strip('<|>'))}|>"

    # --- steps ---

    def advance(self, transcriptions: Sequence[Transcription]) -> None:
        if not isinstance(transcriptions[0], WhisperTranscription):
            super().advance(transcriptions)
            return
        windows = [one for one in transcriptions if isinstance(one, WhisperTranscription)]
        with torch.inference_mode():
            if windows[0].features is None:
                self._extract_features(windows[0])
            else:
                self._write_windows(windows)

    def _extract_features(self, one: WhisperTranscription) -> None:
        (item,) = self.pipeline.preprocess(one.samples)
        one.features, one.mask, one.samples = item["input_features"], item["attention_mask"], None

    def _write_windows(self, windows: Sequence[WhisperTranscription]) -> None:
        begins, frames = [one.seek for one in windows], windows[0].frames
        device = main_device(self.model)
        parts = [slice(begin, begin + frames) for begin in begins]
        features = torch.cat([one.features[:, :, part] for one, part in zip(windows, parts, strict=True)]).to(device)
        mask = torch.cat([one.mask[:, part] for one, part in zip(windows, parts, strict=True)]).to(device)
        self._find_languages(windows, features)
        parameters, details = windows[0].parameters, any(one.parameters.get("details") for one in windows)
        encoded: list[Any] = []
        hook = self.model.get_encoder().register_forward_hook(lambda _, __, output: encoded.append(output[0]))
        word = parameters.get("return_timestamps") == "word"
        try:
            output = self.model.generate(
                features,
                attention_mask=mask,
                generation_config=self._config,
                return_timestamps=windows[0].with_times,
                return_token_timestamps=word or None,
                return_segments=True,
                force_unique_generate_call=True,
                stopping_criteria=[_Progress(self, windows)],
                condition_on_prev_tokens=False,  # the prompt has them
                **self._of_generate(parameters, [one.language for one in windows], self._before(windows[0])),
            )
        finally:
            hook.remove()
            self.model.config._attn_implementation = self._attention  # times of words switch to a slower one
        for row, (one, found) in enumerate(zip(windows, output["segments"], strict=True)):
            self._add(one, found, encoded[-1][row : row + 1] if details else None)

    def _find_languages(self, windows: Sequence[WhisperTranscription], features: Any) -> None:
        unknown = [row for row, one in enumerate(windows) if one.language is None]
        if not unknown or not self._is_multilingual:
            return
        names = {number: name for name, number in self._languages.items()}
        found = self.model.detect_language(features[unknown], generation_config=self._config)
        for row, number in zip(unknown, found.tolist(), strict=True):
            windows[row].language = names[number]

    def _before(self, one: WhisperTranscription) -> Any:
        """Return the tokens of the prompt and of the windows before, where the next window reads these; else None.

        They are cut as transformers cuts them; of two times that end a segment the first one counts.
        """
        if not one.reads_on or not one.segments:
            return None
        prompt = self._prompt_ids(one.parameters.get("prompt", ""))
        parts = [prompt[1:]] if "prompt" in one.parameters else []  # an empty text has a token, too
        most = self.model.config.max_target_positions // 2 - 1
        for segment in one.segments[-most:]:  # each begins with a time
            tokens = segment.tokens
            parts.append(tokens[:-1] if len(tokens) > 2 and tokens[-2] >= self._first_time else tokens)
        return torch.cat([prompt[:1], torch.cat(parts)[-most:]])

    def _of_generate(
        self, parameters: Mapping[str, Any], languages: Sequence[str | None], before: Any = None
    ) -> dict[str, Any]:
        """Return the arguments of generate() for requests with these parameters; `before` takes the prompt's place."""
        arguments: dict[str, Any] = {}
        if self._is_multilingual:
            arguments["task"] = parameters.get("task", getattr(self._config, "task", None) or "transcribe")
            known = [language for language in languages if language is not None]
            if len(known) == len(languages):
                arguments["language"] = known
            elif "language" in parameters:
                arguments["language"] = self._language_of(parameters)
        prompt = self._prompt_ids(parameters["prompt"]) if before is None and "prompt" in parameters else before
        if prompt is not None:
            arguments["prompt_ids"] = prompt.to(main_device(self.model))
            room = self.model.config.max_target_positions - len(prompt) - _START_TOKENS
            if (self._config.max_new_tokens or 0) > room:
                arguments["max_new_tokens"] = room
        return {**arguments, **{name: parameters[name] for name in ("temperature", "num_beams") if name in parameters}}

    def _add(self, one: WhisperTranscription, found: Sequence[Mapping[str, Any]], encoded: Any) -> None:
        """Add the segments of a window, and go on behind them.

        `encoded` (1, positions, size) is what the encoder makes of the window, None without details.
        """
        tokens = [token for segment in found for token in segment["tokens"].tolist()]
        text = self.text_of(tokens)
        offset = one.seek * self._precision / _FRAMES_PER_TOKEN
        scores = None if encoded is None or not found else self._scores(found[0], encoded)
        for segment in found:
            times = segment.get("token_timestamps")
            one.segments.append(
                Segment(
                    one.seek,
                    float(segment["start"]) + offset,
                    float(segment["end"]) + offset,
                    segment["tokens"].cpu(),
                    None if times is None else times.cpu() + offset,
                    "" if encoded is None else self.text_of(segment["tokens"].tolist()),
                    text,
                    scores,
                )
            )
        one.seek += self._advance_of(tokens, one.frames)
        one.text += text
        if one.on_text is not None:
            one.on_text(one.text)
        if one.seek >= one.features.shape[-1]:
            one.result = self._result(one)

    def _advance_of(self, tokens: Sequence[int], frames: int) -> int:
        """Return where the next window begins, in frames from the begin of this one: if two times end the tokens, at
        the first of them."""
        if tokens[-2:] and min(tokens[-2:]) >= self._first_time and len(tokens) > 1:
            return (tokens[-2] - self._first_time) * _FRAMES_PER_TOKEN or frames
        return frames

    def _scores(self, segment: Mapping[str, Any], encoded: Any) -> Any:
        result = segment["result"]
        sequence = result["sequences"] if isinstance(result, Mapping) else result
        sequence = without_padding(sequence, self._config.eos_token_id, self._config.pad_token_id)
        start, no_speech = self._config.decoder_start_token_id, self._first_time - 2
        begin = segment["idxs"][0]
        return score(self.model, encoded, sequence.to(encoded.device), begin, start, no_speech)

    # --- texts ---

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens of one window, or of whole segments of it."""
        output = {"tokens": torch.tensor([list(tokens)], dtype=torch.long)}
        return str(self.pipeline.postprocess([output])["text"])

    def note_tokens(self, one: WhisperTranscription, tokens: Sequence[int]) -> None:
        """Tell who waits for the text of a sound what is certain of it, from the tokens of the window so far."""
        if one.on_text is None or self._decides_late:
            return
        certain = self.text_of(tokens[: certain_tokens(tokens, self._first_time)])
        one.on_text(one.text + certain.rstrip("\ufffd"))  # the end of it may be the begin of a character

    def _result(self, one: WhisperTranscription) -> dict[str, Any]:
        asked = one.parameters.get("return_timestamps")
        output = {"tokens": join_tokens(one.segments)[None]}
        if asked == "word":
            times = [segment.token_times for segment in one.segments]
            output["token_timestamps"] = torch.cat([torch.zeros(0), *times])[None]
        result = self._finish(one, self.pipeline.postprocess([output], return_timestamps=asked))
        if one.parameters.get("details"):
            temperature = one.parameters.get("temperature", 0.0)
            code = "en" if one.language is None else one.language.strip("<|>")
            result["language"] = LANGUAGES.get(code, code)
            result["segments"] = [part.plain(number, temperature) for number, part in enumerate(one.segments)]
        return result


_START_TOKENS = 4  # start, language, task, no times


def _code(language: str) -> str:
    """Return the code of a language that is named by its code or in English."""
    name = language.strip().lower()
    return str(TO_LANGUAGE_CODE.get(name, name))


class _Progress(StoppingCriteria):
    """Ends a window if nothing waits for any of its sounds, and shows the tokens of streamed ones."""

    def __init__(self, task: Whisper, windows: Sequence[WhisperTranscription]) -> None:
        self._task = task
        self._windows = windows
        self._begin: int | None = None
        self._shows = any(one.on_text is not None and one.beams == 1 for one in windows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        if self._begin is None:
            self._begin = input_ids.shape[1] - 1
        if self._shows:
            for one, row in zip(self._windows, input_ids.tolist(), strict=True):
                self._task.note_tokens(one, row[self._begin :])
        stops = all(one.cancelled for one in self._windows)
        return torch.full((input_ids.shape[0],), stops, dtype=torch.bool, device=input_ids.device)
