"""The TLS context that all clients of the tests share: one for each set of authorities."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import ModuleType

import certifi
import pytest
import shared_certificates

_END = "-----END CERTIFICATE-----\n"


@pytest.fixture(params=["httpx", "httpx2"])
def httpx(request: pytest.FixtureRequest) -> ModuleType:
    """Return each of the libraries of clients. Those of OpenAI and Anthropic bring the second."""
    library: ModuleType = pytest.importorskip(request.param)
    shared_certificates.share()
    return library


def test_clients_share_a_context_wherever_the_authorities_are(
    httpx: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few = tmp_path / "few.pem"
    few.write_text(Path(certifi.where()).read_text().partition(_END)[0] + _END)
    made = {}
    for name, authorities in (("usual", None), ("few", str(few)), ("all", certifi.where())):
        monkeypatch.delenv("SSL_CERT_DIR", raising=False)
        if authorities is None:
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        else:
            monkeypatch.setenv("SSL_CERT_FILE", authorities)
        made[name] = context(httpx)
        assert context(httpx) is made[name]
    assert len(set(map(id, made.values()))) == 3
    assert len(made["few"].get_ca_certs()) == 1 < len(made["all"].get_ca_certs())


def test_a_client_that_trusts_no_variable_has_the_usual_authorities(
    httpx: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        context(httpx)
    assert context(httpx, trust_env=False).get_ca_certs()


def test_a_client_that_verifies_nothing_shares_no_context(httpx: ModuleType) -> None:
    assert context(httpx, verify=False).verify_mode == ssl.CERT_NONE
    assert context(httpx).verify_mode == ssl.CERT_REQUIRED


def context(httpx: ModuleType, **given: bool) -> ssl.SSLContext:
    """Return the context of a new client."""
    with httpx.Client(**given) as client:
        transport = client._transport
        assert isinstance(transport, httpx.HTTPTransport)
        found = transport._pool._ssl_context
    assert isinstance(found, ssl.SSLContext)
    return found
