"""TLS with certificates in PEM and PKCS#12 that change while the server runs, and Unix sockets."""

from __future__ import annotations

import datetime
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from paths import TESTS
from server_helpers import Server, make_model, raw_request, request, running
from waiting import wait_until

from frontend.http.listeners import listen
from frontend.http.tls import Certificate
from lmi_server.configuration.server_settings import ServerSettings, resolve_server
from lmi_server.contract.errors import ConfigurationError

pytest.importorskip("cryptography")


def write_certificate(directory: Path, name: str = "server", elliptic: bool = False) -> None:
    """Write NAME.pem, NAME.key and NAME.p12 (password "secret word") of a new self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        pkcs12,
    )

    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    key = ec.generate_private_key(ec.SECP256R1()) if elliptic else rsa.generate_private_key(65537, 2048)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=subject, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (directory / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (directory / f"{name}.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    encryption = BestAvailableEncryption(b"secret word")
    (directory / f"{name}.p12").write_bytes(
        pkcs12.serialize_key_and_certificates(b"one", key, certificate, None, encryption)
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    write_certificate(directory)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    """Serve requests with TLS, and management without it on another port."""
    variables = {
        "SERVING_TLS": "true",
        "SERVING_MANAGEMENT_TLS": "false",
        "SERVING_MANAGEMENT_PORT": "0",
        "SERVING_MAX_UNREAD_SIZE": str(8 << 20),
        "SERVING_CERTIFICATE_FILE": str(directory / "server.pem"),
        "SERVING_PRIVATE_KEY_FILE": str(directory / "server.key"),
    }
    with running(make_model(directory / "model"), variables=variables, workers=1) as server:
        yield server


def port_of(server: Server) -> int:
    found = re.search(r"listening on https://127\.0\.0\.1:(\d+)", "".join(server.lines))
    assert found is not None
    return int(found[1])


def client(server: Server, directory: Path) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(directory / "server.pem"))
    return httpx.Client(base_url=f"https://localhost:{port_of(server)}", verify=context)


def handshake(server: Server, version: ssl.TLSVersion) -> tuple[str | None, bytes | None]:
    """Return the version that was agreed upon, and the certificate of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    with socket.create_connection(("127.0.0.1", port_of(server))) as plain, context.wrap_socket(plain) as secured:
        return secured.version(), secured.getpeercert(binary_form=True)


def test_requests_and_streams_go_over_tls(server: Server, directory: Path) -> None:
    with client(server, directory) as http:
        assert http.get("/ping").status_code == 200
        assert http.post("/invocations", json=request("a b")).json() == {"generated_text": " a b a"}
        stream = http.post("/invocations", json=request("a", 500, stream=True)).text
        assert stream.count('"token"') == 500
        assert http.post("/invocations", json=request("x" * 3_000_000, 1)).status_code == 200
        assert http.get("/models").status_code == 404, "models are managed on the other port"
    assert server.http.get("/models").status_code == 200


def test_what_waits_below_tls_counts_as_unread(server: Server) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port_of(server))) as plain, context.wrap_socket(plain) as secured:
        secured.sendall(raw_request("x" * 50_000, 210))
        server.log_line("more than max_unread_size=8388608; the connection of one with 1")


def test_tls_1_2_and_1_3_are_spoken_and_nothing_older(server: Server) -> None:
    assert handshake(server, ssl.TLSVersion.TLSv1_2)[0] == "TLSv1.2"
    assert handshake(server, ssl.TLSVersion.TLSv1_3)[0] == "TLSv1.3"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises(ssl.SSLError):
        handshake(server, ssl.TLSVersion.TLSv1_1)


def test_plain_http_on_the_port_of_tls_disturbs_nobody(server: Server, directory: Path) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port_of(server)}/ping")
    with client(server, directory) as http:
        assert http.get("/ping").status_code == 200
    assert not any("Traceback" in line for line in server.lines)


def test_a_new_certificate_is_used_without_a_restart(server: Server, directory: Path) -> None:
    with client(server, directory) as http:
        http.get("/ping")
        before = handshake(server, ssl.TLSVersion.TLSv1_3)[1]
        (directory / "server.pem").write_text("no certificate")
        server.log_line("no certificate can be loaded.*new connections get the certificate from before")
        assert handshake(server, ssl.TLSVersion.TLSv1_3)[1] == before
        write_certificate(directory, elliptic=True)
        wait_until(lambda: handshake(server, ssl.TLSVersion.TLSv1_3)[1] != before, "the new certificate is used")
        assert handshake(server, ssl.TLSVersion.TLSv1_2)[1] != before
        assert http.get("/ping").status_code == 200, "the connection from before is still open"
    with client(server, directory) as http:
        assert http.get("/ping").status_code == 200


def test_a_keystore_in_pkcs12_is_read(directory: Path) -> None:
    write_certificate(directory, "store")
    settings = ServerSettings(keystore=str(directory / "store.p12"), keystore_pass="secret word")
    assert Certificate(settings).context.cert_store_stats() is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set certificate_file and private_key_file, or keystore"),
        ({"certificate_file": "server.pem"}, "private_key_file"),
        ({"certificate_file": "server.pem", "private_key_file": "nowhere"}, "no certificate can be loaded"),
        ({"certificate_file": "server.pem", "private_key_file": "server.pem"}, "no certificate can be loaded"),
        ({"keystore": "server.p12", "keystore_pass": "wrong"}, "no certificate can be loaded"),
        ({"keystore": "server.p12", "keystore_type": "JKS"}, "allowed: PKCS12"),
        ({"keystore": "server.pem"}, "no certificate can be loaded"),
    ],
)
def test_what_is_no_certificate_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(directory)
    with pytest.raises(ConfigurationError, match=message):
        Certificate(ServerSettings(**settings))  # type: ignore[arg-type]


def test_lmis_addresses(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text(
        "inference_address=https://0.0.0.0:8443\nmanagement_address=unix:/run/lmi.sock\nprivate_key_file=a.key\n"
    )
    settings, warnings = resolve_server({}, {}, tmp_path / "config.properties")
    assert (settings.host, settings.port, settings.tls, settings.management_host, warnings) == (
        "0.0.0.0",
        8443,
        True,
        "unix:/run/lmi.sock",
        (),
    )
    assert resolve_server({"SERVING_INFERENCE_ADDRESS": "https://localhost"}, {})[0].port == 443
    assert resolve_server({"SERVING_INFERENCE_ADDRESS": "http://[::1]:80"}, {})[0].host == "::1"
    with pytest.raises(ConfigurationError, match="unix:/path"):
        resolve_server({"SERVING_INFERENCE_ADDRESS": "ftp://localhost"}, {})


def test_models_are_managed_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "manage.sock"
    variables = {"SERVING_MANAGEMENT_HOST": f"unix:{path}", "SERVING_UNIX_SOCKET_MODE": "660"}
    with running(make_model(tmp_path / "model"), variables=variables) as server:
        server.log_line(f"listening on unix:{path} for management")
        server.log_line(r"\] ready: process")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        with httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path))) as http:
            assert [model["modelName"] for model in http.get("/models").json()["models"]] == ["model"]
            assert http.get("/ping").status_code == 200
        assert server.http.get("/models").status_code == 404
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    settings = ServerSettings(host=f"unix:{path}", unix_socket_mode="600")
    (first,) = listen(settings)
    with pytest.raises(ConfigurationError, match="cannot listen on unix:"):
        listen(settings)
    first.socket.close()
    (second,) = listen(settings)
    second.close()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot listen on unix:"):
        listen(settings)
    assert path.read_text() == "a file"


def health(directory: Path, **variables: str) -> int:
    """Return the exit code of the health check of the container images."""
    command = [sys.executable, "-m", "lmi_server.commands.health_check"]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)} | variables
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, check=False).returncode


@pytest.mark.slow
def test_the_health_check_speaks_tls(server: Server, directory: Path) -> None:
    port = str(port_of(server))
    assert health(directory, SERVING_PORT=port, SERVING_TLS="true") == 0
    assert health(directory, SERVING_PORT=port) == 1


@pytest.mark.slow
def test_the_health_check_asks_a_unix_socket(tmp_path: Path) -> None:
    address = {"SERVING_HOST": f"unix:{tmp_path / 'socket'}"}
    managed = {"SERVING_MANAGEMENT_HOST": "127.0.0.1", "SERVING_MANAGEMENT_PORT": "0"}
    with running(make_model(tmp_path / "model"), variables=address | managed):
        wait_until(lambda: health(tmp_path, **address) == 0, "the server is healthy")
