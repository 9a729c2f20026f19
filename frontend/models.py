"""The models that a front end serves, by every name under which requests may ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lmi_server.errors import ModelNotFoundError, RequestError
from lmi_server.worker_pool import WorkerPool


class MissingModelError(RequestError):
    """The request does not say which of several models it is for; LMI's status is 400."""


class _NamedModel(msgspec.Struct):
    model: str | None = None


_BOM = b"\xef\xbb\xbf"
_decode_model = msgspec.json.Decoder(_NamedModel).decode


class ServedModels:
    """`names` are those of each pool's model, its own first. Raises ValueError where two models share a name."""

    def __init__(self, models: Sequence[tuple[WorkerPool, Sequence[str]]]) -> None:
        self.pools = [pool for pool, _ in models]
        self._by_name: dict[str, WorkerPool] = {}
        for pool, names in models:
            for name in names:
                if name in self._by_name:
                    raise ValueError(f"two models are named {name!r}; rename one of their directories")
                self._by_name[name] = pool
        self.only = self.pools[0] if len(self.pools) == 1 else None

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def named(self, name: str) -> WorkerPool:
        """Return the pool of the model `name`. Raises ModelNotFoundError."""
        pool = self._by_name.get(name)
        if pool is None:
            raise ModelNotFoundError(f"Model or workflow not found: {name}")
        return pool

    def named_in(self, body: bytes) -> WorkerPool:
        """Return the pool of the model that an OpenAI request names in its body.

        Raises ModelNotFoundError, MissingModelError where it names none, RequestError where it cannot be read.
        """
        try:
            name = _decode_model(body.removeprefix(_BOM)).model
        except RecursionError:
            raise RequestError("the body is nested too deeply; send a flat JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            name = None
        if name is None:
            raise MissingModelError("Parameter model_name is required.")
        return self.named(name)
