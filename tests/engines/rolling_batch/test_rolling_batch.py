"""The rolling batch gives every request, in any company, the tokens that `model.generate` gives it alone."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest
import torch
from rolling_batch_helpers import EOS, Engine, Received, prompts
from tiny_models import CONTEXT, FAMILIES, convolutional_hybrid, tiny_model

from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import Token

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Engine:
    return Engine(tiny_model(request.param))


@pytest.fixture(scope="module")
def llama() -> Engine:
    return Engine(tiny_model("llama"))


def test_every_request_gets_what_generate_gives_it_alone(family: Engine) -> None:
    """More requests than slots, of mixed lengths, arriving while others run, some of them cancelled."""
    chance = random.Random(3)
    pending = [(prompt, chance.choice([1, 2, 9, 25])) for prompt in prompts(20)]
    running: list[tuple[list[int], int, int, Received]] = []
    cancelled: set[int] = set()

    def arrive_and_cancel() -> None:
        for _ in range(chance.choice([0, 0, 1, 3])):
            if pending:
                prompt, length = pending.pop()
                running.append((prompt, length, *family.add(prompt, max_new_tokens=length)))
        if running and chance.random() < 0.1:
            number = chance.choice(running)[2]
            cancelled.add(number)
            family.engine.abort(number)

    while pending:
        arrive_and_cancel()
        family.run(arrive_and_cancel)
    for prompt, length, number, answer in running:
        expected = family.expected(prompt, length)
        if number in cancelled:
            assert answer.tokens == expected[: len(answer.tokens)]
        else:
            assert answer.tokens == expected
    assert any(number in cancelled for _, _, number, _ in running)
    assert not family.scheduler.slots._running


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_that_of_transformers(llama: Engine, penalty: float) -> None:
    for prompt in prompts(4):
        answer = llama.generate(prompt, max_new_tokens=20, repetition_penalty=penalty)
        assert answer.tokens == llama.expected(prompt, 20, repetition_penalty=penalty)


def test_a_long_prompt_is_computed_in_chunks_beside_the_decoding_of_others(llama: Engine) -> None:
    _, short = llama.add([1, 2, 3], max_new_tokens=30)
    llama.engine.step()
    long_prompt = prompts(1, seed=5)[0] * 10
    _, long = llama.add(long_prompt[:160], max_new_tokens=2)
    steps_before_first_token = 0
    while not long.deltas:
        before = len(short.deltas)
        llama.engine.step()
        steps_before_first_token += 1
        assert len(short.deltas) == before + 1, "a running stream gets a token in every step"
    llama.run()
    assert steps_before_first_token >= len(long_prompt[:160]) // 16
    assert long.tokens == llama.expected(long_prompt[:160], 2)
    assert short.tokens == llama.expected([1, 2, 3], 30)


def test_finish_reasons_and_usage(llama: Engine) -> None:
    answer = llama.generate([5, 6, 7], max_new_tokens=4)
    assert answer.finish_reason == "length"
    assert answer.deltas[-1].usage is not None
    assert (answer.deltas[-1].usage.prompt_tokens, answer.deltas[-1].usage.completion_tokens) == (3, 4)
    assert all(delta.usage is None for delta in answer.deltas[:-1])
    third = answer.tokens[2]
    stopped = llama.generate([5, 6, 7], max_new_tokens=9, stop_token_ids=(third,))
    assert stopped.finish_reason == "stop_sequence"
    assert stopped.tokens == answer.tokens[: answer.tokens.index(third) + 1]


def test_the_end_of_sequence_token_ends_unless_it_is_ignored(llama: Engine) -> None:
    forced = {"max_new_tokens": 5, "logit_bias": {EOS: 1000.0}}
    assert llama.generate([1], **forced).finish_reason == "eos_token"
    ignored = llama.generate([1], **forced, ignore_eos=True)
    assert ignored.finish_reason == "length"
    assert ignored.tokens == [EOS] * 5


def test_a_stop_sequence_ends_the_text_before_it_and_is_never_partly_emitted(llama: Engine) -> None:
    word = llama.tokenizer.encode("stop")
    bias = {"max_new_tokens": 12, "ignore_eos": True}
    full = llama.generate(word, **bias)
    assert len(full.text) > 4
    stop = full.text[2:4]
    answer = llama.generate(word, **bias, stop=(stop, "never there"))
    assert answer.finish_reason == "stop_sequence"
    assert answer.text == full.text[: full.text.index(stop)]
    included = llama.generate(word, **bias, stop=(stop,), include_stop_str_in_output=True)
    assert included.text == full.text[: full.text.index(stop) + len(stop)]


def test_bad_words_are_never_written(llama: Engine) -> None:
    """Single tokens as transformers bans them; of longer words no output has the whole."""
    letters = tuple(llama.tokenizer.encode(string.ascii_lowercase))
    for prompt in prompts(4):
        only_letters = {"max_new_tokens": 20, "ignore_eos": True, "allowed_token_ids": letters}
        plain = llama.generate(prompt, **only_letters)
        single = llama.generate(prompt, max_new_tokens=20, bad_words=(plain.text[0],))
        assert single.tokens == llama.expected(prompt, 20, bad_words_ids=[[plain.tokens[0]]])
        assert plain.text[:2] not in llama.generate(prompt, **only_letters, bad_words=(plain.text[:2],)).text


def test_a_sequence_does_not_end_before_its_least_tokens(llama: Engine) -> None:
    answer = llama.generate([1], max_new_tokens=9, logit_bias={EOS: 1000.0}, min_tokens=4)
    assert answer.tokens[4] == EOS
    assert EOS not in answer.tokens[:4]
    assert answer.finish_reason == "eos_token"


def test_only_allowed_tokens_are_drawn(llama: Engine) -> None:
    sampled = {"do_sample": True, "temperature": 9.0, "top_p": 0.9, "seed": 2}
    answer = llama.generate([1, 2], max_new_tokens=30, allowed_token_ids=(5, 6, 7), **sampled)
    assert set(answer.tokens) == {5, 6, 7}
    with pytest.raises(RequestError, match="allowed_token_ids: a list of 0"):
        llama.add([1], max_new_tokens=3, allowed_token_ids=())
    with pytest.raises(RequestError, match="token id 999"):
        llama.add([1], max_new_tokens=3, allowed_token_ids=(999,))


def test_a_seed_gives_the_same_text_in_any_batch(llama: Engine) -> None:
    """Alone, in a batch of twelve, after a retraction, and in another replica."""
    sampled = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "ignore_eos": True}
    ways: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"typical_p": 0.9}]

    def tokens(engine: Engine) -> list[list[int]]:
        answers = [engine.add([1, 2], **sampled, **ways[seed % 4], seed=seed)[1] for seed in range(12)]
        engine.run()
        return [answer.tokens for answer in answers]

    together = tokens(llama)
    alone = [llama.generate([1, 2], **sampled, **ways[seed % 4], seed=seed).tokens for seed in range(12)]
    short_of_memory = Engine(tiny_model("llama"), kv_tokens=40, conservativeness=0.01)
    assert together == alone
    assert tokens(short_of_memory) == alone
    assert short_of_memory.engine.stats.retracted_requests > 0
    assert len({tuple(answer) for answer in alone}) == 12


def test_a_seed_gives_the_same_text_in_bfloat16_too() -> None:
    engine = Engine(tiny_model("llama", torch.bfloat16))
    sampled = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "ignore_eos": True}
    answers = [engine.add(prompt, **sampled, seed=7)[1] for prompt in prompts(12)]
    engine.run()
    alone = [engine.generate(prompt, **sampled, seed=7).tokens for prompt in prompts(12)]
    assert sum(answer.tokens == expected for answer, expected in zip(answers, alone, strict=True)) >= 11


def test_log_probabilities_are_the_models(llama: Engine) -> None:
    prompt = [9, 8, 7, 6, 5]
    answer = llama.generate(prompt, max_new_tokens=3, logprobs=2, prompt_logprobs=0)
    with torch.inference_mode():
        logits = llama.reference(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
    scored: list[Token] = [token for delta in answer.deltas for token in delta.tokens]
    for row, token in enumerate(scored, start=len(prompt) - 1):
        assert token.logprob == pytest.approx(float(logits[row, token.id]), abs=1e-4)
        assert [top.id for top in token.top] == logits[row].topk(2).indices.tolist()
        assert token.top[0].logprob == pytest.approx(float(logits[row].max()), abs=1e-4)
    prefill = answer.deltas[0].prompt_tokens
    assert prefill is not None
    assert [token.id for token in prefill] == prompt
    assert prefill[0].logprob is None
    for row, token in enumerate(prefill[1:]):
        assert token.logprob == pytest.approx(float(logits[row, token.id]), abs=1e-4)
    assert all(delta.prompt_tokens is None for delta in answer.deltas[1:])


def test_prompt_log_probabilities_span_chunks(llama: Engine) -> None:
    prompt = (prompts(3, seed=9)[2] * 40)[:50]
    answer = llama.generate(prompt, max_new_tokens=1, prompt_logprobs=0)
    prefill = answer.deltas[0].prompt_tokens
    assert prefill is not None
    assert [token.id for token in prefill] == prompt


def test_what_cannot_fit_is_refused_by_its_numbers(llama: Engine) -> None:
    too_many = (
        f"length is {CONTEXT} tokens. However, you requested 257 tokens .250 in the prompt.*for 6 new tokens at most"
    )
    with pytest.raises(ContextLengthError, match=too_many):
        llama.add([1] * 250, max_new_tokens=7)
    with pytest.raises(RequestError, match="no tokens"):
        llama.add([], max_new_tokens=7)
    with pytest.raises(RequestError, match="token id 999"):
        llama.add([999], max_new_tokens=7)
    everything = llama.generate([1] * 250, max_new_tokens=None, ignore_eos=True)
    assert len(everything.tokens) == 6
    assert everything.finish_reason == "length"


def test_requests_wait_while_the_kv_cache_is_full_and_all_are_answered() -> None:
    engine = Engine(tiny_model("llama"), slots=8, kv_tokens=100)
    answers = [(prompt, engine.add(prompt, max_new_tokens=8)[1]) for prompt in prompts(12, seed=4)]
    max_resident = 0

    def watch() -> None:
        nonlocal max_resident
        max_resident = max(max_resident, engine.scheduler.slots._contents.resident_tokens)

    engine.run(watch)
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, 8)
    assert max_resident <= 100


def test_a_failing_step_ends_what_runs_and_the_next_request_is_served() -> None:
    engine = Engine(tiny_model("llama"), slots=2)
    answers = [engine.add([1, 2, 3], max_new_tokens=5)[1] for _ in range(3)]
    engine.engine.step()
    engine.engine.fail_running(RuntimeError("out of luck"))
    assert [answer.error is not None for answer in answers] == [True, True, False]
    assert "out of luck" in str(answers[0].error)
    engine.run()
    assert answers[2].tokens == engine.expected([1, 2, 3], 5)
    assert not engine.scheduler.slots._running


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", 2), ("qwen2", 2), ("granite", 0), ("smollm3", 1), ("ministral3", 0), ("helium", 0), ("gpt2", 0)],
)
def test_only_layers_that_compute_what_llamas_do_are_fused(family: str, layers: int) -> None:
    assert Engine(tiny_model(family)).fused["decoder_layers"] == layers


def test_a_state_that_no_cache_gets_is_found_by_the_check() -> None:
    model = convolutional_hybrid()
    (convolution,) = (layer.conv for layer in model.model.layers if hasattr(layer, "conv"))
    forward = convolution.forward
    convolution.forward = lambda hidden_states, past_key_values=None, **more: forward(hidden_states)
    with pytest.raises(UnsupportedAttentionError, match="differ from its own"):
        Engine(model)


def test_a_request_whose_tokens_cannot_be_decoded_ends_alone() -> None:
    class BrokenDetokenizer:
        def feed(self, token: int) -> str:
            raise LookupError("no such piece")

    engine = Engine(tiny_model("llama"))
    number, broken = engine.add([1, 2], max_new_tokens=4)
    _, sound = engine.add([1, 2, 3], max_new_tokens=4)
    engine.engine._live.get(number).detokenizer = BrokenDetokenizer()
    engine.run()
    assert "no such piece" in str(broken.error)
    assert sound.tokens == engine.expected([1, 2, 3], 4)
    assert not engine.scheduler.slots._running


def test_extreme_parameters_end_no_other_request(llama: Engine) -> None:
    extremes = [
        {"do_sample": True, "top_p": 1e-50},
        {"do_sample": True, "temperature": 1e-38, "top_p": 0.9},
        {"do_sample": True, "temperature": 1e30, "min_p": 1.0},
        {"do_sample": True, "top_k": 10**9},
        {"do_sample": True, "typical_p": 1e-30},
        {"repetition_penalty": 1e300},
        {"logprobs": 10**6},
        {"logit_bias": dict.fromkeys(range(259), -1e30)},
    ]
    answers = [llama.add([1, 2], max_new_tokens=3, ignore_eos=True, **extreme)[1] for extreme in extremes]
    _, sound = llama.add([1, 2, 3], max_new_tokens=3)
    llama.run()
    assert [answer.finish_reason for answer in answers] == ["length"] * len(extremes)
    assert sound.tokens == llama.expected([1, 2, 3], 3)


def test_more_stop_sequences_than_can_be_searched_are_refused(llama: Engine) -> None:
    with pytest.raises(RequestError, match="stop takes up to"):
        llama.add([1], stop=("x",) * 1000)
    with pytest.raises(RequestError, match="stop takes up to"):
        llama.add([1], stop=("x" * 5000,))


def test_bfloat16_stays_near_float32() -> None:
    """Rounding may flip a near tie, so the first token's log probability is compared, not the text."""
    exact = Engine(tiny_model("llama")).generate([3, 4, 5], max_new_tokens=1, logprobs=0)
    rounded = Engine(tiny_model("llama", torch.bfloat16)).generate([3, 4, 5], max_new_tokens=1, logprobs=0)
    assert rounded.deltas[0].tokens[0].logprob == pytest.approx(exact.deltas[0].tokens[0].logprob, abs=0.2)
