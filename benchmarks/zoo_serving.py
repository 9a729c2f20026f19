"""Serves one model in this process, and compares its answers with the right ones: a part of `benchmarks.zoo`.

    python -m benchmarks.zoo_serving DIRECTORY [key=value ...]

serves the model in DIRECTORY, reads the right answers from right.json there, and prints the outcome as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lmi_server.configuration.handlers import load
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import HandlerError, LmiServerError, describe
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.contract.protocol import Input
from tests.support.tiny_models import byte_tokenizer

LENGTHS = (1, 3, 20, 45, 90)  # of prompts
NEW_TOKENS = 24
TOLERANCE = 5e-3  # of log probabilities in float32
REMEDIES = ("option.", "install")

EXACT, REFUSED, WRONG, RAW = "exact", "refused", "wrong", "raw exception"
RIGHT = "right.json"
VLLM = "vllm"
STATIC = "static batches"
WAYS = {"huggingface": "scheduler", "huggingface pipeline": STATIC, "vllm": VLLM}
SETTINGS = {"kv_cache_memory_gb": "0.5", "enforce_eager": "true", "dtype": "fp32"}  # each way takes what it knows


@dataclass(frozen=True)
class Answer:
    """The new tokens of one prompt up to the end of the text, and their log probabilities."""

    tokens: list[int]
    log_probs: list[float]

    def same_as(self, other: Answer) -> bool:
        pairs = zip(self.log_probs, other.log_probs, strict=True)
        return self.tokens == other.tokens and all(abs(one - two) <= TOLERANCE for one, two in pairs)


@dataclass(frozen=True)
class Outcome:
    """How a model was served: the way, what came of it, and the message if it was refused or failed."""

    way: str
    result: str
    message: str = ""


@dataclass(frozen=True)
class Row:
    """An architecture with its outcomes."""

    model_type: str
    architecture: str
    auto: Outcome
    scheduler: Outcome
    vllm: Outcome | None = None  # if that was to be tried
    mixed: Outcome | None = None  # in float32 among others, of what the scheduler serves
    alike: Outcome | None = None  # in bfloat16, alone and in a batch

    @property
    def outcomes(self) -> list[Outcome]:
        """What was tried, in this order."""
        tried = (self.auto, self.scheduler, self.vllm)
        return [*(outcome for outcome in tried if outcome is not None), *self.busy]

    @property
    def busy(self) -> list[Outcome]:
        """What came of the model among others, and in bfloat16, if that was tried."""
        return [outcome for outcome in (self.mixed, self.alike) if outcome is not None]


def prompts() -> list[str]:
    """Return eight texts of one token per letter; the last three begin like others."""
    chance = random.Random(1)
    texts = ["".join(chance.choices(string.ascii_letters, k=length)) for length in LENGTHS]
    return [*texts, texts[-1][:60] + texts[2], texts[3][:33] + texts[1], texts[-1]]


@cache
def _tokenizer() -> Any:
    return byte_tokenizer()


def token_ids(text: str) -> list[int]:
    ids: list[int] = _tokenizer()(text)["input_ids"]
    return ids


def until_the_end(tokens: Sequence[int], log_probs: Sequence[float]) -> Answer:
    count = tokens.index(258) if 258 in tokens else len(tokens)
    return Answer(list(tokens[:count]), list(log_probs[:count]))


async def _rolling(handler: Any, model: Any) -> list[Answer]:
    """Return the answers of a handler with a rolling batch to all prompts at once."""
    await handler.start(model.model_dir, model.options)
    sampling = SamplingParameters(max_new_tokens=NEW_TOKENS, logprobs=0)

    async def one(number: int, text: str) -> Answer:
        request = GenerationRequest(request_id=str(number), prompt=text, sampling=sampling)
        tokens = [token async for delta in handler.generate(request) for token in delta.tokens]
        return until_the_end([token.id for token in tokens], [token.logprob for token in tokens])

    answers = await asyncio.gather(*(one(number, text) for number, text in enumerate(prompts())))
    await handler.stop()
    return list(answers)


def _static(handler: Any, model: Any) -> list[Answer]:
    """Return the answers of a handler that runs whole batches."""
    handler.served_names = ("zoo",)
    handler.start(model.model_dir, model.options)
    parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "do_sample": False}
    return [_read(outcome) for outcome in handler.handle([lmi_input(text, **parameters) for text in prompts()])]


def lmi_input(text: str, **parameters: Any) -> Input:
    """Return a request to /invocations."""
    data = json.dumps({"inputs": text, "parameters": parameters}).encode()
    return Input("invocations", {"content-type": "application/json"}, [("data", data)])


def _read(outcome: Any) -> Answer:
    if isinstance(outcome, LmiServerError):
        raise outcome
    tokens = json.loads(outcome.data)[0]["details"]["tokens"]
    return until_the_end([token["id"] for token in tokens], [token["log_prob"] for token in tokens])


def serve(directory: Path, right: list[Answer], **options: str) -> Outcome:
    """Serve the model in `directory` with further options, and compare its answers with the right ones."""
    asked = {f"option.{name}": value for name, value in {**SETTINGS, **options}.items()}
    way = "none"
    try:
        found = inspect_model(directory, {}, asked)
        way = WAYS[found.spec.title]
        model = found.resolved()
        os.environ.update(model.worker_environment)
        handler: Any = load(model.handler)()
        answers = _static(handler, model) if way == STATIC else asyncio.run(_rolling(handler, model))
    except HandlerError as error:  # an exception of the model's code, in the middle of a request
        return Outcome(way, RAW, error.message)
    except LmiServerError as error:
        named = any(remedy in error.message for remedy in REMEDIES)
        return Outcome(way, REFUSED if named else RAW, error.message)
    except Exception as error:  # noqa: BLE001 - the border to the code of any model, which is what is examined here
        return Outcome(way, RAW, describe(error))
    wrong = [len(text) for text, got, want in zip(prompts(), answers, right, strict=True) if not got.same_as(want)]
    return Outcome(way, WRONG if wrong else EXACT, f"prompts of {wrong} tokens" if wrong else "")


def main() -> None:
    directory, *options = sys.argv[1:]
    right = [Answer(**answer) for answer in json.loads((Path(directory) / RIGHT).read_text())]
    print(json.dumps(asdict(serve(Path(directory), right, **dict(option.split("=") for option in options)))))


if __name__ == "__main__":
    main()
