"""The executor: a thread that steps all requests, their results, and the errors of both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tensorrt_llm.sampling_params import SamplingParams

STEP_S = 0.002
_LONGEST_STOP = 32  # tokens
_BLOCKS, _TOKENS_PER_BLOCK = 1000, 64


class RequestError(RuntimeError):
    """One request failed; the executor goes on."""


class CppExecutorError(RuntimeError):
    """The executor failed, and serves nothing any more."""


def record(kind: str, **values: Any) -> None:
    """Append a line to the file that FAKE_TENSORRT_LLM_RECORD names."""
    path = os.environ.get("FAKE_TENSORRT_LLM_RECORD")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}, default=str) + "\n")


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run `function` on an event loop, which may have ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str = "") -> None:
        if lora_path and not Path(lora_path).exists():
            raise ValueError(f"lora_path ({lora_path}) does not exist.")
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = field(default_factory=list)
    prompt_logprobs: list[Any] | None = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled"] | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    disaggregated_params: Any = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return (self.logprobs or [])[self._last_logprobs_len :]


@dataclass
class Step:
    """What the executor sends for one step of a request."""

    token: int | None
    scores: Any = None
    finish: str | None = None
    error: Exception | None = None


class RequestOutput:
    """The result of a request. Iterating yields this same object after each step."""

    def __init__(
        self,
        executor: Executor,
        request_id: int,
        ids: list[int],
        prompt: str | None,
        params: SamplingParams,
        stream: bool,
    ) -> None:
        self.request_id, self.prompt_token_ids, self.prompt = request_id, ids, prompt
        self.params, self.streaming = params, stream
        self.outputs = [CompletionOutput(index) for index in range(params.n)]
        self.context_logits: Any = None
        self.cached_tokens = 0
        self._executor = executor
        self._done = self._aborted = False
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[Step] = asyncio.Queue()

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._executor.abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    async def aresult(self) -> RequestOutput:
        while not self._done:
            self._take(await self._steps.get())
        return self

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        self._take(await self._steps.get())
        return self

    def put(self, step: Step) -> None:
        """Take a step in the executor's thread."""
        _call(self._loop, lambda: self._steps.put_nowait(step))

    def _take(self, step: Step) -> None:
        if step.error is not None:
            self._done = True
            raise step.error
        self._done = step.finish is not None
        for output in self.outputs:
            self._extend(output, step)

    def _extend(self, output: CompletionOutput, step: Step) -> None:
        params, decode = self.params, self._executor.tokenizer.decode
        output._last_text_len, output._last_token_ids_len = len(output.text), len(output.token_ids)
        output._last_logprobs_len = len(output.logprobs or ())
        if step.token is not None:
            output.token_ids.append(step.token)
            if step.scores is not None and output.logprobs is not None:
                output.logprobs.append(step.scores)
        output.finish_reason = step.finish  # type: ignore[assignment]
        if params.prompt_logprobs:
            output.prompt_logprobs = [{token: Logprob(-0.5, 1)} for token in self.prompt_token_ids[1:]]
        if step.finish == "stop":
            self._cut_stop_tokens(output)
        output.text = decode(output.token_ids, skip_special_tokens=params.skip_special_tokens)
        for text, _ in params.stop_words:
            if isinstance(text, str) and text in output.text:
                end = output.text.find(text) + (len(text) if params.include_stop_str_in_output else 0)
                output.text, output.finish_reason, output.stop_reason = output.text[:end], "stop", text
                self.abort()
                self._done = True
                return

    def _cut_stop_tokens(self, output: CompletionOutput) -> None:
        for reason, ids in self.params.stop_words:
            if output.token_ids[-len(ids) :] == ids:
                output.stop_reason = reason
                if not self.params.include_stop_str_in_output:
                    output.token_ids = output.token_ids[: -len(ids)]
                return


class IterationResult:
    """The statistics that nobody has read yet. It ends if none comes in time, until a request is submitted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._done = False
        self.timeout = 2.0

    def put(self, values: dict[str, Any]) -> None:
        _call(self._loop, lambda: self._queue.put_nowait(json.dumps(values)))

    def mark_undone(self) -> None:
        self._done = False

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        try:
            return json.loads(await asyncio.wait_for(self._queue.get(), self.timeout))  # type: ignore[no-any-return]
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None


class _Request:
    """A request in the executor: its script, and how far it is."""

    def __init__(self, result: RequestOutput, lora: LoRARequest | None, tokenizer: Any) -> None:
        self.result, self.made = result, 0
        self._tail: list[int] = []
        self.prompt = tokenizer.decode(result.prompt_token_ids)
        params = result.params
        self._random = random.Random(params.seed or 0)
        prefix = "" if lora is None else f"{lora.lora_name}: "
        self._script = [*tokenizer.encode(prefix, add_special_tokens=False), *result.prompt_token_ids]
        self._ends_after: int | None = len(self._script) if "<eos>" in self.prompt else None
        if params.guided_decoding is not None:
            self._script = tokenizer.encode(_guided_text(params.guided_decoding), add_special_tokens=False)
            self._ends_after = len(self._script)

    def step(self) -> Step:
        params = self.result.params
        failure = _FAILURES.get(next((mark for mark in _FAILURES if mark in self.prompt), ""))
        if failure is not None and self.made == 1:
            return failure()
        if self._ends_after is not None and self.made >= self._ends_after and not params.ignore_eos:
            return Step(None, finish="stop")
        token = self._token(params)
        self.made += 1
        self._tail = [*self._tail, token][-_LONGEST_STOP:]
        stopped = any(self._tail[-len(ids) :] == ids for _, ids in params.stop_words)
        finish = "stop" if stopped else "length" if self.made >= params.max_tokens else None
        return Step(token, self._scores(token, params), finish)

    def _token(self, params: SamplingParams) -> int:
        allowed = [token for token in self._script if token not in params.bad_ids]
        if params.embedding_bias is not None:
            bias = params.embedding_bias.tolist()
            return max(range(len(bias)), key=lambda token: bias[token] + (token == self._script[0]))
        if params.greedy or params.use_beam_search:
            return allowed[self.made % len(allowed)]
        return self._random.choice(allowed)

    def _scores(self, token: int, params: SamplingParams) -> Any:
        if params.logprobs:
            others = [other for other in range(1, params.logprobs + 2) if other != token][: params.logprobs - 1]
            return {token: Logprob(-0.25, 1), **{other: Logprob(-2.0 - at, at + 2) for at, other in enumerate(others)}}
        return -0.25 if params._return_log_probs else None


def _guided_text(guide: Any) -> str:
    if guide.grammar:
        return str(json.loads(re.findall(r'"(?:[^"\\]|\\.)*"', guide.grammar)[0]))
    return "7" if guide.regex else '{"a": 1}'


def _dies() -> Step:
    return Step(None, error=CppExecutorError("MPI rank 0 aborted"))


_FAILURES: dict[str, Callable[[], Step]] = {
    "<cancelled>": lambda: Step(None, finish="cancelled"),
    "<timeout>": lambda: Step(None, finish="timeout"),
    "<request error>": lambda: Step(None, error=RequestError("no free sequence slot")),
    "<executor dies>": _dies,
}


class Executor:
    """Steps every request, one token each, until it is shut down."""

    def __init__(self, tokenizer: Any, max_batch_size: int, reports_statistics: bool) -> None:
        self.tokenizer = tokenizer
        self._max_batch_size, self._reports = max_batch_size, reports_statistics
        self._requests: dict[int, _Request] = {}
        self._lock = threading.Condition()
        self._stopped = False
        self._numbers = iter(range(1, 2**31))
        self.statistics: IterationResult | None = None
        threading.Thread(target=self._run, name="fake-executor", daemon=True).start()

    def is_shutdown(self) -> bool:
        return self._stopped

    def submit(
        self, ids: list[int], prompt: str | None, params: SamplingParams, lora: LoRARequest | None, stream: bool
    ) -> RequestOutput:
        if self.statistics is None:
            self.statistics = IterationResult()
        self.statistics.mark_undone()
        result = RequestOutput(self, next(self._numbers), ids, prompt, params, stream)
        with self._lock:
            self._requests[result.request_id] = _Request(result, lora, self.tokenizer)
            self._lock.notify()
        return result

    def abort_request(self, request_id: int) -> None:
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request is not None:
            record("abort", request=request_id, tokens=request.made)

    def shutdown(self) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._requests or self._stopped)
                if self._stopped:
                    return
                running = list(self._requests.items())[: self._max_batch_size]
            for number, request in running:
                self._step(number, request)
            self._report(len(running))
            time.sleep(STEP_S)

    def _step(self, number: int, request: _Request) -> None:
        step = request.step()
        if step.finish is not None or step.error is not None:
            with self._lock:
                self._requests.pop(number, None)
        if isinstance(step.error, CppExecutorError):
            self.shutdown()
        request.result.put(step)

    def _report(self, active: int) -> None:
        if self.statistics is None or not self._reports:
            return
        cache = {
            "maxNumBlocks": _BLOCKS,
            "usedNumBlocks": active,
            "freeNumBlocks": _BLOCKS - active,
            "tokensPerBlock": _TOKENS_PER_BLOCK,
            "reusedBlocks": 3,
            "cacheHitRate": 0.25,
        }
        queued = len(self._requests) - active
        self.statistics.put({"numActiveRequests": active, "numQueuedRequests": max(0, queued), "kvCacheStats": cache})
