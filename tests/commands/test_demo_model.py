"""The demo model, built for real and run by transformers alone.

tests/packaging/test_installed.py builds it in an environment that has nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmi_server.commands import demo_model
from lmi_server.commands.demo_model import build_demo_model, missing_files
from lmi_server.configuration.resolve import resolve_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model that all tests share, or a new one if the code that builds it has changed since."""
    if newest(demo_model_dir) > Path(demo_model.__file__).stat().st_mtime:
        return demo_model_dir
    directory = tmp_path_factory.mktemp("demo") / "smollm2"
    assert build_demo_model(directory)
    return directory


def newest(directory: Path) -> float:
    return max(path.stat().st_mtime for path in directory.iterdir())


@pytest.fixture(scope="module")
def tokenizer(built: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built)


@pytest.fixture(scope="module")
def model(built: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(built)


def test_the_directory_is_complete_and_can_be_read(built: Path) -> None:
    assert missing_files(built) == ()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (built, *built.iterdir()))


def test_a_second_build_does_nothing(built: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in built.iterdir()}
    assert not build_demo_model(built)
    assert {path.name: path.stat().st_mtime_ns for path in built.iterdir()} == before


def test_its_serving_properties_resolve_without_a_warning(built: Path) -> None:
    model = resolve_model(built, {})
    assert model.options.rolling_batch == "scheduler"
    assert model.options.dtype == "bf16"
    assert model.warnings == ()


def test_the_weights_are_bf16(model: Any) -> None:
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}
    assert model.generation_config.eos_token_id == 2


def test_it_samples_as_its_model_card_does(model: Any) -> None:
    configured = model.generation_config
    assert (configured.do_sample, configured.temperature, configured.top_p) == (True, 0.2, 0.9)


def test_the_tokenizer_has_what_a_chat_needs(tokenizer: Any) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_digits_are_split_as_in_training(tokenizer: Any) -> None:
    assert tokenizer.tokenize("a  12 3") == ["a", "ĠĠ", "1", "2", "Ġ", "3"]
    text = "Zahlen 3.14, Ümläute, 日本語 and 😀\n\ttabs  and   blanks"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_capital_of_france_is_paris(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
