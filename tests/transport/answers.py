"""Responses as bytes: well formed, odd, and broken."""

import dataclasses

from hypothesis import strategies as st

METHODS = st.sampled_from(["GET", "GET", "POST", "HEAD"])
BODY = st.binary(max_size=40)
STATUS = st.sampled_from([200, 200, 200, 200, 204, 206, 304, 404, 429, 500, 503, 599])
VERSION = st.sampled_from(
    [b"HTTP/1.1"] * 12 + [b"HTTP/1.0", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1"]
)
REASON = st.sampled_from([b" OK"] * 6 + [b"", b" ", b" Too Many Requests", b" \xe9", b"  OK", b" \x01"])
FIELD = st.sampled_from(
    [
        b"X-A: 1",
        b"x-a:2",
        b"X-Empty:",
        b"X-Spaces:  \t a b \t ",
        b"X-Latin: \xe9",
        b"Content-Type: application/json",
        b"Set-Cookie: a=b",
        b"Retry-After: 1",
        b"Server: uvicorn",
        b"Content-Encoding: gzip",
    ]
)
ODD_FIELD = st.sampled_from(
    [
        b"no colon",
        b": no name",
        b"X-Space : 1",
        b" X-Folded: 1",
        b"X-Nul: a\x00b",
        b"X-Control: a\x01b",
        b"X-Cr: a\rb",
        b"X-Del: a\x7fb",
        b"X(Paren): 1",
        b"X\xe9: 1",
        b"X-Fold: a\r\n b",
        b"X-Bare: a\nX-Line: b",
        b"Upgrade: h2c",
        b"X-Long: " + b"x" * 2000,
    ]
)
CONNECTION = st.sampled_from(
    [[]] * 6 + [[b"Connection: close"], [b"Connection: keep-alive"], [b"Connection: Close, x"]]
)
EXTENSION = st.sampled_from([b""] * 6 + [b";a", b";a=b", b'; a="b;c"', b" ", b";", b"\t;x"])
TRAILER = st.sampled_from([b""] * 6 + [b"T: 1\r\n", b"T: 1\r\nU: 2\r\n", b"bad trailer\r\n", b"Content-Length: 3\r\n"])
INTERIM = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
            b"HTTP/1.1 102 Processing\r\nContent-Length: 5\r\n\r\n",
            b"HTTP/1.1 199 \r\n\r\n",
        ]
    ),
    max_size=2,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one request.

    Attributes:
        pieces: its bytes, as they are sent.
        closes: it hangs up then.
    """

    pieces: tuple[bytes, ...]
    closes: bool

    @property
    def raw(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """A body in chunks, written in one of the many ways there are."""
    edges = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
    parts = [body[start:end] for start, end in zip([0, *edges], [*edges, len(body)], strict=True)]
    size = draw(st.sampled_from(["%x", "%x", "%X", "0%x", "%010x"]))
    raw = b""
    for part in filter(None, parts):
        raw += (size % len(part)).encode() + draw(EXTENSION) + b"\r\n" + part + b"\r\n"
    return raw + draw(st.sampled_from([b"0", b"0", b"000"])) + draw(EXTENSION) + b"\r\n" + draw(TRAILER) + b"\r\n"


@st.composite
def framed(draw: st.DrawFn, body: bytes) -> tuple[list[bytes], bytes]:
    """The fields that say how long a body is, and the body as it is sent; not always the truth."""
    length = len(body)
    match draw(st.sampled_from(["length"] * 4 + ["chunked"] * 4 + ["end", "odd length", "odd coding", "both"])):
        case "length":
            return [b"Content-Length: %d" % length], body
        case "chunked":
            return [draw(st.sampled_from([b"Transfer-Encoding: chunked", b"transfer-encoding:Chunked "]))], draw(
                chunked(body)
            )
        case "end":
            return [], body
        case "odd length":
            value = draw(
                st.sampled_from(["%d, %d", "+%d", "-%d", "0x%x", "", "%d ", "00%d", "%d.0", "%d\r\nContent-Length: %d"])
            )
            return [b"Content-Length: " + (value % ((length,) * value.count("%"))).encode()], body
        case "odd coding":
            coding = draw(
                st.sampled_from([b"identity", b"gzip", b"gzip, chunked", b"chunked, chunked", b"chunked, gzip", b"x"])
            )
            return [b"Transfer-Encoding: " + coding], draw(st.one_of(st.just(body), chunked(body)))
        case _:
            return [b"Content-Length: %d" % length, b"Transfer-Encoding: chunked"], draw(
                st.one_of(st.just(body), chunked(body))
            )


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """One answer, seldom a broken one, cut anywhere."""
    framing, body = draw(framed(draw(BODY)))
    fields = [*draw(st.lists(FIELD, max_size=3)), *framing, *draw(CONNECTION)]
    if draw(st.integers(0, 5)) == 0:
        fields.insert(draw(st.integers(0, len(fields))), draw(ODD_FIELD))
    line = draw(VERSION) + b" %d" % draw(STATUS) + draw(REASON)
    end = draw(st.sampled_from([b"\r\n"] * 8 + [b"\n"]))
    raw = b"".join(draw(INTERIM)) + end.join([line, *fields, b"", b""]) + body
    raw = draw(damaged(raw)) if draw(st.integers(0, 4)) == 0 else raw
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    pieces = (raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True))
    return Answer(tuple(filter(None, pieces)), draw(st.booleans()))


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Cut short, said too much, or with bytes that are others."""
    at = draw(st.integers(0, len(raw)))
    match draw(st.sampled_from(["short", "long", "other", "more", "less", "noise"])):
        case "short":
            return raw[:at]
        case "long":
            return raw + draw(st.sampled_from([b"x", b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"]))
        case "other":
            return raw[:at] + draw(st.binary(min_size=1, max_size=1)) + raw[at + 1 :]
        case "more":
            return raw[:at] + draw(st.binary(min_size=1, max_size=3)) + raw[at:]
        case "less":
            return raw[:at] + raw[at + 1 :]
        case _:
            return draw(st.binary(max_size=60))
