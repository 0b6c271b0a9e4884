"""Every way in which hand-overs do not happen ends in a sentence with the cause and what to change."""

import pytest

from pdproxy.nodes.no_hand_over import SideChannel, Told, change_of, is_elsewhere, read_told, sentence
from pdproxy.nodes.node import Node, Role

FAR = SideChannel("10.0.0.1", 5600)
HERE = SideChannel("127.0.0.1", 5600)


def pair(prefill: str = "http://10.0.0.1:8100", decode: str = "http://10.0.0.2:8200") -> tuple[Node, Node]:
    return Node("prefill-0", prefill, (Role.PREFILL,)), Node("decode-0", decode, (Role.DECODE,))


@pytest.mark.parametrize(
    ("cause", "why", "said"),
    [
        ("peer_unreachable", "[Errno 111] Connection refused", "nothing listens there: set prefill-0's NODE_ADDRESS"),
        ("peer_unreachable", "no answer within 5 s", "let decode-0's host reach that address and port (firewall,"),
        ("peer_unreachable", "[Errno 113] No route to host", "(firewall, security group, network policy, route)"),
        ("peer_unreachable", "another engine answers there (another_engine): …", "give each host its own NODE_ADDRESS"),
        ("peer_unreachable", "it refused (unsigned): give both nodes the same ticket keys", "the same ticket keys"),
        ("peer_unreachable", "what answers there is no side channel (greeting)", "another program listens there"),
        ("peer_unreachable", "NIXL_ERR_BACKEND", "its side channel answers, and UCX finds no way: let UCX connect"),
        ("no_progress", "", "no bytes come to its reads: let UCX connect the two hosts on any port"),
        ("transfer_failed", "", "its reads fail: let UCX connect"),
        ("unverified", "", "does not tell decode-0 in time whether it still held what was read"),
        ("not_held", "", "raise kv_lease_duration (LEASE_SECONDS)"),
        ("incompatible", "NIXL compatibility hash mismatch", "(NIXL compatibility hash mismatch): both need one vLLM"),
        ("unsigned", "", "give both the same (PDPROXY_TICKET_KEYS or pdproxy_key_file)"),
        ("bad_signature", "", "give both the same (PDPROXY_TICKET_KEYS or pdproxy_key_file)"),
        ("host", "", "from prefill-0 at 10.0.0.1:5600: add that host to its pdproxy_allowed_hosts"),
        ("fingerprint", "checkpoint", "the tickets of prefill-0 (fingerprint) (checkpoint): pdproxy check"),
        ("digest", "", "the same --tokenizer and --chat-template"),
        ("number", "", "the same --prefix-match-unit"),
        ("missing_field", "", "are not of pdproxy's connector"),
        ("unknown_version", "", "different releases of pdproxy's connector"),
        ("wrong_role", "", "start it with kv_role kv_consumer"),
        ("", "", "itself though it had a ticket of prefill-0, to be read at 10.0.0.1:5600"),
    ],
)
def test_each_cause_has_its_sentence(cause: str, why: str, said: str) -> None:
    told = sentence(*pair(), FAR, Told(cause, why))
    assert said in told
    assert "prefill-0" in told
    assert "decode-0" in told or cause == "missing_field"
    assert "{" not in told


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "0.0.0.0", "::1", "::"])
@pytest.mark.parametrize("cause", ["", "peer_unreachable"])
def test_a_forgotten_address_is_named(host: str, cause: str) -> None:
    at = SideChannel(host, 5600)
    told = sentence(*pair(), at, Told(cause))
    assert told.startswith(f"decode-0 cannot reach prefill-0 at {at}: set NODE_ADDRESS on prefill-0's host")


@pytest.mark.parametrize(
    ("at", "cause", "why", "change"),
    [
        (HERE, "peer_unreachable", "[Errno 111] Connection refused", "and restart prefill-0"),
        (FAR, "peer_unreachable", "NIXL: no way", "let decode-0's host reach that address and port (firewall,"),
        (FAR, "no_progress", "", "let UCX connect the two hosts on any port (or on those of UCX_TCP_PORT_RANGE)"),
        (FAR, "unsigned", "", "give both the same (PDPROXY_TICKET_KEYS or pdproxy_key_file)"),
        (FAR, "fingerprint", "checkpoint", ""),
        (FAR, "", "", ""),
    ],
)
def test_what_to_change_is_told_apart_from_why(at: SideChannel, cause: str, why: str, change: str) -> None:
    found = change_of(sentence(*pair(), at, Told(cause, why)))
    assert change in found
    assert bool(found) == bool(change)
    assert "Errno" not in found


def test_on_one_host_such_an_address_is_right() -> None:
    one = pair("http://10.0.0.1:8100", "http://10.0.0.1:8200")
    assert "nothing listens there" in sentence(*one, HERE, Told("peer_unreachable", "Connection refused"))
    assert "its log says why" in sentence(*one, HERE, Told())


def test_reports_of_any_form_are_read() -> None:
    assert read_told({"kv_transfer_params": {"pdproxy_read": {"cause": "digest", "why": "w"}}}) == Told("digest", "w")
    odd: list[object] = [None, 7, [], {}, {"pdproxy_read": 1}, {"pdproxy_read": {"cause": 1, "why": []}}]
    for params in odd:
        assert read_told({"kv_transfer_params": params}) == Told()
    assert read_told({}) == Told()


def test_addresses_of_tickets_and_labels() -> None:
    assert SideChannel.of_ticket({"remote_host": "10.0.0.1", "remote_port": 5600}) == FAR
    assert SideChannel.of_ticket({"remote_host": 1, "remote_port": True}) == SideChannel()
    assert str(SideChannel.of_label("[::1]:5600")) == "[::1]:5600"
    assert SideChannel.of_label("[::1]:5600").is_own_host()
    assert SideChannel.of_label("junk") == SideChannel()
    assert not SideChannel().is_own_host()
    assert not FAR.is_own_host()
    assert not SideChannel.of_label("node.example:5600").is_own_host()


def test_names_of_nodes_are_not_judged() -> None:
    """A name may lead to its own host, or to another."""
    assert is_elsewhere(pair()[0])
    assert not is_elsewhere(pair("http://prefill:8100")[0])
    assert not is_elsewhere(pair("http://127.0.0.1:8100")[0])
