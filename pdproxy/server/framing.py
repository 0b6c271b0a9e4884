"""Heads that two readers could understand in two ways. Pure."""

from collections.abc import Sequence

FRAMING = (b"content-length", b"transfer-encoding")


def ambiguous(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Why somebody else on the way may have understood a head differently; "" where nobody can have.

    Args:
        method: in upper case.
        version: of HTTP, such as "1.1".
        headers: names in lower case.
    """
    hosts, codings = 0, []
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if method == b"CONNECT":
        return "There are no tunnels here."
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not served here. Send HTTP/1.1."
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return "Send one Host header, and no more."
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return "The only Transfer-Encoding that is served here is chunked, with HTTP/1.1."
    return ""


def head_again(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A head that says of the body what ``headers`` say, and nothing else."""
    fields = (b"%b: %b\r\n" % field for field in headers if field[0] in FRAMING)
    return b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n" % b"".join(fields)
