from __future__ import annotations

import socket

import pytest

from lmi_server.machine.environment import safe_ports
from lmi_server.machine.ports import free_port


def test_a_free_port_is_one_of_those_that_sagemaker_allows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="SAGEMAKER_SAFE_PORT_RANGE"):
            free_port(safe_ports({"SAGEMAKER_SAFE_PORT_RANGE": f"{port}-{port}"}))
    assert free_port(safe_ports({"SAGEMAKER_SAFE_PORT_RANGE": "21000-21999"})) in range(21000, 22000)
    assert free_port(safe_ports({})) > 0


@pytest.mark.parametrize("text", ["21000", "2-1", "0-5", "1-65536", "a-b", "-1-5"])
def test_a_range_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed; allowed: two ports with a hyphen"):
        safe_ports({"SAGEMAKER_SAFE_PORT_RANGE": text})
