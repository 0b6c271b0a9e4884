"""The filter that takes out a usage event that only the proxy asked for."""

from pdproxy.stream.usage_event import UsageEventFilter

FINISH = b'{"id":"1","choices":[{"text":"x","finish_reason":"stop"}]}'
USAGE = b'{"id":"1","choices":[],"usage":{"prompt_tokens":1},"system_fingerprint":"f"}'


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def test_the_fingerprint_moves_to_the_event_with_the_finish_reason() -> None:
    usage_filter = UsageEventFilter()
    assert usage_filter.feed(FINISH, _event(FINISH)) == b""
    assert usage_filter.is_usage_event(USAGE)
    assert usage_filter.on_usage_event(USAGE) == _event(FINISH[:-1] + b',"system_fingerprint":"f"}')
    assert usage_filter.flush() == b""


def test_nothing_is_lost_where_no_usage_event_comes() -> None:
    usage_filter = UsageEventFilter()
    usage_filter.feed(FINISH, _event(FINISH))
    assert usage_filter.feed(b"[DONE]", b"data: [DONE]\n\n") == _event(FINISH) + b"data: [DONE]\n\n"


def test_other_events_pass_at_once() -> None:
    assert UsageEventFilter().feed(b'{"choices":[{"text":"x"}]}', b"seen") == b"seen"
