"""The fields of a large body are those that one call finds, wherever its long text is cut."""

import json
from collections.abc import Generator

import msgspec
import pytest

from pdproxy.legs import large_fields
from pdproxy.legs.large_fields import fields_of

TEXTS = [
    "plain words and more of them", 'quotes "inside" and "at the end"', "back\\slashes \\\\ in \\\\\\ rows\\",
    "новый größer 🎉 \U0001f600 text", "\n\t\r lines \u0000 nul", "", "\\" * 50, '"' * 50, '\\"' * 30,
]  # fmt: skip
BROKEN = [b'{"prompt":"no end', b'{"prompt":"bad \\q escape","n":1}', b'{"prompt":"a\nb"}', b'{"prompt":"a" "b"}',
          b'{"prompt":"a"', b'{"prompt":"half \\ud83', b'{"prompt":"a\\']  # fmt: skip


def run(steps: Generator[None, None, dict[str, msgspec.Raw]]) -> tuple[dict[str, bytes], int]:
    """The result, and the number of steps."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return {name: bytes(value) for name, value in end.value.items()}, count
        count += 1


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("piece", [1, 5, 13, 17, 1000])
def test_any_cut_gives_the_same_fields(
    text: str, ascii_only: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_fields, "PIECE", piece)
    body = {"model": "m", "n": 1, "prompt": text, "stop": ["a", "b"], "stream": True}
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    fields, _ = run(fields_of(raw))
    assert {name: json.loads(value) for name, value in fields.items()} == body
    assert list(fields) == list(body)


def test_a_long_text_takes_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_fields, "PIECE", 1000)
    raw = b'{"model": "m", "prompt": "%b"}' % (b'words and \\"more\\" ' * 1000)
    assert run(fields_of(raw))[1] > 15


@pytest.mark.parametrize("raw", BROKEN)
@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_what_is_no_json_is_refused(raw: bytes, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_fields, "PIECE", piece)
    with pytest.raises(msgspec.MsgspecError):
        run(fields_of(raw))


@pytest.mark.parametrize("raw", [b'{"prompt":"first","prompt":"second"}', b'{"prompt":["a"],"prompt":"last"}'])
def test_of_two_fields_of_one_name_the_last_counts(raw: bytes) -> None:
    assert run(fields_of(raw))[0] == {"prompt": b'"second"' if b"second" in raw else b'"last"'}
