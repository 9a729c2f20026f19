"""Where a request came in: by host and port, and by the path of a Unix socket."""

from __future__ import annotations

import pytest

from frontend.http.listeners import Place, listen
from lmi_server.configuration.server_settings import ServerSettings


@pytest.mark.parametrize(
    ("place", "server", "accepted"),
    [
        (("127.0.0.1", 80), ("127.0.0.1", 80), True),
        (("127.0.0.1", 80), ("127.0.0.1", 81), False),
        (("127.0.0.1", 80), ("127.0.0.2", 80), False),
        (("127.0.0.1", 80), ("::ffff:127.0.0.1", 80), True),
        (("127.0.0.1", 80), ("::1", 80), False),
        (("0.0.0.0", 80), ("10.0.0.1", 80), True),
        (("0.0.0.0", 80), ("::1", 80), False),
        (("::", 80), ("2001:db8::1", 80), True),
        (("::", 80), ("127.0.0.1", 80), False),
        (("::1", 80), ("0:0:0:0:0:0:0:1", 80), True),
        (("fe80::1%eth0", 80), ("fe80::1%2", 80), True),
        (("127.0.0.1", 80), ("127.0.0.1", None), False),
        (("/run/a.sock", None), ("/run/a.sock", None), True),
        (("/run/a.sock", None), ("/run/b.sock", None), False),
        (("/run/a.sock", None), ("127.0.0.1", 80), False),
        (("127.0.0.1", 80), None, False),
        (("/run/a.sock", None), None, False),
    ],
)
def test_a_place_is_a_host_with_a_port(
    place: tuple[str, int | None], server: tuple[str, int | None] | None, accepted: bool
) -> None:
    assert Place(*place).accepts(server) is accepted


def test_two_addresses_with_one_port_are_two_places() -> None:
    first, second = listen(ServerSettings(host="127.0.0.1", port=0, management_host="127.0.0.2", management_port=0))
    third = None
    try:
        assert (first.place.host, second.place.host) == ("127.0.0.1", "127.0.0.2")
        settings = ServerSettings(host="127.0.0.1", port=second.place.port or 0)
        (third,) = listen(settings)
        assert third.place.port == second.place.port
        assert not second.place.accepts(third.socket.getsockname())
        assert second.place.accepts(second.socket.getsockname())
    finally:
        for listener in (first, second, third):
            if listener is not None:
                listener.close()
