"""Tasks for which transformers 5 has no pipeline: generated texts, static batches, answers found in a context."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pipeline_helpers import LoadTask, approximately, ask, content_of, request, started
from tiny_models import random_model, saved_model, tiny_model
from tiny_tasks import CONTEXT, seq2seq_tokenizer

from lmi_server.contract.errors import ContextLengthError, LmiServerError, ModelLoadError, RequestError
from lmi_server.contract.handler import RequestHandler

pytestmark = pytest.mark.slow


def generated(directory: Path, text: str, **arguments: Any) -> list[int]:
    """Return the new tokens that the model itself generates for one text, with the end token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory)
    ids = tokenizer(text, return_tensors="pt")
    out = model.generate(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], **arguments)[0].tolist()
    return out[1:] if config.is_encoder_decoder else out[ids["input_ids"].shape[1] :]


def decoded(ids: list[int]) -> str:
    kept = list(itertools.takewhile(lambda token: token != 258, ids))
    return str(seq2seq_tokenizer().decode(kept, skip_special_tokens=True))


# --- text generation in static batches ---

PROMPTS = ["hello", "a", "the quick brown fox"]


def test_prompts_are_continued_as_by_the_model_alone(load_task: LoadTask) -> None:
    handler, directory = load_task("text-generation")
    expected = [prompt + decoded(generated(directory, prompt, max_new_tokens=8)) for prompt in PROMPTS]
    parameters = {"max_new_tokens": 8}
    assert ask(handler, {"inputs": PROMPTS, "parameters": parameters}) == [
        {"generated_text": text} for text in expected
    ]
    outcomes = handler.handle([request({"inputs": prompt, "parameters": parameters}) for prompt in PROMPTS])
    assert [content_of(outcome) for outcome in outcomes] == [[{"generated_text": text}] for text in expected]


def test_a_checkpoint_of_zeros_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data.zero_()
    saved_model(model, tmp_path)
    with pytest.raises(ModelLoadError, match="has only zeros; save or download the checkpoint again"):
        started(tmp_path, rolling_batch="disable")


def test_weights_that_make_nan_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    saved_model(model, tmp_path)
    with pytest.raises(ModelLoadError, match="computes NaN for random tokens: its weights are damaged, or too large"):
        started(tmp_path, rolling_batch="disable")


def test_a_model_whose_answers_padding_changes_is_not_padded(tmp_path: Path) -> None:
    """The decoder of BART counts positions from the first row of a batch, whatever its mask hides."""
    config = transformers.BartConfig(
        vocab_size=259, max_position_embeddings=CONTEXT, d_model=64, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=96, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96, bos_token_id=257,
        eos_token_id=258, pad_token_id=0, forced_eos_token_id=None, is_decoder=True, is_encoder_decoder=False,
        init_std=0.2,
    )  # fmt: skip
    transformers.BartForCausalLM(config).save_pretrained(tmp_path)
    seq2seq_tokenizer().save_pretrained(tmp_path)
    handler = started(tmp_path, rolling_batch="disable")
    prompts = [*PROMPTS, "olleh"]
    expected = [prompt + decoded(generated(tmp_path, prompt, max_new_tokens=8)) for prompt in prompts]
    body = {"inputs": prompts, "parameters": {"max_new_tokens": 8}}
    assert ask(handler, body) == [{"generated_text": text} for text in expected]
    with pytest.raises(RequestError, match="takes texts of the same number of tokens"):
        ask(handler, body, accept="text/event-stream")


def test_paths_of_text_generation_inference_take_static_batches(load_task: LoadTask) -> None:
    handler, directory = load_task("text-generation")
    text = decoded(generated(directory, "hello", max_new_tokens=8))
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 8}}
    assert ask(handler, body, "generate") == {"generated_text": text}
    assert ask(handler, body, "tgi") == [{"generated_text": text}]
    (whole,) = ask(handler, {**body, "parameters": {**body["parameters"], "details": True, "seed": 5}}, "tgi")
    assert whole["details"]["seed"] == 5
    assert whole["details"]["tokens"][0].keys() == {"id", "text", "logprob", "special"}
    with pytest.raises(RequestError, match=r"/v1/messages is not for; .*option\.rolling_batch=auto"):
        ask(handler, body, "messages")


def events(handler: Any, body: Any, route: str, **headers: str) -> list[Any]:
    (outcome,) = handler.handle([request(body, route, **headers)])
    assert not isinstance(outcome, LmiServerError), outcome
    assert outcome.headers == [("content-type", "text/event-stream")]
    assert outcome.stream is not None
    return [json.loads(event.removeprefix(b"data: ")) for event in outcome.stream]


def test_streams_of_text_generation_inference_take_static_batches(load_task: LoadTask) -> None:
    handler, directory = load_task("text-generation")
    text = decoded(generated(directory, "hello", max_new_tokens=8))
    parameters = {"max_new_tokens": 8, "details": True, "watermark": False, "decoder_input_details": False}
    body = {"inputs": "hello", "parameters": parameters}
    sent = events(handler, body, "generate_stream")
    assert "".join(event["token"]["text"] for event in sent) == text
    assert [event["generated_text"] for event in sent] == [None] * (len(sent) - 1) + [text]
    assert [event["index"] for event in sent] == list(range(1, len(sent) + 1))
    assert (sent[-1]["details"]["finish_reason"], sent[-1]["details"]["generated_tokens"]) == ("length", 8)
    plain = {"inputs": "hello", "parameters": {"max_new_tokens": 8, "return_full_text": False}, "stream": True}
    from_hub = events(handler, plain, "invocations", user_agent="unknown/None; hf_hub/1.33.0; python/3.11.9")
    assert from_hub == [{**event, "details": None} for event in sent]
    with pytest.raises(RequestError, match="inputs: a list of 2 is not allowed; send one input"):
        ask(handler, {**body, "inputs": ["a", "b"]}, "generate_stream")


def test_without_a_number_thirty_tokens_are_written(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    body = {"inputs": "hello", "parameters": {"return_full_text": False}}
    longer = ask(handler, {"inputs": "hello", "parameters": {"return_full_text": False, "max_new_tokens": 30}})
    assert ask(handler, body) == longer


def test_a_seed_gives_the_same_text_in_any_company(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    sampled = {"max_new_tokens": 8, "do_sample": True, "temperature": 2.0, "seed": 5}
    alone = ask(handler, {"inputs": "hello", "parameters": sampled})
    bodies = [{"inputs": text, "parameters": sampled} for text in ("a", "hello", "b")]
    assert content_of(handler.handle([request(body) for body in bodies])[1]) == alone
    assert ask(handler, {"inputs": "hello", "parameters": {**sampled, "seed": 6}}) != alone


def test_a_stop_sequence_ends_a_text(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    own = {"max_new_tokens": 60, "return_full_text": False, "do_sample": True, "temperature": 9.0, "seed": 5}
    whole = ask(handler, {"inputs": "hello", "parameters": own})[0]["generated_text"]
    stop = next(char for char in whole[2:] if char.isascii() and char.isprintable() and char not in whole[:2])
    cut = ask(handler, {"inputs": "hello", "parameters": {**own, "stop_sequences": [stop]}})[0]["generated_text"]
    assert cut == whole[: whole.index(stop)]
    kept = {**own, "stop": stop, "include_stop_str_in_output": True}
    assert ask(handler, {"inputs": "hello", "parameters": kept})[0]["generated_text"] == cut + stop


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            {"inputs": "a" * 256, "parameters": {"max_new_tokens": 1}},
            ContextLengthError,
            "prompt has 256 tokens, which leaves no room",
        ),
        ({"inputs": ""}, RequestError, "an empty text is not allowed"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, RequestError, "max_new_tokens: 0 is not allowed"),
        ({"inputs": "a", "parameters": {"custom_generate": "x/y"}}, RequestError, "custom_generate is not known"),
        ({"inputs": "a", "parameters": {"trust_remote_code": True}}, RequestError, "trust_remote_code is not known"),
        ({"inputs": {"text": "a"}}, RequestError, "an object is not allowed; send a string"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    load_task: LoadTask, body: Any, error: type[LmiServerError], message: str
) -> None:
    handler, _ = load_task("text-generation")
    with pytest.raises(error, match=message):
        ask(handler, body)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bad_words_ids": [[97], [104, 101]], "max_new_tokens": 8},
        {"suppress_tokens": [101, 102], "max_new_tokens": 8},
        {"begin_suppress_tokens": [101, 102], "max_new_tokens": 8},
        {"sequence_bias": [[[101], 9.0]], "max_new_tokens": 8},
        {"eos_token_id": [10, 11], "max_new_tokens": 30},
        {"forced_eos_token_id": 258, "max_new_tokens": 8},
        {"no_repeat_ngram_size": 2, "max_new_tokens": 8},
        {"exponential_decay_length_penalty": [2, 1.5], "max_new_tokens": 12},
        {"encoder_repetition_penalty": 1.5, "max_new_tokens": 8},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.5, "max_new_tokens": 8},
    ],
    ids=lambda arguments: str(next(iter(arguments))),
)
def test_arguments_of_generate_have_their_effect(load_task: LoadTask, arguments: dict[str, Any]) -> None:
    handler, directory = load_task("text-generation")
    ids = generated(directory, "hello", **arguments)
    ends = arguments.get("eos_token_id", [258])
    kept = list(itertools.takewhile(lambda token: token not in ends, ids))
    body = {"inputs": "hello", "parameters": {**arguments, "return_full_text": False}}
    assert ask(handler, body) == [{"generated_text": seq2seq_tokenizer().decode(kept, skip_special_tokens=True)}]


def test_every_sequence_that_was_asked_for_is_returned(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    beams = {"num_beams": 3, "max_new_tokens": 4, "num_return_sequences": 2}
    both = ask(handler, {"inputs": ["hello", "a"], "parameters": beams})
    assert [answer["generated_text"][:1] for answer in both] == ["h", "h", "a", "a"]
    best = ask(handler, {"inputs": ["hello", "a"], "parameters": {**beams, "num_return_sequences": 1}})
    assert [both[0], both[2]] == best
    with pytest.raises(RequestError, match="num_return_sequences"):
        ask(handler, {"inputs": "a", "parameters": {"num_return_sequences": 2}})


def test_details_have_the_tokens_and_why_they_end(load_task: LoadTask) -> None:
    handler, directory = load_task("text-generation")
    parameters = {"max_new_tokens": 6, "details": True, "return_full_text": False}
    answers = ask(handler, {"inputs": ["hello", "a"], "parameters": parameters})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for prompt, answer in zip(("hello", "a"), answers, strict=True):
        details = answer["details"]
        assert (details["inputs"], details["finish_reason"]) == (prompt, "length")
        tokens = [token["id"] for token in details["tokens"]]
        assert tokens == generated(directory, prompt, max_new_tokens=6)
        assert details["generated_tokens"] == 6
        before = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([before + tokens])).logits[0].log_softmax(-1)
        expected = [float(logits[row, token]) for row, token in enumerate(tokens, start=len(before) - 1)]
        assert [token["log_prob"] for token in details["tokens"]] == pytest.approx(expected, abs=1e-4)
    stopped = {**parameters, "eos_token_id": answers[0]["details"]["tokens"][2]["id"]}
    (ended,) = ask(handler, {"inputs": "hello", "parameters": stopped})
    assert ended["details"]["finish_reason"] == "eos_token"
    assert ended["details"]["generated_tokens"] <= 3
    with_beams = ask(handler, {"inputs": "hello", "parameters": {**parameters, "num_beams": 2}})[0]["details"]
    assert all(token["log_prob"] < 0 for token in with_beams["tokens"])


def test_the_length_is_lowered_to_what_the_context_holds(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    parameters = {"max_new_tokens": 100, "details": True, "ignore_eos": True, "return_full_text": False}
    outcomes = handler.handle([request({"inputs": text, "parameters": parameters}) for text in ("a" * 250, "hello")])
    long, short = (content_of(outcome)[0]["details"] for outcome in outcomes)
    assert (long["generated_tokens"], short["generated_tokens"]) == (6, 100)
    assert long["note"] == "max_new_tokens was lowered to 6: the prompt has 250 tokens, and the context holds 256"
    assert "note" not in short
    assert ask(handler, {"inputs": "a" * 250})  # 30 tokens are too many here, too


def test_a_token_that_the_model_has_not_is_refused(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    for name, value in {"forced_eos_token_id": 999, "bad_words_ids": [[5, 999]], "sequence_bias": [[[999], 1]]}.items():
        with pytest.raises(RequestError, match=f"parameters.{name}: token id 999 is not in the vocabulary"):
            ask(handler, {"inputs": "a", "parameters": {name: value}})


# --- streams of static batches ---


def lines(handler: RequestHandler, body: Any) -> list[list[str]]:
    (outcome,) = handler.handle([request(body)])
    assert not isinstance(outcome, LmiServerError)
    assert dict(outcome.headers) == {"content-type": "application/jsonlines"}
    assert outcome.stream is not None
    return [json.loads(line)["outputs"] for line in outcome.stream]


@pytest.mark.parametrize(("task", "mode"), [("text-generation", "true"), ("text2text-generation", "huggingface")])
def test_a_stream_adds_up_to_the_whole_answer(load_task: LoadTask, task: str, mode: str) -> None:
    handler, _ = load_task(task, enable_streaming=mode)
    parameters = {"max_new_tokens": 8} | ({"return_full_text": False} if task == "text-generation" else {})
    body = {"inputs": PROMPTS, "parameters": parameters}
    steps = lines(handler, body)
    assert len(steps) > 2
    whole = ask(handler, {**body, "stream": False})
    assert [{"generated_text": "".join(pieces)} for pieces in zip(*steps, strict=True)] == whole


def test_a_client_that_reads_events_gets_a_stream(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation")
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 8, "return_full_text": False}}
    (outcome,) = handler.handle([request(body, accept="text/event-stream")])
    assert not isinstance(outcome, LmiServerError)
    assert outcome.stream is not None
    assert dict(outcome.headers) == {"content-type": "text/event-stream"}
    events = b"".join(outcome.stream).decode().split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["outputs"][0] for event in events if event]
    assert [{"generated_text": "".join(pieces)}] == ask(handler, body)
    assert ask(handler, {**body, "stream": "no"}, accept="text/event-stream") == ask(handler, body)


def test_what_a_stream_has_no_room_for_is_refused(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation", enable_streaming="true")
    for name, value in {"details": True, "num_return_sequences": 2}.items():
        with pytest.raises(RequestError, match=f"parameters.{name}: a stream of a static batch has "):
            ask(handler, {"inputs": "a", "parameters": {name: value, "do_sample": True}})


def test_a_stream_whose_reader_goes_ends_at_the_next_step(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation", enable_streaming="true")
    (outcome,) = handler.handle([request({"inputs": "hello", "parameters": {"max_new_tokens": 200}})])
    assert not isinstance(outcome, LmiServerError)
    stream: Any = outcome.stream
    assert next(stream)
    stream.close()
    assert ask(handler, {"inputs": "a", "stream": False, "parameters": {"max_new_tokens": 1}})  # its turn comes


def test_a_stream_of_beams_is_refused(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation", enable_streaming="true")
    with pytest.raises(RequestError, match="num_beams: beam search has no tokens to stream"):
        ask(handler, {"inputs": "a", "parameters": {"num_beams": 2}})


# --- texts for texts ---


@pytest.mark.parametrize(
    ("task", "prefix", "key", "limits"),
    [
        ("text2text-generation", "", "generated_text", {"max_new_tokens": 256}),
        ("summarization", "summarize: ", "summary_text", {"max_length": 10, "num_beams": 2}),
        ("translation_en_to_de", "translate: ", "translation_text", {"max_length": 12}),
    ],
)
def test_a_text_becomes_another(
    load_task: LoadTask, task: str, prefix: str, key: str, limits: Mapping[str, Any]
) -> None:
    handler, directory = load_task(task)
    expected = [{key: decoded(generated(directory, prefix + text, **limits))} for text in PROMPTS]
    assert ask(handler, {"inputs": PROMPTS}) == expected
    assert ask(handler, {"inputs": PROMPTS[0]}) == expected[:1]
    short = {
        key: decoded(generated(directory, prefix + PROMPTS[0], **{**limits, "max_length": 4, "max_new_tokens": 3}))
    }
    assert ask(handler, {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 3}}) == [short]


def test_languages_are_for_models_of_many(load_task: LoadTask) -> None:
    handler, _ = load_task("translation_en_to_de")
    with pytest.raises(RequestError, match="are for models of many languages"):
        ask(handler, {"inputs": "a", "parameters": {"src_lang": "en", "tgt_lang": "de"}})


# --- questions ---

CONTEXT_TEXT = "the fox is red. the dog is blue."
QUESTION = "who is red"


def best_span(directory: Path, question: str, context: str, longest: int) -> tuple[float, int, int]:
    """Return score and characters of the best answer by trying every span of a context that fits in one pass."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(directory)
    encoded = tokenizer(question, context, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        out = model(**encoded)
    own = [index for index, part in enumerate(encoded.sequence_ids()) if part == 1]
    kept = [0, *own]  # the softmax includes the token of "no answer"
    start, end = (logits[0, kept].softmax(0).tolist() for logits in (out.start_logits, out.end_logits))
    scored = [
        (start[1 + first] * end[1 + last], offsets[own[first]][0], offsets[own[last]][1])
        for first in range(len(own))
        for last in range(first, min(first + longest, len(own)))
    ]
    return max(scored)


@pytest.mark.parametrize("longest", [1, 3, 15])
def test_the_best_span_is_the_answer(load_task: LoadTask, longest: int) -> None:
    handler, directory = load_task("question-answering")
    score, start, end = best_span(directory, QUESTION, CONTEXT_TEXT, longest)
    parameters = {"max_answer_len": longest, "align_to_words": False}
    body = {"inputs": {"question": QUESTION, "context": CONTEXT_TEXT}, "parameters": parameters}
    expected = {"score": score, "start": start, "end": end, "answer": CONTEXT_TEXT[start:end]}
    assert approximately(ask(handler, body), expected)


def test_several_answers_and_none(load_task: LoadTask) -> None:
    handler, _ = load_task("question-answering")
    inputs = {"question": QUESTION, "context": CONTEXT_TEXT}
    answers = ask(handler, {"inputs": inputs, "parameters": {"top_k": 3}})
    assert [answer["score"] for answer in answers] == sorted((a["score"] for a in answers), reverse=True)
    assert len({(answer["start"], answer["end"]) for answer in answers}) == 3
    with_none = {"top_k": 20, "handle_impossible_answer": True}
    found = ask(handler, {"inputs": inputs, "parameters": with_none})
    assert [answer for answer in found if answer["answer"] == ""]


def test_an_answer_is_made_of_whole_words(load_task: LoadTask) -> None:
    handler, _ = load_task("question-answering")
    context = "abcdefgh ijklmnop"
    found = ask(handler, {"question": "who", "context": context})
    assert found["answer"] in ("abcdefgh", "ijklmnop", context)


def test_a_long_context_is_read_in_windows(load_task: LoadTask) -> None:
    handler, _ = load_task("question-answering")
    context = " ".join(["the fox jumps over the dog."] * 20) + " the blue dog is red."
    found = ask(handler, {"question": QUESTION, "context": context})
    assert context[found["start"] : found["end"]] == found["answer"]
    assert found["end"] > 0
    short = {"question": QUESTION, "context": CONTEXT_TEXT}
    together = ask(handler, {"inputs": [{"question": QUESTION, "context": context}, short]})
    assert approximately(together, [found, ask(handler, short)])
    assert CONTEXT == 64  # the context above is several times that


def test_questions_come_as_csv(load_task: LoadTask) -> None:
    handler, _ = load_task("question-answering")
    csv = f"question,context\n{QUESTION},{CONTEXT_TEXT}\n".encode()
    answer = ask(handler, {"question": QUESTION, "context": CONTEXT_TEXT})
    assert approximately(ask(handler, csv, content_type="text/csv"), [answer])


def test_a_question_without_context_is_refused(load_task: LoadTask) -> None:
    handler, _ = load_task("question-answering")
    with pytest.raises(RequestError, match=r"inputs\.context is missing"):
        ask(handler, {"inputs": {"question": QUESTION}})
    with pytest.raises(RequestError, match="a list of such objects"):
        ask(handler, {"inputs": "who?"})


# --- rotary embeddings that change with the longest position of a batch ---

LENGTHS = (50, 4, 33, 20, 32, 31, 40, 36)  # of prompts; 32 is the length up to which the embeddings stay the same
_ROTARY = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 0,
}  # fmt: skip
CHANGING = {
    "longrope": lambda: transformers.Phi3Config(
        **_ROTARY,
        max_position_embeddings=96,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [9.0] * 8,
        },
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **_ROTARY,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 10_000.0, "rope_theta": 10_000.0},
    ),
}


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("tokens", [3, 12])
def test_rotary_embeddings_that_change_with_the_length_let_no_answer_depend_on_its_neighbours(
    tmp_path: Path, kind: str, tokens: int
) -> None:
    """Some answers cross the length at which the embeddings change, some begin beyond it."""
    model = random_model(CHANGING[kind]())
    for name, weights in model.named_parameters():
        weights.data *= 20 if "q" in name.split(".")[-2] else 1  # so that attention depends on positions
    model.save_pretrained(tmp_path)
    seq2seq_tokenizer().save_pretrained(tmp_path)
    text = "Sphinx of black quartz, judge my vow; pack my box with five dozen liquor jugs!"
    prompts = [text[place : place + length] for place, length in enumerate(LENGTHS)]
    expected = [generated(tmp_path, prompt, max_new_tokens=tokens, do_sample=False) for prompt in prompts]
    handler = started(tmp_path, rolling_batch="disable", max_model_len="96")
    body = {"inputs": prompts, "parameters": {"max_new_tokens": tokens, "details": True}}
    for _ in range(2):  # the second time after longer sequences than its first
        answers = ask(handler, body)
        assert [[token["id"] for token in answer["details"]["tokens"]] for answer in answers] == expected
