"""From a model directory and the environment to a resolved model: layers, sources, warnings, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.checkpoints.options import BLOCK_FORMATS
from handlers.huggingface.options import HuggingFaceOptions
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import ModelOptions
from lmi_server.configuration.resolve import ResolvedModel, inspect_model, model_name, resolve_model
from lmi_server.configuration.server_settings import resolve_server
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.inventory import Gpu, Machine

LLAMA = {"architectures": ["LlamaForCausalLM"]}

Write = Callable[..., Path]
# Not pytest.importorskip: importing vLLM takes eight seconds.
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a model directory."""

    def write_directory(properties: str | None = None, config: object = LLAMA) -> Path:
        directory = tmp_path / "my-model.v1"
        directory.mkdir()
        if properties is not None:
            (directory / "serving.properties").write_text(properties, encoding="utf-8")
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return directory

    return write_directory


def hugging_face(model: ResolvedModel) -> HuggingFaceOptions:
    assert isinstance(model.options, HuggingFaceOptions)
    return model.options


def restored(model: ResolvedModel) -> ModelOptions:
    """Return the options of `model` as a worker has them: its values have gone over the link."""
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(model.options.dump()))
    return load_options_type(model.spec).restore(values, model.options.passed_through)


def refusal(directory: Path, environment: Mapping[str, str] = {}) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        resolve_model(directory, environment)
    return raised.value.message.split("\n")


def test_undeclared_options_reach_the_worker(write: Write) -> None:
    model = resolve_model(write("option.favourite=Colour: blue\nnot_an_option=1"), {"OPTION_OTHER": "2"})
    assert model.options.passed_through == {"favourite": "Colour: blue", "other": "2", "not_an_option": "1"}
    assert restored(model) == model.options


def test_blanks_around_a_value_are_no_part_of_it(write: Write) -> None:
    directory = write("option.revision=main \nmaxWorkers=\\u00202")
    found = inspect_model(directory, {"OPTION_DTYPE": " fp16 "}, {"option.served_model_name": " a "})
    assert (found.options.revision, found.serving.max_workers) == ("main", 2)
    assert (found.options.dtype, found.options.served_model_name) == ("fp16", ("a",))


def test_a_directory_with_a_config_json_is_enough(write: Write) -> None:
    directory = write()
    model = resolve_model(directory, {})
    assert model.name == "my_model_v1"
    assert model.model_dir == str(directory)
    assert model.handler == "handlers.huggingface.handler:HuggingFaceHandler"
    assert model.options == HuggingFaceOptions(model_id=str(directory), rolling_batch="scheduler")
    assert model.warnings == ()


def test_layers_lie_on_top_of_each_other(write: Write) -> None:
    directory = write("option.dtype=fp16\noption.max_rolling_batch_size=8\nminWorkers=3\n")
    environment = {
        "OPTION_DTYPE": "fp32",
        "OPTION_THREADS": "2",
        "OPTION_TENSOR_PARALLEL_DEGREE": "1",
        "TENSOR_PARALLEL_DEGREE": "4",
        "PREDICT_TIMEOUT": "7",
        "SERVING_JOB_QUEUE_SIZE": "5",
        "SAGEMAKER_NUM_MODEL_WORKERS": "2",
    }
    model = resolve_model(directory, environment, {"option.max_rolling_batch_size": "16", "minWorkers": "9"})
    options = hugging_face(model)
    layers = {key: model.sources[key].layer for key in model.sources}
    assert (options.max_rolling_batch_size, layers["option.max_rolling_batch_size"]) == (16, "registration")
    assert (options.dtype, layers["option.dtype"]) == ("fp16", "serving.properties")
    assert (options.threads, layers["option.threads"]) == (2, "environment")
    assert (options.rolling_batch, layers["option.rolling_batch"]) == ("scheduler", "recommender")
    assert (options.tensor_parallel_degree, layers["option.tensor_parallel_degree"]) == (1, "environment")
    assert (options.predict_timeout, layers["option.predict_timeout"]) == (7, "environment default")
    assert (model.serving.job_queue_size, layers["job_queue_size"]) == (5, "environment default")
    assert (model.serving.min_workers, layers["minWorkers"]) == (2, "sagemaker")
    assert (options.revision, layers["option.revision"]) == (None, "default")


def test_a_source_is_a_file_and_line_or_a_variable(write: Write) -> None:
    directory = write("# comment\n\noption.dtype = fp16 \n")
    sources = resolve_model(directory, {"OPTION_REVISION": "main"}).sources
    assert sources["option.dtype"].raw == "fp16"
    assert sources["option.dtype"].place == f"{directory / 'serving.properties'}:3"
    assert sources["option.revision"].place == "variable OPTION_REVISION"


def test_names_of_option_variables(write: Write) -> None:
    environment = {
        "OPTION_ENTRYPOINT": "djl_python.echo",
        "OPTION_ENGINE": "Python",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "3",
        "OPTION_modelName": "x",
        "OPTION_REVISION": "",
        "ARGS_job_queue_size": "4",
    }
    model = resolve_model(write(config=None), environment)
    assert model.handler == "handlers.echo.handler:EchoHandler"
    assert not isinstance(model.options, HuggingFaceOptions)
    assert model.options.max_rolling_batch_size == 3
    assert model.options.revision is None
    assert model.serving.job_queue_size == 4
    assert model.sources["engine"].variable == "OPTION_ENGINE"
    assert model.options.model_file_name == "x"


@pytest.mark.parametrize("entry_point", ["djl_python.huggingface", "huggingface"])
def test_entry_points_of_the_huggingface_handler(write: Write, entry_point: str) -> None:
    model = resolve_model(write(f"option.entryPoint={entry_point}"), {})
    assert model.handler == "handlers.huggingface.handler:HuggingFaceHandler"
    assert model.options.entry_point == entry_point


@pytest.mark.parametrize("properties", ["", "option.rolling_batch=auto", "option.rolling_batch=scheduler"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_causal_lm_gets_the_scheduler(write: Write, properties: str, architecture: str) -> None:
    model = resolve_model(write(properties, {"architectures": [architecture]}), {})
    assert model.options.rolling_batch == "scheduler"


def test_hf_model_id_brings_revision_and_task(write: Write) -> None:
    environment = {"HF_MODEL_ID": "org/model", "HF_REVISION": "abc", "HF_TASK": "text-generation"}
    options = resolve_model(write(config=None), environment).options
    assert (options.model_id, options.revision, options.task) == ("org/model", "abc", "text-generation")


def test_hf_variables_do_not_change_a_model_of_its_own(write: Write) -> None:
    directory = write()
    model = resolve_model(directory, {"HF_MODEL_ID": "org/model", "HF_REVISION": "abc"})
    assert (model.options.model_id, model.options.revision) == (str(directory), None)
    assert "HF_MODEL_ID is ignored" in model.warnings[0]
    (directory / "config.json").unlink()
    (directory / "serving.properties").write_text("option.model_id=org/other")
    assert resolve_model(directory, {"HF_REVISION": "abc"}).options.revision is None


@pytest.mark.parametrize("model_id", ["weights", "./weights", "{directory}/weights"])
def test_a_local_model_id_is_relative_to_the_model_directory(write: Write, model_id: str) -> None:
    directory = write(config=None)
    (directory / "weights").mkdir()
    (directory / "weights" / "config.json").write_text(json.dumps(LLAMA))
    (directory / "serving.properties").write_text(f"option.model_id={model_id.format(directory=directory)}")
    assert resolve_model(directory, {}).options.model_id == str(directory / "weights")


def test_min_workers_alone_sets_the_maximum_too(write: Write) -> None:
    directory = write("minWorkers=3")
    assert resolve_model(directory, {}).serving.max_workers == 3
    assert resolve_model(directory, {"SERVING_MAX_WORKERS": "4"}).serving.max_workers == 4


def test_served_names(write: Write) -> None:
    model = resolve_model(write("option.served_model_name=gpt, my_model_v1"), {})
    assert model.served_names == ("my_model_v1", "gpt")


@pytest.mark.parametrize(
    ("properties", "warning"),
    [
        ("option.dtpye=fp16", "unknown key option.dtpye, it is ignored; did you mean option.dtype?"),
        ("option.entry_point=huggingface", "did you mean option.entryPoint?"),
        ("dtype=fp16", "unknown key dtype, it is ignored; did you mean option.dtype?"),
        ("minworkers=2", "did you mean minWorkers?"),
        ("option.max_rolling_batch=8", "did you mean option.max_rolling_batch_size?"),
        ("option.zzz=1", "unknown key option.zzz, it is ignored"),
        ("option.data_type=fp16\noption.dtype=fp32", "option.data_type is ignored, because option.dtype is given too"),
        ("option.dtype=", "option.dtype has no value and is ignored"),
        ("option.dtype=fp16\noption.dtype=fp32", ":2: option.dtype was given in line 1 already; this one is used"),
        ("option.enable_streaming=true", "option.enable_streaming is deprecated"),
        ("option.max_sparsity=0.5", "option.max_sparsity has no effect here"),
    ],
)
def test_doubtful_keys_are_warnings(write: Write, properties: str, warning: str) -> None:
    directory = write(properties)
    (found,) = resolve_model(directory, {}).warnings
    assert found.startswith(f"{directory / 'serving.properties'}:")
    assert warning in found


def test_a_warning_on_a_variable_names_it(write: Write) -> None:
    (found,) = resolve_model(write(), {"OPTION_DTPYE": "fp16"}).warnings
    assert found.startswith("variable OPTION_DTPYE: unknown key option.dtpye")


def test_every_bad_value_is_reported_in_a_line_of_its_own(write: Write) -> None:
    directory = write("option.dtype=fp64\n# ok\njob_queue_size=none\noption.revision=a b\n")
    file = directory / "serving.properties"
    assert sorted(refusal(directory, {"OPTION_THREADS": "many"})) == sorted(
        [
            f'{file}:1: option.dtype = "fp64" is not allowed; '
            "allowed: auto, fp32 (float32), fp16 (float16), bf16 (bfloat16), int8; did you mean fp16?",
            f'{file}:3: job_queue_size = "none" is not allowed; allowed: an integer from 1 to 2147483647',
            f'{file}:4: option.revision = "a b" is not allowed; allowed: the name of a branch or tag, or a commit',
            'variable OPTION_THREADS: option.threads = "many" is not allowed; allowed: an integer of 1 or more',
        ]
    )


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ("option.tensor_parallel_degree=2\noption.entryPoint=djl_python.deepspeed", "use engine=MPI, or 1"),
        (
            "option.enable_streaming=true\nengine=DeepSpeed\noption.tensor_parallel_degree=2",
            "several ranks answer a static batch whole; use option.rolling_batch=deepspeed, or one rank",
        ),
        ("option.checkpoint=a.json\nengine=DeepSpeed\noption.dtype=fp32", "use option.rolling_batch=deepspeed"),
        ("option.save_mp_checkpoint_path=/x\nengine=DeepSpeed", "use option.rolling_batch=deepspeed"),
        ("option.dtype=int8\nengine=DeepSpeed", "use option.quantize=dynamic_int8"),
    ],
)
def test_what_deepspeed_cannot_serve_is_refused_with_the_remedy(write: Write, properties: str, problem: str) -> None:
    directory = write(properties)
    key, _, value = properties.partition("\n")[0].partition("=")
    place = directory / "serving.properties"
    assert refusal(directory) == [f'{place}:1: {key} = "{value}" is not available in this version; {problem}']


@pytest.mark.parametrize(
    "properties",
    [
        "option.dtype=int8\noption.entryPoint=echo",
    ],
)
def test_what_cannot_be_served_yet_is_refused(write: Write, properties: str) -> None:
    directory = write(properties)
    key, _, value = properties.partition("\n")[0].partition("=")
    (problem,) = refusal(directory)
    assert problem.startswith(f"{directory / 'serving.properties'}:1: ")
    assert f'{key} = "{value}" is not available in this version; ' in problem


def test_contrastive_search_is_refused_with_the_reason(write: Write) -> None:
    (problem,) = refusal(write("option.decoding_strategy=contrastive"))
    assert "use greedy or sample: it runs the model on every candidate for a token" in problem


def test_a_model_may_sample_by_default(write: Write) -> None:
    model = resolve_model(write("option.decoding_strategy=sampling"), {})
    assert restored(model).samples


# --- what only the files or several keys together show ---

_KIND = {"type": "lmi-server ranks", "dtype": "float32", "quantization": None}
MANIFEST = {**_KIND, "tp_size": 2, "checkpoints": {"tp": [["a"], ["b"]]}}
ON_TWO_RANKS = "engine=DeepSpeed\noption.rolling_batch=deepspeed\noption.tensor_parallel_degree=2\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read ("),
        ("[1]", "does not hold a JSON object"),
        (json.dumps({"type": "BLOOM", "version": 1.0, "checkpoints": ["a.bin"]}), "lacks a.bin, which m.json names"),
        (json.dumps({"type": "BLOOM", "parallelization": "tp", "checkpoints": {}}), "is for DeepSpeed's kernels"),
        (json.dumps({**MANIFEST, "tp_size": 4}), "was split for option.tensor_parallel_degree=4, but the degree is 2"),
        (json.dumps(MANIFEST), "lacks b of m.json; split the model again"),
        (json.dumps({**MANIFEST, "checkpoints": {"tp": [["a"]]}}), "lacks weights of m.json"),
        (json.dumps({**MANIFEST, "checkpoints": ["a"]}), "m.json is damaged: checkpoints: "),
        (json.dumps({**MANIFEST, "checkpoints": {"tp": [["a"], ["../b"]]}}), "is damaged: checkpoints.tp.1.0: "),
        (json.dumps({**MANIFEST, "dtype": "nn"}), "is damaged: dtype: "),
        ("[" * 100_000, "cannot be read ("),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_the_model_loads(
    write: Write, content: str | None, problem: str
) -> None:
    directory = write(f"{ON_TWO_RANKS}option.checkpoint=m.json")
    (directory / "a").touch()
    if content is not None:
        (directory / "m.json").write_text(content)
    (found,) = inspect_model(directory, {}).problems
    assert found.startswith(f'{directory / "serving.properties"}:4: option.checkpoint = "m.json" is not allowed; ')
    assert problem in found


def test_a_manifest_that_fits_is_none_of_the_problems(write: Write) -> None:
    directory = write(f"{ON_TWO_RANKS}option.checkpoint=m.json")
    for name in ("a", "b"):
        (directory / name).touch()
    (directory / "m.json").write_text(json.dumps(MANIFEST))
    assert inspect_model(directory, {}).problems == ()


def test_ranks_take_no_adapters(write: Write) -> None:
    lines = "engine=MPI\noption.rolling_batch=scheduler\noption.enable_lora=true\n"
    directory = write(f"{lines}option.tensor_parallel_degree=2")
    (problem,) = inspect_model(directory, {}).unavailable
    assert "split over ranks takes no LoRA adapters; set option.tensor_parallel_degree=1" in problem
    (directory / "serving.properties").write_text(f"{lines}option.tensor_parallel_degree=1")
    assert inspect_model(directory, {}).unavailable == ()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("option.rolling_batch=deepspeed", "has no effect without option.rolling_batch=disable"),
        ("option.deepspeed_config_path=a.json", "has no effect: the file of option.deepspeed_config_path replaces it"),
    ],
)
def test_what_deepspeed_s_kernels_alone_read_is_named(write: Write, other: str, reason: str) -> None:
    keys = ("option.triangular_masking=false", "option.return_tuple=false", "option.training_mp_size=2")
    directory = write("\n".join(["engine=DeepSpeed", other, *keys]))
    place = directory / "serving.properties"
    warnings = inspect_model(directory, {}).warnings
    for line, key in enumerate(keys, start=3):
        assert f"{place}:{line}: {key.partition('=')[0]} {reason}" in warnings


# --- None ---

NONE_IN_LMI = {
    "": ("option.model_id", "option.revision", "option.quantize", "option.max_model_len", "option.device_map"),
    "option.rolling_batch=vllm\n": (
        "option.quantize",
        "option.max_rolling_batch_prefill_tokens",
        "option.max_model_len",
    ),
    "engine=MPI\noption.rolling_batch=lmi-dist\n": ("option.quantize",),
    "option.entryPoint=djl_python.transformers_neuronx\n": (
        "option.unroll",
        "option.context_length_estimate",
        "option.compiled_graph_path",
        "option.group_query_attention",
    ),
}
"""The keys whose default is None in LMI's document of configurations, by the handler that they are for."""


@pytest.mark.parametrize(("properties", "key"), [(lines, key) for lines, keys in NONE_IN_LMI.items() for key in keys])
def test_none_means_that_nothing_is_set(write: Write, properties: str, key: str) -> None:
    directory = write(properties)
    without = inspect_model(directory, {})
    (directory / "serving.properties").write_text(f"{properties}{key}=None\n")
    assert inspect_model(directory, {}).options == without.options
    assert inspect_model(directory, {}).problems == without.problems


def test_none_takes_back_the_value_of_a_lower_layer(write: Write) -> None:
    directory = write("option.max_model_len=64")
    assert hugging_face(resolve_model(directory, {})).max_model_len == 64
    assert hugging_face(resolve_model(directory, {}, {"option.max_model_len": "None"})).max_model_len is None
    assert hugging_face(resolve_model(directory, {"OPTION_MAX_MODEL_LEN": "None"})).max_model_len == 64


def test_none_is_no_value_of_a_key_with_a_default(write: Write) -> None:
    (problem,) = refusal(write("option.max_rolling_batch_size=None"))
    assert 'option.max_rolling_batch_size = "None" is not allowed' in problem


@pytest.mark.parametrize("entry_point", ["model.py", "{directory}/model.py", "model.service", "json.tool"])
def test_every_spelling_of_ones_own_handler_is_known(write: Write, entry_point: str) -> None:
    directory = write()
    (directory / "model.py").touch()
    (directory / "serving.properties").write_text(
        f"option.entryPoint={entry_point.format(directory=directory)}\noption.mine=1"
    )
    resolved = resolve_model(directory, {})
    assert resolved.handler == HANDLERS.user_code.handler
    assert resolved.options.passed_through == {
        "entryPoint": entry_point.format(directory=directory),
        "mine": "1",
        "model_id": str(directory),
    }
    assert resolved.warnings == ()


@pytest.mark.parametrize(
    ("entry_point", "advice"),
    [
        ("djl_python.hugginface", "; did you mean djl_python.huggingface?"),
        ("nowhere", "an absolute path"),
        ("no_such_package.service", "a dotted module"),
    ],
)
def test_an_entry_point_that_names_nothing_is_refused(write: Write, entry_point: str, advice: str) -> None:
    directory = write(f"option.entryPoint={entry_point}")
    (problem,) = refusal(directory)
    assert problem.startswith(f"{directory / 'serving.properties'}:1: option.entryPoint = ")
    assert "is not allowed; allowed: djl_python.huggingface, " in problem
    assert advice in problem


@pytest.mark.parametrize("name", ["nowhere.py", "/nowhere/model.py"])
def test_a_file_that_is_not_there_is_no_entry_point(write: Write, name: str) -> None:
    directory = write(f"option.entryPoint={name}")
    (problem,) = refusal(directory)
    assert problem.endswith(f'option.entryPoint = "{name}" is not allowed; there is no file {directory / name}')


@pytest.mark.parametrize(
    ("code", "own"),
    [
        ("def handle(inputs): ...", True),
        ("async def handle(inputs): ...", True),
        ("from mine import *", True),
        ("from mine import handle", True),
        ("class Service:\n    def handle(self): ...\nhandle = Service().handle", True),
        ("async def generate(request): yield 'a'", True),
        ("import lmi_server.contract.handler\nclass Model(lmi_server.contract.handler.LLMHandler): ...", True),
        ("def handle(:", True),
        ("", False),
        ("from djl_python.output_formatter import output_formatter\n@output_formatter\ndef mine(token): ...", False),
    ],
)
def test_a_model_py_that_takes_requests_is_the_handler(write: Write, code: str, own: bool) -> None:
    directory = write()
    (directory / "model.py").write_text(code)
    assert (resolve_model(directory, {}).handler == HANDLERS.user_code.handler) == own
    assert resolve_model(directory, {"OPTION_ENTRYPOINT": "huggingface"}).options.entry_point == "huggingface"


@pytest.mark.parametrize("line", ["engine=MPI", "engine=DeepSpeed", "option.engine=MPI"])
def test_a_model_py_that_takes_requests_wins_over_what_an_engine_stands_for(write: Write, line: str) -> None:
    directory = write(line)
    (directory / "model.py").write_text("def handle(inputs): ...")
    model = resolve_model(directory, {})
    assert model.handler == HANDLERS.user_code.handler
    assert model.options.entry_point is None
    assert model.options.mpi_mode
    (directory / "model.py").write_text("def helper(): ...")
    assert resolve_model(directory, {}).handler != HANDLERS.user_code.handler


def test_a_handle_beside_a_handler_that_does_not_ask_it_is_reported(write: Write) -> None:
    directory = write("option.entryPoint=djl_python.huggingface\noption.task=fill-mask")
    (directory / "model.py").write_text("def handle(inputs): ...")
    warnings = "\n".join(resolve_model(directory, {}).warnings)
    assert f"{directory / 'model.py'}: handle has no effect on huggingface pipeline" in warnings
    (directory / "serving.properties").write_text("option.entryPoint=djl_python.huggingface")
    assert "no effect" not in "\n".join(resolve_model(directory, {}).warnings)


@pytest.mark.parametrize("key", ["option.output_formatter", "option.input_formatter"])
def test_a_formatter_that_nothing_defines_is_refused(write: Write, key: str) -> None:
    directory = write(f"{key}=mine")
    (problem,) = refusal(directory)
    place = f'{directory / "serving.properties"}:1: {key} = "mine" is not allowed;'
    assert problem.startswith(f"{place} there is no {directory / 'model.py'} that defines it; allowed: ")
    (directory / "model.py").write_text("def other(token): ...")
    (problem,) = refusal(directory)
    assert problem.startswith(f"{place} {directory / 'model.py'} does not define it; allowed: ")
    for code in ("def mine(token): ...", "try:\n    from a import mine\nexcept ImportError:\n    mine = str", "def :"):
        (directory / "model.py").write_text(code)
        inspect_model(directory, {"OPTION_ENTRYPOINT": "huggingface"}).resolved()


def test_a_formatter_is_looked_for_only_if_text_is_generated(write: Write) -> None:
    assert resolve_model(write("option.task=fill-mask\noption.input_formatter=mine"), {}).warnings


def test_a_function_with_another_name_takes_the_requests(write: Write) -> None:
    directory = write("option.handler=predict")
    (directory / "model.py").write_text("def predict(inputs): ...")
    assert resolve_model(directory, {}).handler == HANDLERS.user_code.handler


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForMaskedLM", "fill-mask"),
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("MarianMTModel", "text2text-generation"),
        ("DistilBertForSequenceClassification", "text-classification"),
        ("TapasForQuestionAnswering", "table-question-answering"),
        ("RobertaForQuestionAnswering", "question-answering"),
        ("BertForTokenClassification", "token-classification"),
        ("ViTForImageClassification", "image-classification"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition"),
    ],
)
def test_the_task_follows_from_the_architecture(write: Write, architecture: str, task: str) -> None:
    model = resolve_model(write(config={"architectures": [architecture]}), {})
    assert model.handler == "handlers.tasks.handler:PipelineHandler"
    assert (model.options.task, model.sources["option.task"].layer) == (task, "recommender")
    assert model.options.rolling_batch == "disable"


@pytest.mark.parametrize(
    ("properties", "task"),
    [
        ("option.task=text-embedding", "text-embedding"),
        ("option.task=ner\noption.rolling_batch=auto", "token-classification"),
        ("option.rolling_batch=disable", "text-generation"),
        ("batch_size=4", "text-generation"),
        ("option.rolling_batch=disable\noption.task=auto", "text-generation"),
    ],
)
def test_a_causal_lm_runs_as_a_pipeline_if_asked(write: Write, properties: str, task: str) -> None:
    model = resolve_model(write(properties, LLAMA), {})
    assert (model.handler, model.options.task) == ("handlers.tasks.handler:PipelineHandler", task)


def test_files_of_sentence_transformers_make_an_embedding_model(write: Write) -> None:
    directory = write(config=LLAMA)
    (directory / "modules.json").write_text("[]")
    assert resolve_model(directory, {}).options.task == "text-embedding"
    (directory / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    assert resolve_model(directory, {}).options.task == "text-classification"


def test_an_architecture_without_a_task_asks_for_one(write: Write) -> None:
    (problem,) = refusal(write(config={"architectures": ["ViTModel"]}))
    assert "cannot be decoded by the rolling batch of transformers" in problem
    assert "set option.task" in problem


def test_a_static_batch_of_an_unknown_task_asks_for_one(write: Write) -> None:
    (problem,) = refusal(write("option.rolling_batch=disable", {"architectures": ["BertModel"]}))
    assert problem.endswith("no task follows from architecture BertModel; set option.task")


def test_a_rolling_batch_of_what_is_no_causal_lm_is_refused(write: Write) -> None:
    (problem,) = refusal(write("option.rolling_batch=scheduler", {"architectures": ["BertForMaskedLM"]}))
    assert "BertForMaskedLM cannot be decoded by option.rolling_batch=scheduler" in problem


@pytest.mark.parametrize("task", ["text-clasification", "translation_en", "multiple-choice"])
def test_a_task_that_is_not_served_is_refused(write: Write, task: str) -> None:
    (problem,) = refusal(write(f"option.task={task}", LLAMA))
    assert f'option.task = "{task}" is not allowed; allowed: audio-classification, ' in problem


def test_keys_of_the_rolling_batch_change_nothing_for_a_pipeline(write: Write) -> None:
    properties = "option.task=fill-mask\noption.output_formatter=json\noption.normalize=false"
    warnings = resolve_model(write(properties, LLAMA), {}).warnings
    assert [line.partition(": ")[2] for line in warnings] == [
        "option.output_formatter has no effect without a rolling batch",
        "option.normalize has no effect without option.task=text-embedding",
    ]


def test_a_model_id_that_is_nowhere_is_refused(write: Write) -> None:
    (problem,) = refusal(write("option.model_id=./nowhere"))
    assert 'option.model_id = "./nowhere" is not allowed; there is no directory' in problem


def test_contradicting_workers_are_refused(write: Write) -> None:
    (problem,) = refusal(write("minWorkers=3\nmaxWorkers=2"))
    assert 'serving.properties:2: maxWorkers = "2" is not allowed' in problem


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    (problem,) = refusal(tmp_path)
    assert "holds no config.json" in problem


def test_an_archive_of_torchserve_is_refused(tmp_path: Path) -> None:
    (tmp_path / "MAR-INF").mkdir()
    (problem,) = refusal(tmp_path)
    assert "MAR-INF" in problem
    assert "put a model.py beside its files" in problem


@pytest.mark.parametrize("name", ["workflow.json", "workflow.yml", "workflow.yaml"])
def test_a_workflow_is_refused_by_that_name(tmp_path: Path, name: str) -> None:
    """LMI takes the directory for a workflow, whatever else it holds."""
    (tmp_path / name).write_text("{}")
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    (problem,) = refusal(tmp_path)
    remedy = "register each of its models by itself, and call one after the other"
    assert problem == f"{tmp_path / name}: workflows are not served; {remedy}"


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    (problem,) = refusal(tmp_path / "nowhere")
    assert problem.startswith(f"{tmp_path / 'nowhere'}: there is no such directory; a model is a directory, ")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = refusal(tmp_path / "file")
    assert "is a file; name the directory" in problem


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_json_is_refused(write: Write, text: str) -> None:
    directory = write()
    (directory / "config.json").write_bytes(text.encode("iso-8859-1"))
    (problem,) = refusal(directory)
    assert problem.startswith(f"{directory / 'config.json'}: is not")


@pytest.mark.parametrize(
    ("directory", "name"), [("/opt/ml/model", "model"), ("/x/a-b.c d", "a_b_c_d"), ("/x/é_1", "__1"), ("/", "model")]
)
def test_the_name_is_that_of_the_directory(directory: str, name: str) -> None:
    assert model_name(Path(directory)) == name


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "OPTION_DTYPE": st.sampled_from(["auto", "Float16", "bf16"]),
            "OPTION_THREADS": st.integers(1, 64).map(str),
            "OPTION_MEM_FRACTION_STATIC": st.floats(0.01, 0.99).map(str),
            "OPTION_ROLLING_BATCH": st.sampled_from(["auto", "scheduler"]),
            "OPTION_SERVED_MODEL_NAME": st.sampled_from(["a", "a,b"]),
            "OPTION_OF_MINE": st.text(st.characters(codec="ascii"), min_size=1),
        },
    )
)
def test_a_worker_rebuilds_the_same_options(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    model = resolve_model(directory, environment)
    assert restored(model) == model.options


def test_server_settings_come_from_the_command_line_then_variables_then_defaults() -> None:
    environment = {"SERVING_MAX_REQUEST_SIZE": "100", "SERVING_PORT": "81", "SERVING_REQUEST_ID_HEADER_KEY": "x-id"}
    settings, warnings = resolve_server(environment, {"port": 82, "host": None})
    assert settings.port == 82
    assert settings.max_request_size == 100
    assert settings.request_id_header == "x-id"
    assert (settings.host, settings.drain_timeout, settings.log_level) == ("127.0.0.1", 30.0, "info")
    assert warnings == ()


def test_the_request_limit_of_sagemaker() -> None:
    def limit(environment: dict[str, str]) -> int:
        return resolve_server(environment | {"SERVING_MAX_REQUEST_SIZE": "7"}, {})[0].max_request_size

    assert limit({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "2"}) == 2 * 1024 * 1024
    assert limit({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "2", "SAGEMAKER_MAX_REQUEST_SIZE": "100"}) == 100


def test_unknown_server_variables_are_warnings() -> None:
    _, (warning,) = resolve_server({"SERVING_MAX_REQUESTSIZE": "1"}, {})
    assert "did you mean max_request_size?" in warning


def test_bad_server_settings_are_reported_together() -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve_server({"SERVING_MAX_REQUEST_SIZE": "big"}, {"port": 70000})
    assert sorted(raised.value.message.split("\n")) == [
        'command line: port = "70000" is not allowed; allowed: an integer from 0 to 65535',
        'variable SERVING_MAX_REQUEST_SIZE: max_request_size = "big" is not allowed; allowed: an integer of 1 or more',
    ]


FOUR_GPUS = Machine(total_bytes=2**38, available_bytes=2**37, gpus=tuple(Gpu(str(index)) for index in range(4)))
NO_GPU = Machine(total_bytes=2**34, available_bytes=2**33)


def test_an_engine_alias_stands_for_other_keys(write: Write) -> None:
    found = inspect_model(write("engine=DeepSpeed\noption.quantize=dynamic_int8"), {}, machine=NO_GPU)
    assert (found.spec.title, found.options.mpi_mode) == ("deepspeed task", True)
    assert found.options.entry_point == "djl_python.deepspeed"
    assert {found.sources[key].layer for key in ("option.mpi_mode", "option.entryPoint")} == {"engine alias"}
    assert found.problems == ()
    assert any('engine = "DeepSpeed" is deprecated' in warning for warning in found.warnings)


def test_a_given_key_is_stronger_than_an_engine_alias(write: Write) -> None:
    found = inspect_model(write("engine=MPI\noption.entryPoint=djl_python.tensorrt_llm"), {}, machine=NO_GPU)
    assert (found.spec.title, found.options.rolling_batch, found.options.mpi_mode) == ("tensorrt_llm", "trtllm", True)


@pytest.mark.parametrize(
    ("properties", "title"),
    [
        ("", "huggingface"),
        ("option.rolling_batch=auto", "huggingface"),
        ("option.rolling_batch=vllm", "vllm"),
        ("option.rolling_batch=VLLM\noption.entryPoint=djl_python.huggingface", "vllm"),
        ("option.rolling_batch=lmi-dist", "lmi-dist"),
        ("option.rolling_batch=trtllm", "tensorrt_llm"),
        ("option.rolling_batch=deepspeed", "deepspeed"),
        ("engine=DeepSpeed", "deepspeed task"),
        ("engine=DeepSpeed\noption.rolling_batch=auto", "deepspeed"),
        ("engine=DeepSpeed\noption.rolling_batch=deepspeed", "deepspeed"),
        ("engine=DeepSpeed\noption.rolling_batch=auto\noption.task=fill-mask", "deepspeed task"),
        ("engine=DeepSpeed\noption.rolling_batch=auto\nbatch_size=4", "deepspeed task"),
        ("engine=MPI\noption.rolling_batch=lmi-dist", "lmi-dist"),
        ("engine=MPI", "huggingface"),
        ("engine=MPI\noption.rolling_batch=scheduler", "huggingface"),
        ("engine=OnnxRuntime", "an engine in Java"),
    ],
)
def test_which_handler_is_meant(write: Write, properties: str, title: str) -> None:
    assert inspect_model(write(properties), {}, machine=FOUR_GPUS).spec.title == title


@pytest.mark.parametrize(
    ("properties", "title"),
    [
        ("", "huggingface"),
        ("engine=MPI", "lmi-dist"),
        ("engine=MPI\noption.rolling_batch=auto", "lmi-dist"),
        ("option.mpi_mode=true\noption.rolling_batch=auto", "lmi-dist"),
        ("engine=MPI\noption.rolling_batch=scheduler", "huggingface"),
    ],
)
def test_which_handler_is_meant_if_vllm_is_installed(write: Write, properties: str, title: str) -> None:
    machine = replace(NO_GPU, engines=frozenset({"vllm"}))
    assert inspect_model(write(properties), {}, machine=machine).spec.title == title


@pytest.mark.parametrize("machine", [NO_GPU, FOUR_GPUS])
def test_an_architecture_without_lmi_dist_stays_with_huggingface(write: Write, machine: Machine) -> None:
    directory = write("engine=MPI", {"architectures": ["StableLmForCausalLM"]})
    machine = replace(machine, engines=frozenset({"vllm"}))
    assert inspect_model(directory, {}, machine=machine).spec.title == "huggingface"


@pytest.mark.parametrize(
    ("properties", "architecture"),
    [
        ("option.rolling_batch=vllm\noption.task=text-embedding", "LlamaForCausalLM"),
        ("option.rolling_batch=vllm\nbatch_size=64", "BertForSequenceClassification"),
        ("option.entryPoint=djl_python.vllm", "BertForSequenceClassification"),
    ],
)
def test_a_model_that_pools_runs_in_batches_under_vllm(write: Write, properties: str, architecture: str) -> None:
    found = inspect_model(write(properties, {**LLAMA, "architectures": [architecture]}), {}, machine=NO_GPU)
    assert (found.spec.title, found.problems, found.unavailable) == ("vllm pooling", (), ())
    assert found.serving.batch_size == (64 if "batch_size" in properties else 32)
    assert found.options.engine_arguments()["runner"] == "pooling"


def test_with_gpus_and_vllm_the_engine_that_needs_no_mpi_is_chosen(write: Write) -> None:
    machine = replace(FOUR_GPUS, engines=frozenset({"vllm"}))
    assert inspect_model(write(""), {}, machine=machine).spec.title == "vllm"


@pytest.mark.parametrize(
    ("properties", "degree"),
    [
        ("option.rolling_batch=vllm", 4),
        ("option.rolling_batch=vllm\noption.tensor_parallel_degree=2", 2),
        ("engine=MPI\noption.rolling_batch=lmi-dist", 4),
        ("option.entryPoint=djl_python.tensorrt_llm", 4),
        ("option.entryPoint=djl_python.deepspeed", 1),
        ("option.entryPoint=djl_python.transformers_neuronx", 1),
        ("option.entryPoint=djl_python.huggingface", -1),
    ],
)
def test_tensor_parallel_degree_by_handler(write: Write, properties: str, degree: object) -> None:
    assert inspect_model(write(properties), {}, machine=FOUR_GPUS).options.tensor_parallel_degree == degree


@pytest.mark.parametrize("engine", ["", "engine=Python\n", "engine=MPI\n"])
def test_lmi_dist_means_mpi_whatever_the_engine_is(write: Write, engine: str) -> None:
    found = inspect_model(write(f"{engine}option.rolling_batch=lmi-dist"), {}, machine=FOUR_GPUS)
    assert (found.spec.title, found.options.ranks, found.problems) == ("lmi-dist", 4, ())


def test_the_old_name_of_model_id(write: Write) -> None:
    directory = write("option.s3url=s3://bucket/prefix")
    found = inspect_model(directory, {"OPTION_MODEL_ID": "other"})
    assert (found.location, found.problems, found.warnings) == ("s3://bucket/prefix", (), ())
    (directory / "serving.properties").write_text("option.s3url=ftp://x")
    (problem,) = refusal(directory)
    assert 'option.s3url = "ftp://x" is not available' in problem


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (
            "option.rolling_batch=vllm\noption.quantize=awqq",
            'option.quantize = "awqq" is not allowed; allowed: what the installed vLLM has: auto_awq',
        ),
        (
            "option.rolling_batch=vllm\noption.quantize=q8_0",
            "allowed: q8_0 with option.rolling_batch=scheduler, or what the installed vLLM has: auto_awq",
        ),
        (
            "option.rolling_batch=vllm\noption.load_format=foo",
            'option.load_format = "foo" is not allowed; allowed: auto,',
        ),
        (
            "option.rolling_batch=vllm\noption.block_size=big",
            'serving.properties:2: option.block_size = "big" is not allowed; allowed: a number',
        ),
        (
            "option.rolling_batch=vllm\nenable_eplb=maybe",
            'enable_eplb = "maybe" is not allowed; allowed: true or false',
        ),
        ("option.rolling_batch=vllm\noption.kv_cache_dtype=fp9", "allowed: auto, bfloat16, "),
        ("option.rolling_batch=vllm\noption.mm_processor_kwargs=[1]", "allowed: a JSON object"),
        ("engine=MPI\noption.rolling_batch=lmi-dist\noption.seed=x", "allowed: a number"),
        ("engine=MPI\noption.rolling_batch=lmi-dist\noption.load_format=foo", "allowed: auto,"),
        (
            "engine=MPI\noption.rolling_batch=lmi-dist\noption.dtype=int8\noption.quantize=bitsandbytes4",
            'option.dtype = "int8" is not allowed; allowed: int8 only without option.quantize',
        ),
        ("option.entryPoint=transformers_neuronx\noption.unroll=x", "allowed: an integer of 1 or more"),
        (
            "option.entryPoint=transformers_neuronx\noption.compiled_graph_path=/no",
            "allowed: s3://bucket/prefix, or a dir",
        ),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before(write: Write, properties: str, text: str) -> None:
    if ("vllm" in properties or "lmi-dist" in properties) and find_spec("vllm") is None:
        pytest.skip("the source of vLLM says what it refuses")
    (problem,) = inspect_model(write(properties), {}).problems
    assert text in problem


@needs_vllm
def test_arguments_by_the_names_of_vllm_reach_the_engine(write: Write) -> None:
    given = {
        "block_size": "32",
        "kv_cache_dtype": "fp8",
        "enable_eplb": "True",
        "mm_processor_kwargs": '{"crops": 4}',
        "hf_overrides": '{"rope_theta": 1}',
        "cpu_distributed_timeout_seconds": "None",
    }
    lines = ["option.rolling_batch=vllm", *(f"option.{key}={text}" for key, text in given.items())]
    found = inspect_model(write("\n".join(lines)), {})
    assert found.problems == ()
    assert given.items() <= found.options.engine_arguments().items()


def test_vllm_refuses_int8_with_what_has_8_bits(write: Write) -> None:
    directory = write("option.rolling_batch=vllm\noption.dtype=int8")
    (said,) = refusal(directory)
    assert said.endswith(
        "use option.rolling_batch=scheduler with it, or option.quantize=int8_per_channel_weight_only for a mixture of"
        " experts"
    )
    for remedy in (
        "option.rolling_batch=scheduler\noption.dtype=int8",
        "option.rolling_batch=vllm\noption.quantize=int8_per_channel_weight_only",
    ):
        (directory / "serving.properties").write_text(remedy)
        found = inspect_model(directory, {}, machine=NO_GPU)
        assert (found.problems, found.unavailable) == ((), ())


@pytest.mark.parametrize("line", ["option.dtype=int8", "option.quantize=bitsandbytes8", "option.quantize=bitsandbytes"])
@pytest.mark.parametrize("rolling_batch", ["lmi-dist", "auto"])
def test_8_bits_for_lmi_dist_are_those_of_the_rolling_batch(write: Write, line: str, rolling_batch: str) -> None:
    """The installed vLLM quantises no dense layer to 8 bits while it loads a model."""
    if rolling_batch == "lmi-dist" and find_spec("vllm") is None:
        pytest.skip("the source of vLLM says what it quantises")
    found = inspect_model(write(f"engine=MPI\noption.rolling_batch={rolling_batch}\n{line}"), {}, machine=NO_GPU)
    options: Any = found.options
    assert (found.spec.title, found.problems, found.unavailable) == ("huggingface", (), ())
    assert options.dtype == "auto"
    assert options.quantization_config() == {"load_in_8bit": True}
    noted = any("option.rolling_batch=scheduler says so without this warning" in text for text in found.warnings)
    assert noted == (rolling_batch == "lmi-dist")  # this machine has no vLLM, which auto would choose


def test_int8_beside_another_quantisation_is_refused(write: Write) -> None:
    directory = write("option.rolling_batch=scheduler\noption.dtype=int8\noption.quantize=gptq")
    assert any("int8 only without option.quantize" in line for line in refusal(directory))


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("option.kv_cache_dtype=int8\noption.dtype=fp16", "int8 and fp8 only with option.dtype=bf16 or fp32"),
        ("option.activation_dtype=int8", "on a CPU set option.quantize to one of q8_0, "),
        ("option.activation_dtype=int8\noption.quantize=bitsandbytes4", "in 4 bits of bitsandbytes are not rounded"),
        ("option.activation_dtype=int8\noption.load_in_4bit=true", "in 4 bits of bitsandbytes are not rounded"),
        ("option.activation_dtype=int8\noption.quantize=fp8", "it is for weights in blocks; remove the key"),
        (
            "option.activation_dtype=int8\noption.quantize=bitsandbytes8\noption.dtype=fp32",
            "with bitsandbytes8 it is for models in bf16; set option.dtype=bf16, remove the key",
        ),
        (
            "option.quantize=gptq",
            "config.json has no quantization_config; name a checkpoint in gptq in option.model_id",
        ),
        *(
            (
                f"option.quantize={blocks}\noption.dtype=fp16",
                "on a CPU it is for models in bf16 or fp32, and this one is",
            )
            for blocks in BLOCK_FORMATS
        ),
    ],
)
def test_what_a_plain_checkpoint_on_a_cpu_cannot_have_is_refused_before_it_loads(
    write: Write, lines: str, text: str
) -> None:
    (line,) = refusal(write(f"option.rolling_batch=scheduler\n{lines}"))
    assert line.split("serving.properties:2: ")[1].startswith(lines.split("=", maxsplit=1)[0])
    assert text in line


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ("", True),
        ("load_on_devices=0", True),
        ("option.device_map=cuda:0", True),
        ("load_on_devices=cpu", False),
        ("option.device_map=cpu", False),
        ('option.device_map={"model": "cpu", "lm_head": 0}', False),
    ],
)
def test_activations_of_8_bits_are_refused_where_the_model_goes_on_a_gpu(
    write: Write, more: str, is_refused: bool
) -> None:
    keys = "option.rolling_batch=scheduler\noption.activation_dtype=int8\noption.quantize=q8_0"
    directory = write(f"{keys}\n{more}")
    gpu = Machine(2**34, 2**34, gpus=(Gpu("0", 2**34, 2**34),), engines=frozenset({"torch", "transformers"}))
    problems = inspect_model(directory, {}, machine=gpu).problems
    found = [line for line in problems if "layers round their activations on the CPU alone" in line]
    assert len(found) == is_refused, problems
    if found:
        assert 'option.activation_dtype = "int8" is not allowed; ' in found[0]
        assert found[0].endswith("; remove the key, or set load_on_devices=cpu")


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ("option.quantize=q4_k", True),
        ("option.quantize=q8_0\noption.save_mp_checkpoint_path=saved", True),
        ("option.quantize=q8_0\noption.dtype=fp16", False),
        ("option.quantize=q4_k\nload_on_devices=cpu", False),
        ('option.quantize=q4_k\noption.device_map={"model": "cpu", "lm_head": 0}', False),
    ],
)
def test_blocks_that_a_gpu_does_not_hold_are_refused_before_the_load(write: Write, more: str, is_refused: bool) -> None:
    directory = write(f"option.rolling_batch=scheduler\n{more}")
    gpu = Machine(2**34, 2**34, gpus=(Gpu("0", 2**34, 2**34),), engines=frozenset({"torch", "transformers"}))
    problems = inspect_model(directory, {}, machine=gpu).problems
    found = [line for line in problems if "on a GPU weights are quantised to q8_0, q4_0, int8, and are not" in line]
    assert len(found) == is_refused, problems


@pytest.mark.parametrize(
    ("lines", "declared", "text"),
    [
        ("", {"quantization_config": {"load_in_4bit": True}}, "are not rounded; remove the key"),
        ("\noption.quantize=bitsandbytes8", {"torch_dtype": "float32"}, "is for models in bf16; set option.dtype=bf16"),
    ],
)
def test_what_config_json_says_against_rounded_activations_is_found_before_the_load(
    write: Write, lines: str, declared: dict[str, object], text: str
) -> None:
    directory = write(f"option.rolling_batch=scheduler\noption.activation_dtype=int8{lines}", {**LLAMA, **declared})
    (line,) = inspect_model(directory, {}, machine=NO_GPU).problems
    assert text in line


@pytest.mark.parametrize(
    ("lines", "declared"),
    [
        ("option.kv_cache_dtype=int8\noption.dtype=fp32", {}),
        ("option.activation_dtype=int8\noption.quantize=q4_0", {}),
        ("option.quantize=q4_k", {"dtype": "float16"}),  # loaded as bf16
        ("option.quantize=q4_k\noption.dtype=bf16", {}),
        ("option.activation_dtype=int8\noption.quantize=bitsandbytes8", {"dtype": "bfloat16"}),
        ("option.activation_dtype=int8\noption.quantize=bitsandbytes8", {"torch_dtype": "float16"}),
        ("option.activation_dtype=int8", {"quantization_config": {"load_in_8bit": True}}),
        ("option.activation_dtype=int8", {"quantization_config": {"quant_method": "awq"}}),
        ("option.activation_dtype=int8", {"text_config": {"quantization_config": {"quant_method": "awq"}}}),
        (
            "option.activation_dtype=int8",
            {"quantization_config": None, "text_config": {"quantization_config": {"quant_method": "awq"}}},
        ),
        ("option.quantize=gptq", {"quantization_config": {"quant_method": "gptq"}}),
    ],
)
def test_what_a_checkpoint_may_have_is_left_to_the_load(write: Write, lines: str, declared: dict[str, object]) -> None:
    directory = write(f"option.rolling_batch=scheduler\n{lines}", {**LLAMA, **declared})
    assert inspect_model(directory, {}, machine=NO_GPU).problems == ()


def test_a_declaration_of_the_text_model_alone_is_none_of_the_checkpoint(write: Write) -> None:
    declared = {"text_config": {"quantization_config": {"quant_method": "gptq"}}}
    directory = write("option.rolling_batch=scheduler\noption.quantize=gptq", {**LLAMA, **declared})
    (line,) = inspect_model(directory, {}, machine=NO_GPU).problems
    assert "config.json has no quantization_config" in line


def test_8_bits_of_a_split_model_are_refused_with_the_remedy(write: Write) -> None:
    directory = write("engine=MPI\noption.dtype=int8\noption.tensor_parallel_degree=2")
    found = inspect_model(directory, {}, machine=NO_GPU)
    remedies = "set option.quantize=q8_0 on CPUs, option.tensor_parallel_degree=1,"
    assert any(remedies in line for line in found.unavailable), found.unavailable


def test_a_handler_that_is_missing_is_one_line(write: Write) -> None:
    directory = write("engine=OnnxRuntime\noption.tensor_parallel_degree=8")
    (problem,) = refusal(directory)
    assert problem == (
        f'{directory / "serving.properties"}:1: engine = "OnnxRuntime" is not available in this version; '
        "missing: an engine in Java; served are djl_python.huggingface or djl_python.deepspeed or "
        "djl_python.lmi_dist or djl_python.lmi_vllm.vllm_async_service or djl_python.tensorrt_llm or "
        "djl_python.transformers_neuronx or djl_python.stable_diffusion or djl_python.stable_diffusion_inf2 or "
        "djl_python.sklearn_handler or "
        "djl_python.xgboost_handler or "
        "djl_python.echo"
    )


@pytest.mark.parametrize(
    ("properties", "blamed", "text"),
    [
        ("batch_size=2\noption.rolling_batch=scheduler", "batch_size", "1 with option.rolling_batch=scheduler"),
        (
            "engine=MPI\noption.entryPoint=djl_python.tensorrt_llm\noption.rotary_scaling_factor=2.0",
            "option.rotary_scaling_factor",
            "only together",
        ),
        ("option.rolling_batch=lmi-dist\noption.mpi_mode=false", "option.mpi_mode", "only with engine=MPI"),
        (
            "option.entryPoint=djl_python.deepspeed\noption.quantize=smoothquant\noption.dtype=bf16",
            "option.quantize",
            "smoothquant only with option.dtype=fp16 or fp32",
        ),
        (
            "option.entryPoint=djl_python.transformers_neuronx\noption.load_in_8bit=true\noption.partition_schema=optimum",
            "option.partition_schema",
            "optimum only with option.model_loader=optimum",
        ),
        (
            "option.rolling_batch=vllm\noption.enable_reasoning=true",
            "option.enable_reasoning",
            "true only with option.reasoning_parser",
        ),
        ("option.enable_reasoning=true", "option.enable_reasoning", "true only with option.reasoning_parser"),
        (
            "option.entryPoint=djl_python.deepspeed\noption.enable_reasoning=true",
            "option.enable_reasoning",
            "true only with option.reasoning_parser",
        ),
    ],
)
def test_what_does_not_go_together(write: Write, properties: str, blamed: str, text: str) -> None:
    directory = write(properties)
    line = next(number for number, line in enumerate(properties.split("\n"), 1) if line.startswith(blamed))
    (problem,) = inspect_model(directory, {}, machine=NO_GPU).problems
    assert problem.startswith(f"{directory / 'serving.properties'}:{line}: {blamed} = ")
    assert text in problem


@pytest.mark.parametrize(("key", "method"), [("load_in_4bit", "bitsandbytes4"), ("load_in_8bit", "bitsandbytes8")])
def test_a_deprecated_key_becomes_another(write: Write, key: str, method: str) -> None:
    found = inspect_model(write(f"option.{key}=true\noption.device_map=auto"), {}, machine=NO_GPU)
    assert hugging_face_options(found.options).quantize == method
    assert found.sources["option.quantize"].layer == "deprecated key"
    assert any(f"use option.quantize={method}" in warning for warning in found.warnings)
    assert found.problems == ()
    assert found.unavailable == ()


def hugging_face_options(options: object) -> HuggingFaceOptions:
    assert isinstance(options, HuggingFaceOptions)
    return options


def test_a_deprecated_value_is_mapped(write: Write) -> None:
    directory = write("option.rolling_batch=scheduler\n\noption.quantize=bitsandbytes")
    found = inspect_model(directory, {}, machine=NO_GPU)
    assert found.options.engine_arguments()["quantization_config"] == {"load_in_8bit": True}
    assert found.warnings == (
        f'{directory / "serving.properties"}:3: option.quantize = "bitsandbytes" is deprecated: use bitsandbytes8',
    )


VLLM = "option.rolling_batch=vllm\n"


@pytest.mark.parametrize(
    ("key", "other", "values"),
    [
        ("option.max_rolling_batch_size", "option.max_num_seqs", ("16", "8")),
        ("option.tensor_parallel_degree", "option.tensor_parallel_size", ("2", "4")),
        ("option.pipeline_parallel_degree", "option.pipeline_parallel_size", ("1", "2")),
        ("option.quantize", "option.quantization", ("awq", "gptq")),
    ],
)
def test_two_spellings_of_one_vllm_key_must_agree(write: Write, key: str, other: str, values: tuple[str, str]) -> None:
    directory = write()
    file = directory / "serving.properties"
    file.write_text(f"{VLLM}{other}={values[1]}\n{key}={values[0]}")
    (problem,) = inspect_model(directory, {}, machine=FOUR_GPUS).problems
    assert problem == (
        f'{file}:2: {other} = "{values[1]}" is not allowed; allowed: "{values[0]}", since {key} is the same option'
    )
    file.write_text(f"{VLLM}{other}={values[0]}\n{key}={values[0]}")
    assert inspect_model(directory, {}, machine=FOUR_GPUS).problems == ()


def test_lmcache_allows_one_worker(write: Write) -> None:
    directory = write(f"{VLLM}option.lmcache_auto_config=true")
    serving = inspect_model(directory, {}, machine=FOUR_GPUS).serving
    assert (serving.min_workers, serving.max_workers) == (1, 1)
    (problem,) = inspect_model(directory, {"ARGS_maxWorkers": "2"}, machine=FOUR_GPUS).problems
    assert problem == (
        'variable ARGS_maxWorkers: maxWorkers = "2" is not allowed; allowed: 1 with option.lmcache_auto_config=true'
    )


@pytest.mark.parametrize(
    ("properties", "machine", "degree"),
    [
        (VLLM, FOUR_GPUS, 4),
        (VLLM, NO_GPU, 1),
        ("option.entryPoint=djl_python.vllm\noption.pipeline_parallel_degree=2", FOUR_GPUS, 2),
        (f"{VLLM}load_on_devices=gpu0+gpu1", FOUR_GPUS, 2),
        (f"{VLLM}load_on_devices=gpu9", FOUR_GPUS, 4),
        ("engine=MPI\noption.rolling_batch=trtllm", FOUR_GPUS, 4),
    ],
)
def test_max_is_a_number_for_the_engine(write: Write, properties: str, machine: Machine, degree: int) -> None:
    found = inspect_model(write(f"{properties}\noption.tensor_parallel_degree=max"), {}, machine=machine)
    source = found.sources["option.tensor_parallel_degree"]
    assert found.options.tensor_parallel_degree == degree
    assert (source.layer, source.raw, source.written) == ("serving.properties", str(degree), "max")
    assert "max" not in found.options.engine_arguments().values()


def test_tensorrt_llm_takes_all_gpus(write: Write) -> None:
    found = inspect_model(write("engine=MPI\noption.rolling_batch=trtllm"), {}, machine=FOUR_GPUS)
    assert found.options.engine_arguments()["tensor_parallel_size"] == 4


def test_vllm_splits_a_model(write: Write) -> None:
    found = inspect_model(write(f"{VLLM}option.tensor_parallel_degree=2"), {}, machine=FOUR_GPUS)
    assert not any("tensor_parallel" in line for line in found.unavailable)


@pytest.mark.parametrize("rolling", ["scheduler", "disable"])
@pytest.mark.parametrize("degree", ["max", "4"])
def test_accelerate_takes_several_gpus_for_one_model(write: Write, rolling: str, degree: str) -> None:
    directory = write(f"engine=Python\noption.rolling_batch={rolling}\noption.tensor_parallel_degree={degree}")
    found = inspect_model(directory, {}, machine=FOUR_GPUS)
    assert (found.problems, found.unavailable, found.warnings) == ((), (), ())
    assert (found.engine.gpus_per_worker(4), found.options.ranks) == (4, None)
    without = inspect_model(directory, {}, machine=NO_GPU)
    assert (without.problems, without.unavailable) == ((), ())
    assert without.engine.gpus_per_worker(0) is None
    told = [line for line in without.warnings if f'tensor_parallel_degree = "{degree}" gives no GPU' in line]
    assert len(told) == (degree == "4")


@pytest.mark.parametrize(
    ("device_map", "degree", "problem"),
    [
        ('{"model": 0, "lm_head": 1}', 2, None),
        ('{"model.layers": "cuda:1", "lm_head": "cpu", "model.norm": "disk"}', 2, None),
        ("cuda:1", 2, None),
        ("balanced_low_0", 2, None),
        ('{"model": 0, "lm_head": 2}', 2, "allowed: GPUs 0 to 1, because option.tensor_parallel_degree gives 2"),
        ("cuda:1", 1, "allowed: GPUs 0 to 0, because option.tensor_parallel_degree gives 1"),
        ('{"model": "gpu0"}', 2, "is not allowed; allowed: auto, balanced, "),
        ('{"model": 0', 2, "is not allowed; allowed: auto, balanced, "),
        ("{}", 2, "is not allowed; allowed: auto, balanced, "),
    ],
)
def test_a_device_map_names_gpus_of_the_worker(write: Write, device_map: str, degree: int, problem: str | None) -> None:
    directory = write(f"option.device_map={device_map}\noption.tensor_parallel_degree={degree}")
    found = inspect_model(directory, {}, machine=FOUR_GPUS)
    assert len(found.problems) == (problem is not None)
    assert problem is None or problem in found.problems[0]


@pytest.mark.parametrize(
    ("places", "stored"),
    [
        ({"model": 0, "lm_head": 1}, None),
        ({"model": "cpu", "lm_head": "cpu"}, None),
        ({"model": 0, "lm_head": "cpu"}, "cpu"),
        ({"model": "cpu", "lm_head": "disk"}, "disk"),
        ({"model": 0, "model.norm": "disk", "lm_head": "cpu"}, "cpu and disk"),
    ],
)
def test_weights_that_bitsandbytes_quantises_stay_where_they_are_computed(
    write: Write, places: dict[str, object], stored: str | None
) -> None:
    given = ["option.tensor_parallel_degree=2", "option.quantize=bitsandbytes4"]
    found = inspect_model(write("\n".join([*given, f"option.device_map={json.dumps(places)}"])), {}, machine=FOUR_GPUS)
    assert len(found.problems) == (stored is not None)
    assert stored is None or f"allowed: a map without {stored}, because bitsandbytes" in found.problems[0]


def test_each_rank_of_the_mpi_engine_has_its_own_device(write: Write) -> None:
    directory = write(
        "engine=MPI\noption.rolling_batch=scheduler\noption.tensor_parallel_degree=2\noption.device_map=auto"
    )
    (line,) = inspect_model(directory, {}, machine=FOUR_GPUS).unavailable
    assert 'option.device_map = "auto" is not available in this version; each rank of engine=MPI has a device' in line


def test_a_dynamic_batch_leaves_no_rolling_batch_to_auto(write: Write) -> None:
    neuron = "option.entryPoint=djl_python.transformers_neuronx\noption.rolling_batch=auto\nbatch_size=4"
    found = inspect_model(write(neuron), {}, machine=NO_GPU)
    assert (found.options.rolling_batch, found.problems) == ("disable", ())


@pytest.mark.parametrize(
    ("given", "spec", "rolling", "said"),
    [
        ("option.batch_size=4", "huggingface", "scheduler", "option.batch_size has no effect here: as in LMI"),
        ("option.batch_size=4\noption.rolling_batch=scheduler", "huggingface", "scheduler", "option.batch_size has no"),
        ("option.batch_size=4\noption.rolling_batch=auto", "huggingface", "scheduler", "option.batch_size has no"),
        ("batch_size=4\noption.rolling_batch=auto", "huggingface pipeline", "disable", "disable beside batch_size"),
        ("option.rolling_batch=vllm\noption.task=ner", "vllm", "vllm", "option.task has no effect: vLLM serves"),
    ],
)
def test_modes_do_not_override_each_other_without_a_word(
    write: Write, given: str, spec: str, rolling: str, said: str
) -> None:
    found = inspect_model(write(given, LLAMA), {}, machine=NO_GPU)
    assert (found.spec.title, found.options.rolling_batch, found.problems) == (spec, rolling, ())
    assert any(said in warning for warning in found.warnings), found.warnings


@pytest.mark.parametrize(("graphs", "eager"), [("yes", False), ("on", False), ("0", True), ("False", True)])
def test_cuda_graphs_are_the_opposite_of_eager(write: Write, graphs: str, eager: bool) -> None:
    options = inspect_model(write(VLLM), {"ENABLE_CUDA_GRAPHS": graphs}, machine=NO_GPU).options
    assert options.engine_arguments()["enforce_eager"] is eager


def test_sagemaker_sets_the_content_type_of_tree_models(write: Write) -> None:
    directory = write("option.entryPoint=djl_python.sklearn_handler\noption.default_accept=application/json", None)
    found = inspect_model(directory, {"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}, machine=NO_GPU)
    assert found.sources["option.default_accept"].raw == "text/csv"


def test_a_key_of_another_handler_says_so(write: Write) -> None:
    (warning,) = inspect_model(write("option.max_input_len=5"), {}, machine=NO_GPU).warnings
    assert warning.endswith("option.max_input_len has no effect on huggingface; it is an option of tensorrt_llm")


@pytest.mark.parametrize(("machine", "workers"), [(NO_GPU, (3, 4)), (FOUR_GPUS, (1, 2))])
def test_workers_by_kind_of_machine(write: Write, machine: Machine, workers: tuple[int, int]) -> None:
    properties = "minWorkers=9\ncpu.minWorkers=3\ncpu.maxWorkers=4\ngpu.minWorkers=1\ngpu.maxWorkers=2"
    serving = inspect_model(write(properties), {}, machine=machine).serving
    assert (serving.min_workers, serving.max_workers) == workers


@pytest.mark.parametrize("key", ["option.enable_lora=true", "option.enable_stateful_sessions=true"])
@pytest.mark.parametrize(
    ("config", "line", "on_cpu", "devices"),
    [
        (None, "", 2, "*"),
        (LLAMA, "", 1, "0"),
        (None, "option.model_id=some/model", 1, "0"),
        (None, "option.mpi_mode=true", 1, "*"),
    ],
    ids=["code alone", "with config.json", "with model_id", "under MPI"],
)
def test_code_that_names_no_model_has_further_workers_with_adapters_and_sessions(
    write: Write, key: str, config: object, line: str, on_cpu: int, devices: str
) -> None:
    directory = write(f"engine=Python\noption.entryPoint=model.py\n{key}\n{line}", config)
    (directory / "model.py").write_text("def handle(inputs):\n    return None\n")
    cpu = inspect_model(directory, {}, machine=replace(NO_GPU, cpu_workers=2))
    assert cpu.serving.max_workers == on_cpu
    assert inspect_model(directory, {}, machine=FOUR_GPUS).serving.load_on_devices == devices


def test_variables_of_text_generation_inference(write: Write) -> None:
    environment = {
        "MAX_BATCH_SIZE": "7",
        "MAX_CONCURRENT_REQUESTS": "9",
        "HF_MODEL_TRUST_REMOTE_CODE": "true",
        "ENABLE_CUDA_GRAPHS": "false",
        "CUDA_MEMORY_FRACTION": "0.8",
        "SM_NUM_GPUS": "2",
        "MAX_BATCH_PREFILL_TOKENS": "4096",
        "OPTION_TRUST_REMOTE_CODE": "false",
    }
    found = inspect_model(write("option.rolling_batch=vllm"), environment, machine=NO_GPU)
    given = found.options.engine_arguments()
    assert (given["max_num_seqs"], given["max_num_batched_tokens"], found.serving.job_queue_size) == (7, 4096, 9)
    assert (given["enforce_eager"], given["gpu_memory_utilization"], given["tensor_parallel_size"]) == (True, 0.8, 2)
    assert given["trust_remote_code"] is False
    assert (found.problems, found.warnings) == ((), ())


@pytest.mark.parametrize("lines", [(), ("option.rolling_batch=auto",), ("option.entryPoint=djl_python.huggingface",)])
def test_auto_avoids_a_rolling_batch_that_cannot_run_the_architecture(write: Write, lines: tuple[str, ...]) -> None:
    doge = {"architectures": ["DogeForCausalLM"], "model_type": "doge"}
    found = inspect_model(write(*lines, config=doge), {}, machine=NO_GPU)
    assert (found.spec.title, found.problems) == ("huggingface pipeline", ())
    (warning,) = found.warnings
    assert warning.startswith(
        "DogeForCausalLM cannot run under the rolling batch of transformers and is served in static"
    )


@needs_vllm
@pytest.mark.parametrize("architecture", ["DeepseekV4ForCausalLM", "DogeForCausalLM"])
def test_auto_serves_in_static_batches_what_vllm_has_no_kernel_for(write: Write, architecture: str) -> None:
    machine = replace(NO_GPU, engines=frozenset({"vllm"}))
    found = inspect_model(write(config={"architectures": [architecture]}), {}, machine=machine)
    assert (found.spec.title, found.problems) == ("huggingface pipeline", ())
    (warning,) = found.warnings
    assert f"{architecture} cannot run under the rolling batch of transformers and is served in static" in warning


@pytest.mark.parametrize(
    ("architecture", "unavailable"),
    [
        ("Gemma3ForConditionalGeneration", False),  # its text is served, and compared when it loads
        ("BertGenerationDecoder", False),
        ("ReformerModelWithLMHead", False),
        ("Qwen2VLForConditionalGeneration", False),  # its images, too
        ("LlavaForConditionalGeneration", False),
        ("Blip2ForConditionalGeneration", True),
        ("PaliGemmaForConditionalGeneration", True),
    ],
)
def test_a_model_of_images_and_text_points_to_vllm(write: Write, architecture: str, unavailable: bool) -> None:
    config = {"architectures": [architecture], "vision_config": {}}
    found = inspect_model(write(config=config), {}, machine=NO_GPU)
    wanted = "reads more than text, which vllm serves; pip install lmi-server[vllm], or lmi-server[vllm-cuda] for GPUs"
    assert [text.partition(f"{architecture} ")[2] for text in found.unavailable] == [wanted] * unavailable


@pytest.mark.parametrize("engines", [frozenset[str](), frozenset({"vllm"})])
@pytest.mark.parametrize("family", ["Idefics3", "InternVL", "LlavaOnevision", "Mistral3", "Qwen2_5_VL", "SmolVLM"])
def test_the_rolling_batch_serves_images_by_itself_without_gpus(
    write: Write, family: str, engines: frozenset[str]
) -> None:
    config = {"architectures": [f"{family}ForConditionalGeneration"], "vision_config": {}}
    found = inspect_model(write(config=config), {}, machine=replace(NO_GPU, engines=engines))
    assert (found.spec.title, found.problems) == ("huggingface", ())


def test_deepspeed_serves_no_images(write: Write) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
    found = inspect_model(write("option.rolling_batch=deepspeed\nengine=MPI", config=config), {}, machine=NO_GPU)
    assert any("LlavaForConditionalGeneration" in line for line in found.unavailable)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('option.limit_mm_per_prompt={"image": 2}', None),
        ("option.limit_mm_per_prompt=two", "a JSON object"),
        ('option.limit_mm_per_prompt={"image": -1}', "allowed: an integer of 0 or more as the limit of image"),
        ('option.limit_mm_per_prompt={"video": 1}', "allowed: a limit of image alone; this handler reads no video"),
        ("option.image_cache_gb=0", "image_cache_gb"),
        ("option.allowed_media_domains=images.example.com, 10.0.0.7,::1", None),
        ("option.allowed_media_domains=a.example,https://example.com/", "allowed: hosts separated by commas"),
        ("option.allowed_media_domains=*.example.com", "allowed: hosts"),
        ("option.allowed_media_domains=example.com:8080", "allowed: hosts"),
        ("option.allowed_media_domains=[::1]", "allowed: hosts"),
    ],
)
def test_limits_of_images(write: Write, line: str, problem: str | None) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
    found = inspect_model(write(line, config=config), {}, machine=NO_GPU)
    assert bool(found.problems) == (problem is not None)
    assert problem is None or problem in found.problems[0]


@needs_vllm
@pytest.mark.parametrize("lines", [(), ("option.rolling_batch=auto",)])
@pytest.mark.parametrize(
    "architecture",
    ["Blip2ForConditionalGeneration", "PaliGemmaForConditionalGeneration"],
)
def test_auto_serves_a_model_of_images_and_text_with_vllm(
    write: Write, lines: tuple[str, ...], architecture: str
) -> None:
    machine = replace(NO_GPU, engines=frozenset({"vllm"}))
    config = {"architectures": [architecture], "vision_config": {}}
    found = inspect_model(write("\n".join(lines), config=config), {}, machine=machine)
    assert (found.spec.title, found.problems, found.unavailable) == ("vllm", (), ())
    (warning,) = found.warnings
    assert warning == (
        f"{architecture} reads more than text, and is served with vllm; option.rolling_batch=vllm says so without this"
        " warning"
    )


@needs_vllm
@pytest.mark.parametrize(
    ("lines", "architecture", "reason"),
    [
        ((), "NewerForConditionalGeneration", "the installed vllm does not know it"),
        (("option.entryPoint=djl_python.huggingface",), "Blip2ForConditionalGeneration", "the rolling batch of trans"),
        (("option.rolling_batch=scheduler",), "Blip2ForConditionalGeneration", "option.rolling_batch=scheduler, which"),
    ],
)
def test_a_model_of_images_and_text_that_no_engine_serves_says_what_would(
    write: Write, lines: tuple[str, ...], architecture: str, reason: str
) -> None:
    machine = replace(NO_GPU, engines=frozenset({"vllm"}))
    config = {"architectures": [architecture], "vision_config": {}}
    found = inspect_model(write("\n".join(lines), config=config), {}, machine=machine)
    (line,) = found.unavailable
    assert reason in line


PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 128,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
}


@pytest.mark.parametrize("lines", [(), ("option.rolling_batch=auto",), ("option.max_model_len=129",)])
def test_auto_serves_rotary_embeddings_that_change_with_the_length_under_the_rolling_batch(
    write: Write, lines: tuple[str, ...]
) -> None:
    found = inspect_model(write("\n".join(lines), config=PHI_3), {}, machine=NO_GPU)
    assert (found.spec.title, found.problems, found.warnings) == ("huggingface", (), ())


@pytest.mark.parametrize("config", [{"rope_scaling": 3}, {"rope_scaling": {"type": [1]}}, {"rope_parameters": []}])
def test_rotary_embeddings_of_any_form_are_read(write: Write, config: dict[str, Any]) -> None:
    found = inspect_model(write(config={**PHI_3, "rope_scaling": None, **config}), {}, machine=NO_GPU)
    assert found.spec.title == "huggingface"


def test_a_rolling_batch_that_was_asked_for_is_chosen_for_any_architecture(write: Write) -> None:
    doge = {"architectures": ["DogeForCausalLM"], "model_type": "doge"}
    asked = inspect_model(write("option.rolling_batch=scheduler", config=doge), {}, machine=NO_GPU)
    assert (asked.spec.title, asked.warnings) == ("huggingface", ())


def test_a_variable_of_text_generation_inference_without_effect_gives_a_warning(write: Write) -> None:
    (warning,) = inspect_model(write(), {"CUDA_MEMORY_FRACTION": "0.8"}, machine=NO_GPU).warnings
    assert warning == "variable CUDA_MEMORY_FRACTION is ignored, because the handler has no such option"


@given(
    pairs=st.lists(
        st.tuples(
            st.sampled_from(["engine", "option.entryPoint", "option.rolling_batch", "option.dtype", "batch_size"]),
            st.sampled_from(
                ["MPI", "Python", "auto", "vllm", "lmi-dist", "djl_python.deepspeed", "fp16", "2", "", "x"]
            ),
        )
    )
)
def test_a_configuration_has_one_reading(
    pairs: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The last of several lines for a key counts, and each of the others gives a warning."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    file = directory / "serving.properties"
    file.write_text("\n".join(f"{key}={value}" for key, value in pairs))
    whole = inspect_model(directory, {}, machine=NO_GPU)
    last = dict(pairs)
    file.write_text("\n".join(f"{key}={value}" for key, value in sorted(last.items())))
    once = inspect_model(directory, {}, machine=NO_GPU)
    assert (whole.options, whole.serving, whole.spec) == (once.options, once.serving, once.spec)
    assert len(whole.problems) == len(once.problems)
    assert len([text for text in whole.warnings if "was given in line" in text]) == len(pairs) - len(last)


@pytest.mark.parametrize("model_id", ["s3://bucket/model", "org/model", "{directory}/model.tar.gz"])
def test_a_model_that_has_to_be_fetched_keeps_its_address(write: Write, model_id: str) -> None:
    directory = write(config=None)
    (directory / "model.tar.gz").touch()
    address = model_id.format(directory=directory)
    (directory / "serving.properties").write_text(f"option.model_id={address}")
    found = inspect_model(directory, {}, machine=NO_GPU)
    assert (found.location, found.config, found.problems, found.unavailable) == (address, {}, (), ())


def test_code_is_not_downloaded(write: Write) -> None:
    (problem,) = refusal(write("option.entryPoint=https://host/model.py"))
    assert "is not allowed: the server downloads no code" in problem
