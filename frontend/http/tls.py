"""TLS for the front end: the certificate that the settings name, and again when its files have changed.

A new certificate is for new connections; the others keep theirs. So a renewed certificate needs no restart.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from frontend.http.watched_files import WatchedFiles
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

logger = logging.getLogger(__name__)

_NO_CERTIFICATE = (
    "an https address needs a certificate; set certificate_file and private_key_file, or keystore with keystore_pass"
)
_NO_CRYPTOGRAPHY = "needs the package cryptography; install lmi-server[tls], or use certificate_file with PEM files"


class Certificate:
    """The certificate of the server. Raises ConfigurationError if it cannot be used."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._files = _files(settings)
        self._watched = WatchedFiles(self._files)
        self._current = self._load()
        # Listeners keep this context. Each handshake continues with the current one, whatever kind of key that has.
        self.context = self._load()
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    async def watch(self) -> None:
        """Load the certificate again whenever its files change; one that cannot be used is reported and left out."""
        while True:
            await self._watched.wait_for_change()
            try:
                self._current = self._load()
                logger.info("the certificate was loaded again from %s", ", ".join(self._files))
            except ConfigurationError as error:
                logger.error("%s; new connections get the certificate from before", error)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        password = self._settings.keystore_pass
        try:
            if self._settings.keystore is None:
                certificate, key = self._files
                context.load_cert_chain(certificate, key, password=lambda: password)
            else:
                with _in_memory(_pem_of_pkcs12(self._settings.keystore, password)) as path:
                    context.load_cert_chain(path)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(f"{', '.join(self._files)}: no certificate can be loaded: {error}") from error
        return context


def names_certificate(settings: ServerSettings) -> bool:
    """Return whether a setting names a certificate or a key."""
    return any((settings.certificate_file, settings.private_key_file, settings.keystore))


def _files(settings: ServerSettings) -> Sequence[str]:
    if settings.keystore is not None:
        if settings.keystore_type.upper() != "PKCS12":
            raise ConfigurationError(
                f'keystore_type = "{settings.keystore_type}" is not available; allowed: PKCS12; convert the file with '
                "keytool -importkeystore -deststoretype PKCS12"
            )
        return (settings.keystore,)
    if settings.certificate_file is None or settings.private_key_file is None:
        raise ConfigurationError(_NO_CERTIFICATE)
    return settings.certificate_file, settings.private_key_file


def _pem_of_pkcs12(file: str, password: str) -> bytes:
    """Return key, certificate and chain of a keystore as PEM."""
    try:
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, pkcs12
    except ImportError as error:
        raise ConfigurationError(f'keystore = "{file}" {_NO_CRYPTOGRAPHY}') from error
    with open(file, "rb") as opened:
        key, certificate, chain = pkcs12.load_key_and_certificates(opened.read(), password.encode())
    if key is None or certificate is None:
        raise ValueError("it holds no key with a certificate")
    parts = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())]
    return b"".join([*parts, *(each.public_bytes(Encoding.PEM) for each in (certificate, *chain))])


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield the path of a file that is in memory alone: OpenSSL reads keys from files, and a disk should hold none."""
    fd = os.memfd_create("certificate")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
