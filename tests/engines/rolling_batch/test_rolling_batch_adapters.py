"""Requests with different LoRA adapters, and without, share a batch; each gets what peft generates for it alone."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import ALL_LINEAR, read_adapter, save_adapter, with_adapter
from packed_models import packed_llama
from rolling_batch_helpers import EOS, Engine, Received, generated_like, prompts
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.lora.layers import LoraWeights
from lmi_server.contract.errors import RequestError

pytestmark = pytest.mark.slow

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 8},
    "mlp": {"target_modules": ["up_proj", "down_proj"], "use_rslora": True},
    "head": {"target_modules": [*ALL_LINEAR, "lm_head"], "r": 2},
    "patterns": {"rank_pattern": {"q_proj": 2, "down_proj": 6}, "alpha_pattern": {"layers.1.self_attn.k_proj": 32}},
    "one_layer": {"layers_to_transform": [1], "lora_alpha": 1},
}
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense"],
    "opt": ["q_proj", "v_proj", "fc1"],
    "glm4": ["q_proj", "gate_up_proj"],
}


class Adapted:
    """An engine with adapters by name, and peft's models to compare with; "" is the model without an adapter."""

    def __init__(self, model: Any, directory: Path, configs: dict[str, dict[str, Any]], reference: Any = None) -> None:
        """`reference`: a model that computes the same and that peft takes, if it does not take the model itself."""
        self.batch = Engine(model)
        if reference is not None:
            self.batch.reference = reference
        self.directories = {
            name: save_adapter(self.batch.reference, directory / name, seed, **config)
            for seed, (name, config) in enumerate(configs.items())
        }
        self._references = {
            name: with_adapter(self.batch.reference, directory) for name, directory in self.directories.items()
        }
        self.weights: dict[str, LoraWeights | None] = {
            name: self.batch.engine.load_adapter(read_adapter(str(directory)))
            for name, directory in self.directories.items()
        }

    def add(self, name: str, prompt: list[int], length: int) -> tuple[str, Received]:
        return self.batch.add(prompt, adapter=self.weights[name] if name else None, max_new_tokens=length, logprobs=0)

    def reference(self, name: str) -> Any:
        return self._references[name] if name else self.batch.reference

    def compare(self, name: str, prompt: list[int], length: int, answer: Received) -> None:
        """Compare an answer with what peft generates: its tokens, and their log probabilities."""
        reference = self.reference(name)
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, length), name
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        expected = [float(logits[row, token]) for row, token in enumerate(answer.tokens, len(prompt) - 1)]
        logprobs = [token.logprob for delta in answer.deltas for token in delta.tokens]
        assert logprobs == pytest.approx(expected, abs=1e-3), name

    def run_staggered(self, names: list[str], count: int = 24) -> None:
        """Requests arrive while others run; each is compared with peft's own generation."""
        chance = random.Random(3)
        pending = [(names[index % len(names)], prompt) for index, prompt in enumerate(prompts(count))]
        running: list[tuple[str, list[int], int, Received]] = []

        def arrive() -> None:
            for _ in range(chance.choice([0, 1, 3])):
                if pending:
                    name, prompt = pending.pop()
                    length = chance.choice([1, 5, 14])
                    running.append((name, prompt, length, self.add(name, prompt, length)[1]))

        while pending:
            arrive()
            self.batch.run(arrive)
        for name, prompt, length, answer in running:
            self.compare(name, prompt, length, answer)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tiny_model("llama"), tmp_path_factory.mktemp("adapters"), CONFIGS)


def test_several_adapters_and_none_share_a_batch(llama: Adapted) -> None:
    llama.run_staggered(["", *CONFIGS], count=36)


@pytest.mark.parametrize("family", ["llama_with_biases", "qwen3", "gemma2_with_soft_caps", *TARGETS])
def test_every_kind_of_linear_layer_takes_adapters(family: str, tmp_path: Path) -> None:
    targets = TARGETS.get(family, ALL_LINEAR)
    more = {"target_modules": targets, "fan_in_fan_out": family == "gpt2"}
    configs = {name: {"r": rank, **more} for name, rank in (("one", 3), ("two", 8))}
    Adapted(tiny_model(family), tmp_path, configs).run_staggered(["one", "", "two"], count=9)


@pytest.mark.parametrize("act_order", [False, True])
def test_layers_of_packed_weights_take_adapters(tmp_path: Path, act_order: bool) -> None:
    reference = packed_llama(tmp_path / "model", act_order=act_order)
    model = load_model(AutoModelForCausalLM, str(tmp_path / "model"), HuggingFaceOptions(dtype="fp32"))
    Adapted(model, tmp_path, {"one": {"r": 3}, "two": {"r": 8}}, reference).run_staggered(["one", "", "two"], count=9)


def test_three_adapters_with_one_of_the_head_run_together(llama: Adapted) -> None:
    """peft saves the head's own weights beside its adapter; they are the model's, and change nothing."""
    saved = load_file(llama.directories["head"] / "adapter_model.safetensors")
    assert "base_model.model.lm_head.base_layer.weight" in saved
    names = ["all", "head", "mlp"]
    answers = [llama.add(name, [4, 5, 6], 12)[1] for name in names]
    llama.batch.run()
    for name, answer in zip(names, answers, strict=True):
        llama.compare(name, [4, 5, 6], 12, answer)


def test_adapters_differ_from_the_model_and_from_each_other(llama: Adapted) -> None:
    answers = [llama.add(name, [1, 2, 3], 1)[1] for name in ("", *CONFIGS)]
    llama.batch.run()
    logprobs = [answer.deltas[0].tokens[0].logprob for answer in answers]
    assert len({round(logprob, 3) for logprob in logprobs if logprob is not None}) == len(answers)


def test_a_removed_adapter_serves_those_that_run_with_it(llama: Adapted) -> None:
    _, running = llama.add("all", [5, 6], 12)
    llama.batch.engine.step()
    llama.batch.engine.step()
    weights = llama.weights["all"]
    assert weights is not None
    llama.batch.engine.forget_adapter(weights)
    _, other = llama.add("mlp", [5, 6], 12)
    llama.batch.run()
    llama.compare("all", [5, 6], 12, running)
    llama.compare("mlp", [5, 6], 12, other)


@pytest.mark.parametrize("removed", ["before its request comes", "while it runs"])
def test_nothing_of_a_removed_adapter_stays_in_memory(llama: Adapted, removed: str) -> None:
    """A request may have found its adapter just before that was removed."""
    engine = llama.batch.engine
    weights = engine.load_adapter(read_adapter(str(llama.directories["mlp"])))
    if removed == "before its request comes":
        engine.forget_adapter(weights)
    llama.batch.add(list(range(50)), adapter=weights, max_new_tokens=8)
    engine.step()
    if removed == "while it runs":
        engine.forget_adapter(weights)
    llama.batch.run()
    llama.batch.generate([1, 2, 3], max_new_tokens=1)
    held = weakref.ref(weights)
    del weights
    gc.collect()
    assert held() is None


def test_prompt_log_probabilities_are_those_of_the_adapted_model(llama: Adapted) -> None:
    prompt = [7, 200, 31, 5, 90] * 6
    _, answer = llama.batch.add(prompt, adapter=llama.weights["head"], max_new_tokens=1, logprobs=0, prompt_logprobs=0)
    llama.batch.run()
    with torch.inference_mode():
        logits = llama.reference("head")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    prefill = answer.deltas[0].prompt_tokens
    assert prefill is not None
    for row, token in enumerate(prefill[1:]):
        assert token.logprob == pytest.approx(float(logits[row, token.id]), abs=1e-4)


def test_no_module_has_a_hook_before_the_first_request_with_an_adapter() -> None:
    batch = Engine(tiny_model("llama"))
    batch.generate([1, 2], max_new_tokens=2)
    assert not any(module._forward_hooks for module in batch.model.modules())


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    exact = Adapted(tiny_model("llama"), tmp_path, {"all": {}})
    rounded = Engine(tiny_model("llama", torch.bfloat16))
    adapter = rounded.engine.load_adapter(read_adapter(str(exact.directories["all"])))
    parameters = {"max_new_tokens": 1, "logprobs": 0}
    _, expected = exact.batch.add([3, 4, 5], adapter=exact.weights["all"], **parameters)
    _, answer = rounded.add([3, 4, 5], adapter=adapter, **parameters)
    exact.batch.run()
    rounded.run()
    assert answer.deltas[0].tokens[0].logprob == pytest.approx(expected.deltas[0].tokens[0].logprob, abs=0.3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["q_proj.weight"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"peft_type": "IA3"}, "IA3 is not supported"),
    ],
)
def test_what_of_peft_is_not_supported_is_refused_by_name(
    llama: Adapted, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    directory = save_adapter(llama.batch.reference, tmp_path)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(RequestError, match=message):
        read_adapter(str(directory))


def test_an_adapter_of_embeddings_is_refused(llama: Adapted, tmp_path: Path) -> None:
    directory = save_adapter(llama.batch.reference, tmp_path, target_modules=["embed_tokens"])
    with pytest.raises(RequestError, match=r"lora_embedding.*not supported"):
        read_adapter(str(directory))


def test_an_adapter_of_another_model_is_refused_with_layer_and_widths(llama: Adapted, tmp_path: Path) -> None:
    directory = save_adapter(llama.batch.reference, tmp_path)
    file = directory / "adapter_model.safetensors"
    weights = load_file(str(file))
    for name, message in (
        ("q_proj", r"q_proj.*64 inputs and 7 outputs.*has 64 and 64"),
        ("x_proj", r"x_proj.*no linear"),
    ):
        other = {key.replace("q_proj", name): value for key, value in weights.items()}
        other = {key: value[:7] if "q_proj.lora_B" in key else value for key, value in other.items()}
        save_file(other, str(file))
        with pytest.raises(RequestError, match=message):
            llama.batch.engine.load_adapter(read_adapter(str(directory)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "no adapter_config.json"),
        ("adapter_config.json", b"{", "cannot be read"),
        ("adapter_model.safetensors", None, "holds none of"),
        ("adapter_model.safetensors", b"\0" * 64, "cannot be read"),
    ],
)
def test_broken_files_are_refused(
    llama: Adapted, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    directory = save_adapter(llama.batch.reference, tmp_path)
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    with pytest.raises(RequestError, match=message):
        read_adapter(str(directory))


def test_the_end_of_sequence_ends_an_adapted_request_too(llama: Adapted) -> None:
    _, answer = llama.batch.add([1], adapter=llama.weights["all"], max_new_tokens=5, logit_bias={EOS: 1000.0})
    llama.batch.run()
    assert answer.finish_reason == "eos_token"


def change_weights(directory: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Replace the weights of an adapter whose name holds `part`."""
    file = directory / "adapter_model.safetensors"
    save_file({name: change(value) if part in name else value for name, value in load_file(file).items()}, file)
    return directory


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [(torch.float32, 1e30), (torch.bfloat16, 1e30), (torch.float16, 3e4)],
    ids=["float32", "bfloat16", "float16"],
)
def test_an_adapter_that_overflows_fails_its_own_requests_alone(
    dtype: torch.dtype, weight: float, tmp_path: Path
) -> None:
    batch = Engine(tiny_model("llama", dtype), slots=5)
    sound = save_adapter(tiny_model("llama"), tmp_path / "sound", 1)
    overflowing = change_weights(
        save_adapter(tiny_model("llama"), tmp_path / "huge", 2), "", lambda _: _.sign() * weight
    )
    good, other, huge = (
        batch.engine.load_adapter(read_adapter(str(directory)))
        for directory in (sound, save_adapter(tiny_model("llama"), tmp_path / "other", 2), overflowing)
    )

    def answers(third: LoraWeights) -> list[Received]:
        adapters = [None, good, third, None, third, good, third]
        received = [
            batch.add([index, 7, 9], adapter=adapter, max_new_tokens=6, do_sample=index > 3, seed=index)[1]
            for index, adapter in enumerate(adapters)
        ]
        batch.run()
        return received

    expected = answers(other)
    for _ in range(2):  # the second time in slots that hold what overflowed
        for index, (answer, wanted) in enumerate(zip(answers(huge), expected, strict=True)):
            if index in (2, 4, 6):
                assert "the adapter computed no finite numbers" in str(answer.error)
                assert not answer.tokens
            else:
                assert answer.tokens == wanted.tokens


def test_the_model_itself_may_overflow_and_the_next_request_is_served() -> None:
    batch = Engine(tiny_model("llama"))
    with torch.no_grad():
        batch.model.get_input_embeddings().weight[77] = torch.nan
    failed, served = batch.add([77, 1], max_new_tokens=4)[1], batch.add([1, 2], max_new_tokens=4)[1]
    batch.run()
    assert "the model computed no finite numbers for this request in float32" in str(failed.error)
    assert served.tokens == batch.expected([1, 2], 4)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e38], ids=str)
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapter_that_is_not_finite_is_refused_by_the_name_of_its_tensor(
    llama: Adapted, tmp_path: Path, number: float, half: str
) -> None:
    def spoil(weights: torch.Tensor) -> torch.Tensor:
        weights[1, 2] = number * 2  # of 1e38, scaling by lora_alpha / r makes an infinity of lora_B
        return weights

    name = f"layers.1.self_attn.v_proj.{half}.weight"
    directory = change_weights(save_adapter(llama.batch.reference, tmp_path), name, spoil)
    adapter = read_adapter(str(directory))
    if number == 1e38 and half == "lora_A":
        llama.batch.engine.check_adapter(adapter)
        return
    with pytest.raises(RequestError, match=f"base_model.model.model.{name} holds"):
        llama.batch.engine.check_adapter(adapter)
    with pytest.raises(RequestError, match=f"base_model.model.model.{name} holds"):
        llama.batch.engine.load_adapter(adapter)
