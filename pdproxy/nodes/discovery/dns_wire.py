"""As much of DNS (RFC 1035, RFC 2782) as asking for SRV records needs: bytes in, bytes out."""

import dataclasses
import struct

from pdproxy.errors import PdproxyError

_SRV = 33
_IN = 1
_RECURSION_DESIRED = 0x0100
_TRUNCATED = 0x0200
_RESPONSE = 0x8000
_CODE = 0x000F
_HEAD = struct.Struct("!HHHHHH")
_RECORD = struct.Struct("!HHIH")
_SERVICE = struct.Struct("!HHH")
_POINTER = 0xC0
_MOST_JUMPS = 64


class BadAnswer(PdproxyError):
    """The server's answer cannot be used."""


class Truncated(BadAnswer):
    """The answer did not fit: ask again over TCP."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Service:
    """One SRV record."""

    priority: int
    host: str
    port: int


def question(name: str, number: int) -> bytes:
    """A query for the SRV records of ``name``; ``number`` (0 to 65535) is to come back in the answer.

    Raises:
        ValueError: ``name`` is no domain name.
    """
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".")]
    if not all(0 < len(label) < 64 for label in labels) or sum(len(label) + 1 for label in labels) > 254:
        raise ValueError(f"{name!r} is no domain name")
    asked = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return _HEAD.pack(number, _RECURSION_DESIRED, 1, 0, 0, 0) + asked + struct.pack("!HH", _SRV, _IN)


def services(answer: bytes, number: int) -> tuple[Service, ...]:
    """The services of the best (lowest) priority, sorted; empty when the name has none.

    Raises:
        Truncated: the answer was cut short.
        BadAnswer: it answers another question, reports a failure, or is malformed.
    """
    try:
        return _services(answer, number)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BadAnswer("the DNS answer is malformed") from error


def _services(answer: bytes, number: int) -> tuple[Service, ...]:
    seen, flags, questions, answers, _, _ = _HEAD.unpack_from(answer)
    if seen != number or not flags & _RESPONSE:
        raise BadAnswer("the DNS answer belongs to another question")
    if flags & _TRUNCATED:
        raise Truncated("the DNS answer was cut short")
    if flags & _CODE not in (0, 3):
        raise BadAnswer(f"the DNS server answers with code {flags & _CODE}")
    at = _HEAD.size
    for _ in range(questions):
        at = _name(answer, at)[1] + 4
    found = []
    for _ in range(answers):
        at = _name(answer, at)[1]
        kind, _, _, length = _RECORD.unpack_from(answer, at)
        at += _RECORD.size
        if kind == _SRV:
            found.append(_service(answer, at))
        at += length
    found = [service for service in found if service.host]  # RFC 2782: "." says that the service is not there
    best = min((service.priority for service in found), default=0)
    return tuple(sorted({service for service in found if service.priority == best}))


def _service(answer: bytes, at: int) -> Service:
    priority, _, port = _SERVICE.unpack_from(answer, at)
    return Service(priority, _name(answer, at + _SERVICE.size)[0], port)


def _name(answer: bytes, at: int) -> tuple[str, int]:
    """The name at this place, and where what follows it begins. Names may point back to earlier ones."""
    labels: list[str] = []
    end: int | None = None
    for _ in range(_MOST_JUMPS):
        length = answer[at]
        if length == 0:
            return ".".join(labels), end if end is not None else at + 1
        if length & _POINTER == _POINTER:
            end = end if end is not None else at + 2
            at = (length & ~_POINTER) << 8 | answer[at + 1]
            continue
        labels.append(answer[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    raise BadAnswer("a name in the DNS answer never ends")
