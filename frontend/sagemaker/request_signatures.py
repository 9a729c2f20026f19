"""Checks the signatures of Amazon's SDKs (Signature Version 4), as strictly as a real endpoint.

botocore computes the signature that a request should have. The refusals are those of "Common error types" in Amazon's
reference of the SageMaker Runtime API. A session token is a signed header like others: only Amazon can read it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from calendar import timegm
from collections.abc import Mapping
from typing import Any, NamedTuple

from frontend.http.clients import Receive, Scope
from lmi_server.contract.errors import AuthenticationError, ConfigurationError, PayloadTooLargeError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS

SERVICE = "sagemaker"  # sagemaker-runtime is a part of it

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/(\d{8})/([^/,\s]+)/([^/,\s]+)/aws4_request, ?"
    r"SignedHeaders=([^,\s]+), ?Signature=([0-9a-f]{64})"
)
_DATE = "%Y%m%dT%H%M%SZ"
_TOLERANCE_S = 300
_PAYLOAD_HASH = "x-amz-content-sha256"
_MUST_BE_SIGNED = re.compile(r"host|x-amz-.*|x-amzn-sagemaker-.*")


class SignatureRefusedError(AuthenticationError):
    """The request has no signature that is accepted; `error_type` is its name with Amazon."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.error_type = kind


class _Signature(NamedTuple):
    """What the header Authorization holds, in its order."""

    key: str
    day: str
    region: str
    service: str
    signed: str
    signature: str


class SignatureCheck:
    """The keys of a server with the setting `sigv4_keys`. Raises ConfigurationError if they cannot be read."""

    def __init__(self, keys: str, region: str, max_size: int) -> None:
        self._region = region
        self._max_size = max_size
        self._signers = _signers(keys, region)

    async def __call__(self, scope: Scope, receive: Receive) -> Receive:
        """Return a function that receives the request again, whose body was read for its signature.

        Raises SignatureRefusedError, and PayloadTooLargeError.
        """
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        named = dict(headers)
        signature = self._read(named)
        messages = await self._messages(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        self._check_body(body, named.get(_PAYLOAD_HASH))
        names = set(signature.signed.split(";"))
        signed = [pair for pair in headers if pair[0] in names]
        if not hmac.compare_digest(self._expected_signature(signature, scope, signed, body), signature.signature):
            raise _invalid("the signature is not the one that the secret key of sigv4_keys makes of this request")

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        return again

    def _read(self, headers: Mapping[str, str]) -> _Signature:
        given = headers.get("authorization", "")
        if not given.startswith("AWS4-"):
            raise SignatureRefusedError("MissingAuthenticationTokenException", "the request has no signature (SigV4)")
        found = _AUTHORIZATION.fullmatch(given)
        if found is None:
            raise SignatureRefusedError("IncompleteSignatureException", "Authorization is not in the form of SigV4")
        signature = _Signature(*found.groups())
        if signature.key not in self._signers:
            raise SignatureRefusedError("UnrecognizedClientException", "the access key is not one of sigv4_keys")
        if (signature.region, signature.service) != (self._region, SERVICE):
            raise _invalid(
                f"the signature is for {excerpt(signature.service)} in {excerpt(signature.region)}, "
                f"and this endpoint is {SERVICE} in {self._region} (sigv4_region)"
            )
        _check_date(headers.get("x-amz-date", ""), signature.day)
        unsigned = {name for name in headers if _MUST_BE_SIGNED.fullmatch(name)} - {*signature.signed.split(";")}
        if unsigned:
            raise _invalid(f"these headers must be signed, too: {excerpt(', '.join(sorted(unsigned)))}")
        return signature

    async def _messages(self, receive: Receive) -> list[Any]:
        """Return the messages with the body, or those before the client went away."""
        messages: list[Any] = []
        size = 0
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            if size > self._max_size:
                raise PayloadTooLargeError(
                    f"the body is longer than max_request_size={self._max_size} bytes; send less, or raise it"
                )
        return messages

    def _check_body(self, body: bytes, stated: str | None) -> None:
        """Refuse a body other than the signed one, or without a signature."""
        if stated is not None and not hmac.compare_digest(stated, hashlib.sha256(body).hexdigest()):
            raise _invalid(f"{_PAYLOAD_HASH} is not the SHA-256 of the body; a body must be signed, and as a whole")

    def _expected_signature(
        self, signature: _Signature, scope: Scope, signed: list[tuple[str, str]], body: bytes
    ) -> str:
        from botocore.awsrequest import AWSRequest

        path = scope["raw_path"].decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        # Over http botocore signs every body.
        request = AWSRequest(scope["method"], f"http://host{path}{'?' if query else ''}{query}", data=body)
        for name, value in signed:
            request.headers.add_header(name, value)
        request.context["timestamp"] = dict(signed)["x-amz-date"]
        signer = self._signers[signature.key]
        return str(signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request))


def _signers(keys: str, region: str) -> dict[str, Any]:
    try:
        from botocore.auth import SigV4Auth
        from botocore.credentials import Credentials
    except ImportError as error:
        raise ConfigurationError(f'sigv4_keys needs boto3 ({error}); pip install "lmi-server[s3]"') from error
    signers = {}
    for number, entry in enumerate(keys.split(","), start=1):
        key, _, secret = entry.strip().partition(":")
        if not key or not secret:
            raise ConfigurationError(f"sigv4_keys: entry {number} is not allowed; allowed: ACCESS_KEY_ID:SECRET_KEY")
        SECRETS.add(secret)
        signers[key] = SigV4Auth(Credentials(key, secret), SERVICE, region)
    return signers


def _check_date(text: str, day: str) -> None:
    try:
        signed_at = timegm(time.strptime(text, _DATE))
    except ValueError:
        raise SignatureRefusedError("IncompleteSignatureException", "x-amz-date is not YYYYMMDD'T'HHMMSS'Z'") from None
    if not text.startswith(day):
        raise _invalid("the dates of x-amz-date and of Credential differ")
    if abs(time.time() - signed_at) > _TOLERANCE_S:
        raise _invalid(f"the signature is of {text}, and more than {_TOLERANCE_S} seconds from the time of the server")


def _invalid(message: str) -> SignatureRefusedError:
    return SignatureRefusedError("InvalidSignatureException", message)
