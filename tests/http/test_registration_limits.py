"""What a registration from another machine may name: models, adapters, and whatever an option names."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import Server, make_model, running

from frontend.access.registration_limits import RegistrationLimits
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import PermissionDeniedError
from lmi_server.serving.models.model_store import ModelSource

REMOTE = {"x-forwarded-for": "203.0.113.7"}
FAR = {"client": ("203.0.113.7", 1), "server": ("10.0.0.1", 8080), "headers": []}
NEAR = {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080), "headers": []}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a directory with a store of models, and with a model and an adapter that are in no store."""
    for name in ("store/model/adapters/own", "store/model/draft", "store/other", "elsewhere/adapter"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("store/model/model.py", "store/model/code.py", "store/model/t.jinja", "elsewhere/model.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "store" / "model" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "store" / "model" / "out.py").symlink_to(tmp_path / "elsewhere" / "model.py")
    return tmp_path


def limits(home: Path, *sources: str) -> RegistrationLimits:
    """Return the limits of a server with a store; with `sources`, of one that lists what may be named."""
    return RegistrationLimits(
        ServerSettings(model_store=str(home / "store"), registration_sources=sources or None),
        {},
    )


def checked(home: Path, key: str, value: str, *sources: str) -> str:
    """Return the value of an option as the registration of a model of the store uses it."""
    model = ModelSource(str(home / "store" / "model"), "m", settings={key: value.replace("{home}", str(home))})
    return limits(home, *sources).check_model(model, FAR).settings[key]


@contextlib.contextmanager
def refusal() -> Iterator[None]:
    with pytest.raises(PermissionDeniedError, match="registration_sources"):
        yield


# --- models ---


@pytest.mark.parametrize("revision", ["refs/pr/7", "refs/heads/main", "0123abc", "0123456789abcdef" * 2 + "01234567"])
def test_a_revision_may_not_be_what_a_stranger_proposes(home: Path, revision: str) -> None:
    for key in ("option.revision", "option.tokenizer_revision"):
        with refusal():
            checked(home, key, revision, str(home / "store"), "owner/")
        assert checked(home, key, "v1.0", str(home / "store"), "owner/") == "v1.0"
    with refusal():
        checked(home, "option.speculative_config", json.dumps({"revision": revision}), str(home / "store"), "owner/")


def test_a_source_allows_whole_parts_and_nothing_beside_them(tmp_path: Path) -> None:
    sources = ("s3://bucket/models", "owner/", "someone/model", str(tmp_path / "store"))
    limits = RegistrationLimits(ServerSettings(registration_sources=sources), {})
    allowed = ("s3://bucket/models", "s3://bucket/models/a", "owner/a", "someone/model", "someone/model:Q8", "store/a")
    refused = (
        *("s3://bucket/models-evil/a", "s3://bucket", "s3://bucket/models/../other", "s3://bucket/models/%2e%2e/other"),
        *("owners/a", "someone/model-evil", "store-evil/a", "store/../other", "file:{}/store/../other"),
        *("https://bucket/models/a", "S3://bucket/models/a", "model", "//owner/a", "~/store/a"),
    )
    for url, allows in {**dict.fromkeys(allowed, True), **dict.fromkeys(refused, False)}.items():
        given = str(tmp_path / url) if url.startswith("store") else url.replace("{}", str(tmp_path))
        with contextlib.nullcontext() if allows else refusal():
            limits.check_requested(ModelSource(given, "name"))


def test_what_is_checked_is_what_is_used(home: Path) -> None:
    link = home / "link"
    link.symlink_to(home / "store" / "model")
    model = limits(home).check_model(ModelSource(str(link), "m", settings={"option.chat_template": "t.jinja"}), FAR)
    link.unlink()
    link.symlink_to(home / "elsewhere")
    assert (model.url, model.name) == (str(home / "store" / "model"), "m")
    assert model.settings["option.chat_template"] == str(home / "store" / "model" / "t.jinja")


def test_a_linked_file_keeps_its_suffix_by_which_it_is_read(home: Path) -> None:
    blob = home / "store" / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_text("")
    (home / "store" / "model.gguf").symlink_to(blob)
    url = str(home / "store" / "model.gguf")
    assert limits(home).check_model(ModelSource(url, "m"), FAR).url == url


def test_a_model_of_an_application_file_is_for_clients_that_name_everything(home: Path) -> None:
    """FILE#MODEL is no path: its links would not be followed."""
    (home / "app.yaml").write_text("llm_configs: []")
    (home / "store" / "app.yaml").symlink_to(home / "app.yaml")
    model = ModelSource(f"{home}/store/app.yaml#a", "m")
    assert limits(home).check_model(model, NEAR) is model
    with refusal():
        limits(home).check_model(model, FAR)


def test_a_client_here_names_everything_as_it_is_unless_sources_are_listed(home: Path) -> None:
    model = ModelSource("owner/model", "m", settings={"option.env": "A=1", "option.worker_cls": "a.B"})
    assert limits(home).check_model(model, NEAR) is model
    assert limits(home).check_requested(model) is model
    assert limits(home, "*").check_model(model, FAR) is model
    with refusal():
        limits(home, "owner/").check_model(model, NEAR)


def test_a_name_that_is_also_a_path_is_no_id_of_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that gets the name would take the directory, wherever it is."""
    monkeypatch.chdir(home)
    (home / "owner" / "model").mkdir(parents=True)
    with refusal():
        checked(home, "option.tokenizer", "owner/model", str(home / "store"), "owner/")
    assert checked(home, "option.tokenizer", "owner/other", str(home / "store"), "owner/") == "owner/other"


# --- options ---


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("option.model_id", "owner/model"),
        ("option.model_id", "gpt2"),
        ("option.model_id", "s3://bucket/model"),
        ("option.model_id", "{home}/elsewhere"),
        ("option.model_id", "file:{home}/elsewhere"),
        ("option.model_id", "file://host{home}/elsewhere"),
        ("option.model_id", "../../elsewhere"),
        ("option.model_id", "out"),
        ("option.model_id", "https://host/model"),
        ("option.s3url", "s3://bucket/model"),
        ("option.tokenizer", "owner/model"),
        ("option.tokenizer", "gpt2"),
        ("option.speculative_draft_model", "owner/model"),
        ("option.dynamic_lora_loading_path", "s3://bucket/adapters"),
        ("option.sessions_s3url", "s3://bucket/sessions"),
        ("option.sessions_path", "{home}/elsewhere"),
        ("option.chat_template", "{home}/elsewhere/model.py"),
        ("option.chat_template", "out/model.py"),
        ("option.adapters", "out"),
        ("option.save_mp_checkpoint_path", "{home}/elsewhere"),
        ("option.deepspeed_config_path", "../../elsewhere/c.json"),
        ("option.lmcache_config_file", "~/../../../c.yaml"),
        ("option.entryPoint", "{home}/elsewhere/model.py"),
        ("option.entryPoint", "../../elsewhere/model.py"),
        ("option.entryPoint", "out/model.py"),
        ("option.entryPoint", "out.py"),
        ("option.entryPoint", "http.server"),
        ("option.entryPoint", "antigravity"),
        ("option.entryPoint", "out"),
        ("option.entryPoint", "https://host/model.py"),
        ("option.entryPoint", " {home}/elsewhere/model.py"),
        ("option.entryPoint", "\t../../elsewhere/model.py"),
        ("option.entryPoint", "djl_python./../../../elsewhere/model.py"),
        ("option.entryPoint", "djl_python.a b"),
        ("option.chat_template", "a/" * 500_000),
        ("option.chat_template", "a\0b"),
        ("option.chat_template", "a\ud800"),
        ("option.model_id", "a/" * 500_000),
        ("option.model_id", "a/b/\0"),
        ("option.model_id", "a/b/\ud800"),
        ("option.pythonExecutable", "/bin/sh"),
        ("option.pythonExecutable", "sh"),
        ("option.env", "LD_PRELOAD=x"),
        ("option.allow_private_media", "true"),
        ("option.skops_trusted_types", "os.system"),
        # Undeclared: an engine or the model's code gets them as they are.
        ("option.worker_cls", "antigravity.Worker"),
        ("option.worker_cls", "antigravity"),
        ("option.worker_extension_cls", "antigravity"),
        ("option.logits_processors", "antigravity:P"),
        ("option.tool_parser_plugin", "plugin"),
        ("option.distributed_executor_backend", "antigravity.E"),
        ("option.allowed_local_media_path", "/"),
        ("option.hf_config_path", "config"),
        ("option.hf_overrides", '{"auto_map": "x"}'),
        ("option.model_loader_extra_config", '{"path": "x"}'),
        ("option.lora_modules", "x"),
        ("option.trtllm_custom_tokenizer", "antigravity.T"),
        ("option.unknown", "anything"),
        ("option.unknown", "[1]"),
        # JSON, at any depth.
        ("option.speculative_config", '{"model": "owner\\u002fmodel"}'),
        ("option.speculative_config", '{"model": "gpt2"}'),
        ("option.speculative_config", '{"model": "draft", "model": "owner/model"}'),
        ("option.speculative_config", '{"a": {"b": [{"model": "owner/model"}]}}'),
        ("option.speculative_config", '{"a": [{"b": "x"}]}'),
        ("option.speculative_config", "{'model': 'owner/model'}"),
        ("option.speculative_config", '{"../x": 1}'),
        ("option.speculative_config", "owner/model"),
        ("option.speculative_config", "[" * 100_000),
        ("option.speculative_config", '{"model": "\\ud800"}'),
        ("option.kv_transfer_config", '{"kv_connector": "a", "kv_connector_module_path": "antigravity"}'),
        ("option.kv_transfer_config", '{"kv_connector_extra_config": {"path": "x"}}'),
        ("option.override_neuron_config", '{"path": "x"}'),
    ],
)
def test_an_option_names_nothing_beyond_the_store(home: Path, key: str, value: str) -> None:
    with refusal():
        checked(home, key, value)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("option.model_id", "model", "name a directory or file of the model store by its full path"),
        ("option.chat_template", "/etc/passwd", "name a directory or file of the model store by its full path"),
        ("option.entryPoint", "json.tool", "name a handler of this server or a file of the model, or set the key in"),
        ("option.pythonExecutable", "/usr/bin/python3", "set the key in the serving.properties of the model"),
        ("option.env", "A=1", "set the key in the serving.properties of the model"),
        ("option.own_key", "five", "set the key in the serving.properties of the model"),
        ("option.speculative_config", "{'model': 'x'}", "set the key in the serving.properties of the model"),
        ("option.speculative_config", '{"model": "owner/model"}', "name a directory or file of the model store"),
    ],
)
def test_a_refusal_says_what_works_instead(home: Path, key: str, value: str, remedy: str) -> None:
    with pytest.raises(PermissionDeniedError) as refused:
        checked(home, key, value)
    assert f"Parameter {key}" in str(refused.value)
    assert remedy in str(refused.value)


def test_a_model_of_the_store_is_named_by_its_path(home: Path) -> None:
    with pytest.raises(PermissionDeniedError, match=r'url is "model", .* of the model store by its full path'):
        limits(home).check_model(ModelSource("model", "m"), FAR)
    path = str(home / "store" / "model")
    assert limits(home).check_model(ModelSource(path, "m"), FAR).url == path


@pytest.mark.parametrize(
    ("key", "value", "used"),
    [
        ("option.model_id", "{home}/store/other", "{home}/store/other"),
        ("option.model_id", "file:{home}/store/other", "{home}/store/other"),
        ("option.model_id", "draft", "{home}/store/model/draft"),
        ("option.model_id", "../other", "{home}/store/other"),
        ("option.speculative_draft_model", "[ngram]", "[ngram]"),
        ("option.speculative_draft_model", "draft", "{home}/store/model/draft"),
        ("option.adapters", "adapters", "{home}/store/model/adapters"),
        ("option.chat_template", "{{ messages }}/x", "{{ messages }}/x"),
        ("option.entryPoint", "djl_python.huggingface", "djl_python.huggingface"),
        ("option.entryPoint", "model.py", "model.py"),
        ("option.entryPoint", " model.py\n", "model.py"),
        ("option.model_id", " draft ", "{home}/store/model/draft"),
        ("option.entryPoint", "code.handle", "code.handle"),
        ("option.entryPoint", "{home}/store/model/code.py", "{home}/store/model/code.py"),
        ("option.pythonExecutable", "python3", "python3"),
        ("option.dtype", "fp16", "fp16"),
        ("option.stop_sequence", '["</s>", "owner/model"]', '["</s>", "owner/model"]'),
        ("option.served_model_name", "owner/name", "owner/name"),
        ("option.device_map", '{"model.layers": "cpu"}', '{"model.layers": "cpu"}'),
        ("option.limit_mm_per_prompt", "image=2", "image=2"),
        ("option.speculative_config", '{"method": "ngram", "num": 3}', '{"method":"ngram","num":3}'),
        ("option.speculative_config", '{"model":"draft"}', '{"model":"{home}/store/model/draft"}'),
        ("option.speculative_config", '{"model":"ngram"}', '{"model":"ngram"}'),
        ("option.kv_transfer_config", '{"kv_connector":"A","kv_role":"kv_both"}', None),
        ("option.block_size", "16", "16"),
        ("option.threshold", "-0.5", "-0.5"),
        ("option.enable_sleep_mode", "True", "True"),
        ("option.model_id", "", ""),
        ("batch_size", "4", "4"),
        ("load_on_devices", "gpu0", "gpu0"),
    ],
)
def test_an_option_may_name_what_is_in_the_store(home: Path, key: str, value: str, used: str | None) -> None:
    assert checked(home, key, value) == (value if used is None else used.replace("{home}", str(home)))


def test_listed_places_hold_for_options_too(home: Path) -> None:
    sources = (str(home / "store"), "owner/", "s3://bucket/models")
    for key in ("option.model_id", "option.tokenizer", "option.speculative_draft_model"):
        for value in ("owner/model", "s3://bucket/models/a"):
            assert checked(home, key, value, *sources) == value
        for value in ("other/model", "s3://bucket/others"):
            with refusal():
                checked(home, key, value, *sources)
    given = json.dumps({"model": "owner/draft"})
    assert json.loads(checked(home, "option.speculative_config", given, *sources)) == {"model": "owner/draft"}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("option.entryPoint", "model.py", True),
        ("option.entryPoint", "../model.py", False),
        ("option.entryPoint", "a.b", False),
        ("option.chat_template", "t.jinja", True),
        ("option.chat_template", "~/t.jinja", False),
        ("option.chat_template", "a/../../t.jinja", False),
        ("option.chat_template", "/etc/passwd", False),
        ("option.model_id", "gpt2", False),
        ("option.model_id", "owner/model", False),
    ],
)
def test_options_of_a_model_that_is_still_to_be_fetched_stay_inside_of_it(
    home: Path, key: str, value: str, allowed: bool
) -> None:
    model = ModelSource("s3://bucket/model", "m", settings={key: value})
    with contextlib.nullcontext() if allowed else refusal():
        assert limits(home, "s3://bucket/").check_model(model, FAR) == model


def test_a_directory_with_an_archive_is_a_model_that_is_still_to_be_unpacked(home: Path) -> None:
    url = home / "store" / "packed"
    url.mkdir()
    (url / "model.tar.gz").write_bytes(b"")
    for value, allowed in (("t.jinja", True), ("../t.jinja", False), ("/etc/passwd", False)):
        model = ModelSource(str(url), "m", settings={"option.chat_template": value})
        with contextlib.nullcontext() if allowed else refusal():
            assert limits(home).check_model(model, FAR) == model


def test_a_store_is_a_directory_even_if_it_is_called_like_a_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    found = RegistrationLimits(ServerSettings(model_store="owner/model"), {})
    with refusal():
        found.check_model(ModelSource("owner/model", "m"), FAR)
    (home / "owner" / "model").mkdir(parents=True)
    assert found.check_model(ModelSource("owner/model", "m"), FAR).url == str(home / "owner" / "model")


# --- adapters ---


@pytest.mark.parametrize(
    "src",
    [
        *("s3://bucket/adapter", "owner/adapter", "gpt2", "https://host/adapter", "any:thing", "~/adapter"),
        *("file:{home}/elsewhere/adapter", "file://{home}/elsewhere/adapter", "{home}/elsewhere/adapter"),
        *("../../elsewhere/adapter", "out/adapter", "adapters/../../../elsewhere/adapter", "/", "."),
    ],
)
def test_an_adapter_is_of_the_store_whatever_its_source_looks_like(home: Path, src: str) -> None:
    model_dir = str(home / "store" / "model")
    if src == ".":
        assert limits(home).check_adapter(src, model_dir, FAR) == model_dir
        return
    with refusal():
        limits(home).check_adapter(src.replace("{home}", str(home)), model_dir, FAR)
    with refusal():
        limits(home, str(home / "store")).check_adapter(src.replace("{home}", str(home)), model_dir, NEAR)
    assert limits(home).check_adapter(src, model_dir, NEAR) == src


def test_a_directory_that_is_called_like_a_url_is_no_place_on_s3(home: Path) -> None:
    (home / "store" / "model" / "s3:" / "bucket").mkdir(parents=True)
    with refusal():
        limits(home).check_adapter("s3://bucket", str(home / "store" / "model"), FAR)


def test_an_adapter_may_come_from_the_model_the_store_and_listed_places(home: Path) -> None:
    model_dir = str(home / "store" / "model")
    own = os.path.join(model_dir, "adapters", "own")
    for src in ("adapters/own", own, f"file:{own}"):
        assert limits(home).check_adapter(src, model_dir, FAR) == own
    sources = ("owner/", "s3://bucket/adapters")
    for src in ("owner/adapter", "s3://bucket/adapters/a"):
        assert limits(home, *sources).check_adapter(src, model_dir, FAR) == src
    assert limits(home, *sources).check_adapter("adapters/own", model_dir, FAR) == own


@pytest.mark.slow
def test_adapters_of_other_machines_are_checked_when_they_are_registered_and_updated(tmp_path: Path) -> None:
    model = make_model(tmp_path / "store" / "model", enable_lora="true")
    outside = tmp_path / "outside"
    for directory in (model / "adapters" / "own", outside):
        directory.mkdir(parents=True)
    variables = {"SERVING_MANAGEMENT_CLIENTS": "any", "SERVING_MODEL_STORE": str(tmp_path / "store")}
    with running(model, variables=variables, workers=1) as server:
        for src in (f"file:{outside}", "s3://bucket/adapter", "owner/adapter"):
            for path in ("/models/model/adapters", "/models/model/adapters/own/update"):
                assert status(server, path, {"name": "a", "src": src}) == 403
        assert status(server, "/models/model/adapters", {"name": "b", "src": "adapters/own"}) == 200
        assert status(server, "/models/model/adapters/b/update", {"pin": "true"}) == 200


def status(server: Server, path: str, parameters: dict[str, str]) -> int:
    return server.http.post(path, params=parameters, headers=REMOTE).status_code
