"""Ports: free ones are different and usable; a taken one is named."""

import socket

import pytest

from deploy.local.ports import HOST, LOWEST, PortTakenError, bind, end_of_ours, free_ports, free_row, require_free


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        require_free(port, "test", "never mind")


def test_a_row_is_in_a_row_and_free() -> None:
    row = free_row(6)
    assert row == list(range(row[0], row[0] + 6))
    assert all(LOWEST <= port < end_of_ours() for port in row)
    for port in row:
        require_free(port, "test", "never mind")


def test_free_ports_are_none_that_an_outgoing_connection_might_get() -> None:
    assert LOWEST < end_of_ours() <= 65535
    assert all(LOWEST <= port < end_of_ours() for port in free_ports(20))


def test_a_taken_port_is_named_with_its_purpose_and_what_follows() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} \(side channel\) is in use .* would hang"):
            require_free(port, "side channel", "it would hang")


def test_a_port_is_free_again_after_its_holder_closed() -> None:
    holder = bind(0)
    port = holder.getsockname()[1]
    holder.listen()
    with pytest.raises(PortTakenError):
        require_free(port, "test", "never mind")
    holder.close()
    require_free(port, "test", "never mind")
