"""Images in prompts under the rolling batch: token for token what transformers generates, for every family."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from adapter_helpers import save_adapter, with_adapter
from image_helpers import Part, Reference, ServedImages, all_generated_like, noise
from relay_helpers import on_loop
from tiny_image_models import EOS, FAMILIES, save_image_model

from lmi_server.contract.errors import ContextLengthError
from lmi_server.contract.protocol import Adapter

_CAT, _DOG, _TALL = noise(1), noise(2), noise(3, 30, 70)
# 512 bytes of keys and values per token, in GiB.
_KV_OF_A_FEW = 400 * 512 / 2**30


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


_ALSO_IN_CHECK = ("qwen2_5_vl", "gemma3", "llava")
_WITH_STATES = "qwen3_5"  # of recurrent layers, which take memory and give prefixes of their own


def _params() -> list[object]:
    others = [name for name in FAMILIES if name not in (*_ALSO_IN_CHECK, _WITH_STATES)]
    return [*_ALSO_IN_CHECK, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(scope="module", params=_params())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    directory = save_image_model(request.param, tmp_path_factory.mktemp(request.param))
    return directory, Reference(directory)


def _of(name: str, tmp_path: Path) -> tuple[Path, Reference]:
    directory = save_image_model(name, tmp_path)
    return directory, Reference(directory)


_MIXED: list[list[Part]] = [
    ["what is ", _CAT, " here"],
    ["what is ", _DOG, " here"],
    ["no image at all"],
    ["what is ", _CAT, " beside ", _TALL, "?"],
    [_TALL],
    ["what is ", _CAT, " here"],
    ["what is in no image"],
    ["twice ", _DOG, _DOG],
]


@on_loop
async def test_answers_are_those_of_transformers(family: tuple[Path, Reference]) -> None:
    """Alone, eight at a time beside requests without images, and again, from prefixes of the first round."""
    directory, reference = family
    served = await ServedImages.start(directory, max_rolling_batch_size=8)
    alone = await served.ask(_MIXED[0])
    assert alone.prompt == reference.inputs(_MIXED[0])["input_ids"][0].tolist()
    for _ in range(2):
        answers = await asyncio.gather(*(served.ask(parts) for parts in _MIXED))
        expected = all_generated_like(reference, _MIXED, answers)
        assert [answer.tokens for answer in answers] == expected
    assert len({tuple(tokens) for tokens in expected}) >= 4
    assert alone.tokens == expected[0]
    assert all(answer.cached > 0 for answer in answers)
    # Each image was encoded once, or twice where it matters whether it is the only one of its prompt.
    assert served.stat("encoded_images_total") in (3, 6)
    await served.handler.stop()


@pytest.mark.slow
@on_loop
async def test_images_and_states_of_recurrent_layers_go_together(tmp_path: Path) -> None:
    """In chunks that divide images, from snapshots, and after a retraction."""
    directory, reference = _of(_WITH_STATES, tmp_path)
    served = await ServedImages.start(
        directory,
        max_rolling_batch_size=4,
        kv_cache_memory_gb=1e-4,
        schedule_conservativeness=0.01,
        chunked_prefill_size=7,
    )
    for _ in range(2):
        answers = await asyncio.gather(*(served.ask(parts, max_new_tokens=30) for parts in _MIXED))
        expected = all_generated_like(reference, _MIXED, answers, 30)
        assert [answer.tokens for answer in answers] == expected
    assert len({tuple(tokens) for tokens in expected}) >= 4
    assert any(answer.cached > 0 for answer in answers)
    assert served.stat("retracted_requests_total")
    await served.handler.stop()


@pytest.mark.parametrize("chunk", [5, 64])
@on_loop
async def test_every_token_of_a_prompt_has_the_models_probability(family: tuple[Path, Reference], chunk: int) -> None:
    directory, reference = family
    parts: list[Part] = ["a ", _CAT, " and ", _TALL, " b"]
    expected = reference.prompt_logprobs(parts)

    served = await ServedImages.start(directory, chunked_prefill_size=chunk)
    beside = asyncio.create_task(served.ask(["some text"], max_new_tokens=40, ignore_eos=True))
    answer = await served.ask(parts, prompt_logprobs=0)
    tokens = answer.deltas[0].prompt_tokens
    assert tokens is not None
    assert [token.logprob for token in tokens[1:]] == pytest.approx(expected, abs=2e-3)
    assert answer.tokens == reference.generated_like(parts, answer.tokens)
    await beside
    await served.handler.stop()


@pytest.mark.slow
@on_loop
async def test_retracted_requests_are_computed_again_with_their_images(family: tuple[Path, Reference]) -> None:
    directory, reference = family
    asked: list[list[Part]] = [[text, image] for text, image in zip("abcd", (_CAT, _DOG, _TALL, _CAT), strict=True)]

    served = await ServedImages.start(
        directory, kv_cache_memory_gb=_KV_OF_A_FEW, schedule_conservativeness=0.01, chunked_prefill_size=32
    )
    answers = await asyncio.gather(*(served.ask(parts, max_new_tokens=60) for parts in asked))
    assert [answer.tokens for answer in answers] == all_generated_like(reference, asked, answers, 60)
    await served.handler.stop()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava"])
@on_loop
async def test_other_images_share_no_prefix(name: str, tmp_path: Path) -> None:
    directory, reference = _of(name, tmp_path)
    before = len(reference.inputs(["same words ", _CAT])["input_ids"][0])

    served = await ServedImages.start(directory)
    await served.ask(["same words ", _CAT, " behind"])
    other = await served.ask(["same words ", _DOG, " behind"])
    same = await served.ask(["same words ", _CAT, " otherwise"])
    assert other.cached < 25
    assert same.cached > before - 20
    assert other.tokens == reference.generated_like(["same words ", _DOG, " behind"], other.tokens)
    assert same.tokens == reference.generated_like(["same words ", _CAT, " otherwise"], same.tokens)
    await served.handler.stop()


@on_loop
async def test_a_second_turn_continues_from_the_first_one(tmp_path: Path) -> None:
    directory, _ = _of("qwen2_vl", tmp_path)

    served = await ServedImages.start(directory)
    first = await served.ask(["look at ", _CAT])
    second = await served.ask(["look at ", _CAT, " and at ", _TALL])
    assert second.cached >= len(first.prompt) - len("[assistant]") - 1
    assert served.stat("encoded_images_total") == 2
    assert served.stat("cached_images_total") == 1
    await served.handler.stop()


@pytest.mark.slow
@on_loop
async def test_encoded_images_are_bounded_and_counted(tmp_path: Path) -> None:
    directory, reference = _of("llava", tmp_path)
    size = 16 * 64 * 4  # bytes of an image

    served = await ServedImages.start(directory, image_cache_gb=2.5 * size / 2**30, max_rolling_batch_size=4)
    images = [noise(seed) for seed in range(10, 16)]
    answers = await asyncio.gather(*(served.ask(["a", image]) for image in images))
    asked: list[list[Part]] = [["a", image] for image in images]
    assert [answer.tokens for answer in answers] == all_generated_like(reference, asked, answers)
    assert served.stat("encoded_images_total") == len(images)
    assert served.stat("image_cache_bytes") <= 3 * size
    # One request may have more than the limit.
    whole = await served.ask(["a", *images])
    assert whole.tokens == reference.generated_like(["a", *images], whole.tokens)
    assert served.stat("image_cache_bytes") <= 3 * size
    await served.handler.stop()


@on_loop
async def test_a_request_that_is_aborted_leaves_its_features(tmp_path: Path) -> None:
    directory, _ = _of("llava", tmp_path)

    served = await ServedImages.start(directory, image_cache_gb=1 / 2**30)
    tasks = [
        asyncio.create_task(served.ask(["a", noise(seed)], max_new_tokens=200, ignore_eos=True)) for seed in range(6)
    ]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    answer = await served.ask(["b", _CAT])
    assert answer.tokens
    assert served.stat("image_cache_bytes") == 0
    await served.handler.stop()


@on_loop
async def test_a_prompt_that_an_image_makes_too_long_is_refused(tmp_path: Path) -> None:
    directory, _ = _of("llava", tmp_path)

    served = await ServedImages.start(directory, max_model_len=64)
    with pytest.raises(ContextLengthError):
        await served.ask([_CAT, _DOG, _TALL, noise(4)])
    assert served.stat("encoded_images_total") == 0
    assert (await served.ask(["a", _CAT])).tokens
    await served.handler.stop()


@pytest.mark.slow
@on_loop
async def test_an_adapter_of_the_language_model_is_served_with_images(tmp_path: Path) -> None:
    directory, reference = _of("qwen2_5_vl", tmp_path / "model")
    layers = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    adapter = save_adapter(reference.model, tmp_path / "adapter", target_modules=layers)
    parts: list[Part] = ["what is ", _CAT, " here"]
    plain = reference.generate(parts)
    reference.model = with_adapter(reference.model, adapter)

    served = await ServedImages.start(directory, enable_lora=True)
    await served.handler.add_adapter(Adapter(name="a", directory=str(adapter)))
    answer, without = await asyncio.gather(served.ask(parts, adapter="a"), served.ask(parts))
    assert without.tokens == plain
    assert answer.tokens == reference.generate(parts) != plain
    await served.handler.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
@on_loop
async def test_drafts_change_no_token_of_a_prompt_with_images(name: str, tmp_path: Path) -> None:
    directory, reference = _of(name, tmp_path)
    parts: list[Part] = ["ab" * 8, _CAT, "ab" * 8]
    inputs = reference.inputs(parts)
    out = reference.model.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=EOS, pad_token_id=0)

    served = await ServedImages.start(directory, speculative_draft_model="[ngram]")
    answer = await served.ask(parts, max_new_tokens=40, repetition_penalty=1.0)
    assert answer.tokens == out[0, inputs["input_ids"].shape[1] :].tolist()
    await served.handler.stop()
