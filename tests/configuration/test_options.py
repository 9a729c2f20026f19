"""The declared options: names, defaults, accepted values, and what a declaration says about itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from handlers.huggingface.options import HuggingFaceOptions
from handlers.vllm.lmi_dist_options import LmiDistOptions
from handlers.vllm.options import VllmOptions
from lmi_server.configuration.declaration import Options
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.server_settings import ServerSettings

CLASSES = [ServingOptions, ModelOptions, HuggingFaceOptions, ServerSettings]


def one(options_type: type[Options], field: str, raw: str) -> Any:
    return getattr(options_type.model_validate({field: raw}), field)


@pytest.mark.parametrize("options_type", CLASSES)
def test_every_option_is_described_in_one_line(options_type: type[Options]) -> None:
    for option in options_type.declared_options():
        assert option.description.endswith("."), option.key
        assert "\n" not in option.description
        assert option.allowed, option.key


@pytest.mark.parametrize("options_type", CLASSES)
def test_no_two_options_share_a_spelling(options_type: type[Options]) -> None:
    spellings = [
        key for option in (*ServingOptions.declared_options(), *ModelOptions.declared_options()) for key in option.keys
    ]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("options_type", CLASSES)
def test_defaults_are_values_that_may_be_given(options_type: type[Options]) -> None:
    defaults = {name: value for name, value in options_type() if value is not None}
    assert options_type.model_validate(defaults) == options_type()


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("engine", "Python"),
        ("job_queue_size", 1000),
        ("minWorkers", 1),
        ("maxWorkers", 1),
        ("batch_size", 1),
        ("max_batch_delay", 100),
        ("max_idle_time", 60),
        ("load_on_devices", "*"),
        ("option.dtype", "auto"),
        ("option.rolling_batch", "auto"),
        ("option.max_rolling_batch_size", 32),
        ("option.trust_remote_code", False),
        ("option.model_loading_timeout", 1800),
        ("option.predict_timeout", 120),
        ("option.output_formatter", None),
        ("option.tgi_compat", False),
        ("option.parallel_loading", False),
        ("option.mpi_mode", False),
        ("option.tensor_parallel_degree", -1),
        ("option.decoding_strategy", "greedy"),
        ("option.max_sparsity", 0.33),
        ("option.max_splits", 3),
        ("option.disable_flash_attn", True),
        ("option.max_model_len", None),
        ("option.chunked_prefill_size", None),
        ("option.schedule_policy", "lpm"),
        ("option.schedule_conservativeness", 1.0),
        ("option.max_running_requests", None),
        ("option.enable_torch_compile", False),
    ],
)
def test_the_documented_defaults(key: str, default: Any) -> None:
    declared = {
        option.key: option.default
        for option in (*ServingOptions.declared_options(), *HuggingFaceOptions.declared_options())
    }
    assert declared[key] == default


@pytest.mark.parametrize(
    ("raw", "short"),
    [
        ("float32", "fp32"),
        ("FP32", "fp32"),
        ("bfloat16", "bf16"),
        ("Float16", "fp16"),
        ("AUTO", "auto"),
        ("int8", "int8"),
    ],
)
def test_dtypes_become_short_names(raw: str, short: str) -> None:
    assert one(ModelOptions, "dtype", raw) == short


@pytest.mark.parametrize(
    ("field", "raw", "value"),
    [
        ("trust_remote_code", "True", True),
        ("trust_remote_code", "no", False),
        ("max_rolling_batch_size", "64", 64),
        ("tensor_parallel_degree", "Max", "max"),
        ("tensor_parallel_degree", "-1", -1),
        ("tensor_parallel_degree", "2", 2),
        ("served_model_name", "a, b ,", ("a", "b")),
        ("rolling_batch", "Scheduler", "scheduler"),
        ("decoding_strategy", "sampling", "sample"),
        ("kv_cache_memory_gb", "1.5", 1.5),
        ("revision", "main", "main"),
    ],
)
def test_values_arrive_as_text(field: str, raw: str, value: Any) -> None:
    assert one(HuggingFaceOptions, field, raw) == value


@pytest.mark.parametrize(
    ("field", "raw"),
    [
        ("dtype", "fp64"),
        ("trust_remote_code", "maybe"),
        ("max_rolling_batch_size", "0"),
        ("max_rolling_batch_size", "1.5"),
        ("device_map", "nearby"),
        ("env", "A"),
        ("env", "A=1,,B=2"),
        ("tensor_parallel_degree", "0"),
        ("tensor_parallel_degree", "most"),
        ("rolling_batch", "continuous"),
        ("mem_fraction_static", "1.0"),
        ("chunked_prefill_size", "0"),
        ("chunked_prefill_size", "-2"),
        ("schedule_policy", "random"),
        ("schedule_conservativeness", "0"),
        ("max_running_requests", "0"),
        ("kv_cache_memory_gb", "nan"),
        ("kv_cache_memory_gb", "inf"),
        ("max_sparsity", "0"),
    ],
)
def test_bad_values_are_refused(field: str, raw: str) -> None:
    with pytest.raises(ValidationError):
        one(HuggingFaceOptions, field, raw)


@given(st.sampled_from([option.field for option in HuggingFaceOptions.declared_options()]), st.text())
def test_any_text_is_a_value_or_a_validation_error(field: str, raw: str) -> None:
    blamed = field
    try:
        one(HuggingFaceOptions, field, raw)
    except ValidationError as error:
        blamed = str(error.errors()[0]["loc"][0])
    assert blamed == field


def test_options_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ModelOptions().dtype = "fp16"  # type: ignore[misc]


def test_undeclared_values_are_passed_through() -> None:
    options = ModelOptions(dtype="fp16", served_model_name=("a", "b")).passing_through({"threads": "2"})
    assert options.dump() == {"dtype": "fp16", "served_model_name": ["a", "b"]}
    assert ModelOptions.restore(options.dump(), options.passed_through) == options
    assert options.passed_through == {"threads": "2"}
    assert options.undeclared_values({"dtype"}) == {}
    assert ModelOptions().passed_through == {}


def test_validators_take_their_own_results_unchanged() -> None:
    for spec in HANDLERS:
        options_type = load_options_type(spec)
        values = {name: value for name, value in options_type() if value is not None}
        options = options_type.model_validate({**values, "served_model_name": "a, b", "tensor_parallel_degree": "MAX"})
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(options.dump()))
        assert options_type.restore(sent, {}) == options, spec.title


def test_arguments_of_vllm_beside_the_declared_ones_reach_the_engine() -> None:
    class OfAnEngine(VllmOptions):
        def passed_to_engine(self) -> Mapping[str, str]:
            return self.undeclared_values({"seed", "max_num_seqs"})

    values = {"model_id": "m", "speculative_config": '{"method": "ngram"}'}
    given = OfAnEngine.restore(values, {"seed": "7", "favourite": "blue"}).engine_arguments()
    assert (given["seed"], given["max_num_seqs"], given["speculative_config"]) == ("7", 32, {"method": "ngram"})
    assert "favourite" not in given


def test_options_of_lmi_dist_become_arguments_of_vllm() -> None:
    raw = {
        "mpi_mode": "true",
        "quantize": "bitsandbytes8",
        "limit_mm_per_prompt": "image=2, video=1",
        "speculative_draft_model": "small",
        "speculative_length": "3",
        "max_rolling_batch_prefill_tokens": "512",
        "tensor_parallel_degree": "2",
        "kv_cache_memory_gb": "1",
    }
    given = LmiDistOptions.model_validate(raw).engine_arguments()
    expected = {
        "distributed_executor_backend": "external_launcher",
        "quantization": "bitsandbytes",
        "limit_mm_per_prompt": {"image": 2, "video": 1},
        "speculative_config": {"model": "small", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
        "max_num_batched_tokens": 512,
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": 2**29,
    }
    assert {name: given[name] for name in expected} == expected


def test_every_handler_is_found_by_each_of_its_names() -> None:
    for spec in HANDLERS:
        assert issubclass(load_options_type(spec), ModelOptions)
        assert all(HANDLERS.by_entry_point(name) is spec for name in spec.entry_points)
        assert all(HANDLERS.by_title(variant.title) in HANDLERS.specs for variant in spec.variants)
    assert HANDLERS.by_entry_point("vllm2") is None


def test_options_are_read_without_importing_an_engine() -> None:
    program = (
        "import sys; from lmi_server.configuration.handlers import *; [load_options_type(spec) for spec in HANDLERS]; "
        "sys.exit(str({'torch', 'transformers', 'vllm'} & set(sys.modules) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
