"""The TLS context that all clients of the tests share: one for each set of authorities."""

from __future__ import annotations

import ssl
from pathlib import Path

import certifi
import httpx
import pytest
import shared_certificates

_END = "-----END CERTIFICATE-----\n"


@pytest.fixture(autouse=True)
def shared() -> None:
    shared_certificates.share()


def test_clients_share_a_context_wherever_the_authorities_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = tmp_path / "few.pem"
    few.write_text(Path(certifi.where()).read_text().partition(_END)[0] + _END)
    made = {}
    for name, authorities in (("usual", None), ("few", str(few)), ("all", certifi.where())):
        monkeypatch.delenv("SSL_CERT_DIR", raising=False)
        if authorities is None:
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        else:
            monkeypatch.setenv("SSL_CERT_FILE", authorities)
        made[name] = context()
        assert context() is made[name]
    assert len(set(map(id, made.values()))) == 3
    assert len(made["few"].get_ca_certs()) == 1 < len(made["all"].get_ca_certs())


def test_a_client_that_trusts_no_variable_has_the_usual_authorities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        context()
    assert context(trust_env=False).get_ca_certs()


def test_a_client_that_verifies_nothing_shares_no_context() -> None:
    assert context(verify=False).verify_mode == ssl.CERT_NONE
    assert context().verify_mode == ssl.CERT_REQUIRED


def context(**given: bool) -> ssl.SSLContext:
    """Return the context of a new client of httpx."""
    with httpx.Client(**given) as client:
        transport = client._transport
        assert isinstance(transport, httpx.HTTPTransport)
        found = transport._pool._ssl_context
    assert isinstance(found, ssl.SSLContext)
    return found
