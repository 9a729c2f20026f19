from __future__ import annotations

from pathlib import Path

import pytest

from lmi_server.configuration.server_settings import find_config_file, model_defaults, resolve_server
from lmi_server.contract.errors import ConfigurationError


def config(directory: Path, *lines: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.properties"
    path.write_text("\n".join(lines))
    return path


def test_the_config_file_of_lmi_s_image(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "inference_address=http://0.0.0.0:8080",
        "management_address=http://0.0.0.0:8080",
        "model_store=/opt/ml/model",
        "load_models=ALL",
        "job_queue_size=50",
    )
    settings, warnings = resolve_server({}, {}, path)
    assert (settings.host, settings.port, settings.model_store) == ("0.0.0.0", 8080, "/opt/ml/model")
    assert (settings.management_host, settings.management_port, warnings) == (None, None, ())
    assert model_defaults(path) == {"SERVING_JOB_QUEUE_SIZE": "50"}


def test_the_command_line_is_above_the_environment_and_that_above_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "port=1", "drain_timeout=1", "log_level=debug")
    settings, _ = resolve_server({"SERVING_PORT": "2", "SERVING_DRAIN_TIMEOUT": "2"}, {"port": 3}, path)
    assert (settings.port, settings.drain_timeout, settings.log_level) == (3, 2.0, "debug")


def test_sagemaker_chooses_the_port(tmp_path: Path) -> None:
    path = config(tmp_path, "inference_address=http://0.0.0.0:8080")
    settings, warnings = resolve_server({"SAGEMAKER_BIND_TO_PORT": "9000", "SERVING_PORT": "8081"}, {}, path)
    assert (settings.host, settings.port, warnings) == ("0.0.0.0", 9000, ())


@pytest.mark.parametrize("management", ["http://127.0.0.1:8081", "http://127.0.0.1:8081/"])
def test_management_elsewhere(tmp_path: Path, management: str) -> None:
    path = config(tmp_path, "inference_address=http://0.0.0.0:8080", f"management_address={management}")
    settings, _ = resolve_server({}, {}, path)
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert (settings.management_host, settings.management_port) == ("127.0.0.1", 8081)


def test_an_address_that_cannot_be_read(tmp_path: Path) -> None:
    path = config(tmp_path, "# addresses", "inference_address=unix:tmp/s")
    with pytest.raises(ConfigurationError) as caught:
        resolve_server({"SERVING_MANAGEMENT_ADDRESS": "ftp://x"}, {}, path)
    environment, file = caught.value.message.splitlines()
    refused = "is not allowed; allowed: http://host:port, https://host:port or unix:/path"
    assert environment.endswith(f'"ftp://x" {refused}')
    assert file == f'{path}:2: inference_address = "unix:tmp/s" {refused}'


def test_values_with_line_ends_forge_no_lines(tmp_path: Path) -> None:
    path = config(tmp_path, r"inference_address=a\nb", r"port=c\nd", r"prot\ne=1")
    with pytest.raises(ConfigurationError) as refused:
        resolve_server({"SERVING_DRAIN_TIMEOUT": "e\nf"}, {}, path)
    assert len(refused.value.message.splitlines()) == 3
    _, warnings = resolve_server({}, {}, config(tmp_path, r"prot\ne=1"))
    assert [text for text in warnings if not text.isprintable()] == []


def test_a_warning_names_the_setting_nearest_to_an_unknown_one(tmp_path: Path) -> None:
    _, (warning,) = resolve_server({}, {}, config(tmp_path, "model_stor=/x"))
    assert "model_stor" in warning
    assert "did you mean model_store" in warning


def test_where_a_config_file_is_looked_for(tmp_path: Path) -> None:
    assert find_config_file({}, tmp_path) is None
    here = config(tmp_path)
    assert find_config_file({}, tmp_path) == here
    below = config(tmp_path / "conf")
    assert find_config_file({}, tmp_path) == below
    assert find_config_file({"MODEL_SERVER_HOME": str(tmp_path / "conf")}, Path("/")) == below


def test_a_key_of_lmi_without_effect_says_what_to_do(tmp_path: Path) -> None:
    settings, warnings = resolve_server({"SERVING_IO_RATIO": "1"}, {}, config(tmp_path, "wait_model_loading=false"))
    assert warnings == (
        "variable SERVING_IO_RATIO: io_ratio has no effect in this version: the server has one event loop",
    )
    assert settings.wait_model_loading is False


@pytest.mark.parametrize(
    ("variables", "logs"),
    [
        ({}, ()),
        ({"SERVING_LOG_DIR": "/logs"}, ("access", "model_metric", "server_metric")),
        ({"SERVING_LOG_DIR": "/logs", "SERVING_EXTRA_LOGS": "server_metric, access"}, ("server_metric", "access")),
        ({"DEFAULT_JVM_OPTS": "-Xmx1g -Dlog4j.configurationFile=/usr/local/conf/log4j2-access.xml"}, ("access",)),
        (
            {"JAVA_OPTS": "-Dlog4j2.configurationFile=/conf/log4j2-console.xml"},
            ("access", "model_metric", "server_metric"),
        ),
        (
            {"JAVA_OPTS": "-Dlog4j2.configurationFile=/c/log4j2-console.xml", "SERVING_EXTRA_LOGS": "access"},
            ("access",),
        ),
    ],
)
def test_which_of_lmi_s_logs_are_written(variables: dict[str, str], logs: tuple[str, ...]) -> None:
    settings, warnings = resolve_server(variables, {})
    assert (settings.written_logs, warnings) == (logs, ())


def test_a_log_that_lmi_does_not_have() -> None:
    with pytest.raises(ConfigurationError, match=r'extra_logs = "acces".*access, model_metric, server_metric'):
        resolve_server({"SERVING_EXTRA_LOGS": "acces"}, {})


def test_what_kubernetes_says_of_a_service_is_no_setting() -> None:
    variables = {
        "SERVING_PORT": "tcp://10.0.0.1:80",
        "SERVING_SERVICE_HOST": "10.0.0.1",
        "SERVING_SERVICE_PORT": "80",
        "SERVING_SERVICE_PORT_HTTP": "80",
        "SERVING_PORT_80_TCP": "tcp://10.0.0.1:80",
        "SERVING_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    settings, warnings = resolve_server(variables, {})
    assert (settings.port, warnings) == (8080, ())


@pytest.mark.parametrize(
    ("text", "rate"), [("10/PT5M", (10, 300.0)), ("3", (3, 60.0)), ("1/P1DT1H", (1, 90000.0)), ("0/pt2s", (0, 2.0))]
)
def test_limits_on_errors(text: str, rate: tuple[int, float]) -> None:
    settings, warnings = resolve_server({"SERVING_ERROR_RATE_ANY": text}, {})
    assert (settings.error_rates, warnings) == ({"any": rate}, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("error_rate_any", "often"),
        ("error_rate_wlm", "1/5M"),
        ("cors_allowed_origin", "a\nb"),
        ("allowed_hosts", "https://models.example.com"),
        ("allowed_hosts", "a.example.com,models.example.com:8443"),
        ("model_url_pattern", "("),
        ("wlm_error_http_code", "200"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f'{key} = "'):
        resolve_server({f"SERVING_{key.upper()}": value}, {})
