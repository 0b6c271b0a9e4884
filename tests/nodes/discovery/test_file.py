"""Nodes listed in a file."""

from pathlib import Path

import pytest

from pdproxy.nodes.discovery.file import FileSource, read_entries
from pdproxy.nodes.discovery.source import DiscoveryError
from pdproxy.nodes.node import Node, Role

ONE = "- {url: 'http://10.0.0.1:8000/', role: prefill}\n"
TWO = ONE + "- {url: 'http://d1:8000', role: decode, name: d1, model: tiny, aliases: [lora], weight: 2}\n"
FIRST = Node("prefill-10.0.0.1:8000", "http://10.0.0.1:8000", (Role.PREFILL,))
SECOND = Node("d1", "http://d1:8000", (Role.DECODE,), "tiny", ("lora",), 2.0)


class Script:
    """A clock whose every sleep is the next step of a script."""

    def __init__(self, path: Path, *steps: str | None) -> None:
        self._path = path
        self._steps = list(steps)

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        step = self._steps.pop(0)
        if step is None:
            self._path.unlink()
        else:
            self._path.write_text(step)


def test_entries_are_read_with_every_field() -> None:
    assert read_entries(TWO.encode()) == (FIRST, SECOND)
    assert read_entries(b"[]") == ()
    assert read_entries(b'[{"url": "https://[::1]:8000", "role": "decode"}]')[0].url == "https://[::1]:8000"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: [", "YAML"),
        ("", "list"),
        ("nodes: []", "list"),
        ("- 3", "node 0: must be {url, roles}, not 3"),
        ("- {role: prefill}", "url"),
        ("- {url: 'http://x', role: both}", "role"),
        ("- {url: 'ftp://x', role: prefill}", "url"),
        (
            "- {url: 'http://x/v1', role: prefill}",
            "url: must be an address such as http://10.0.0.1:8000, not 'http://x/v1'",
        ),
        ("- {url: 'http://x:99999', role: prefill}", "url"),
        ("- {url: 'http://u:p@x', role: prefill}", "node 0: url: must be an address without credentials.*fragment$"),
        ("- {url: 'http://x', role: prefill, wieght: 2}", "wieght"),
        ("- {url: 'http://x', role: prefill, weight: 0}", "weight"),
        ("- {url: 'http://x', role: prefill, weight: .nan}", "weight"),
        ("- {url: 'http://x', role: prefill, weight: true}", "weight"),
        ("- {url: 'http://x', role: prefill, aliases: a}", "aliases"),
        ("- {url: 'http://x', role: prefill, model: 3}", "model"),
        (ONE + ONE, "is there twice"),
        (TWO + TWO.replace("d1:8000", "d2:8000").replace(ONE, ""), "two nodes are called 'd1'"),
    ],
)
def test_an_unusable_list_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(DiscoveryError, match=word):
        read_entries(text.encode())


async def test_changes_are_seen_and_trouble_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(ONE)
    clock = Script(path, ONE, "- {url: half", None, ONE, TWO, "[]")
    lists = FileSource(path, clock).watch()
    assert await anext(lists) == (FIRST,)
    assert await anext(lists) == (FIRST, SECOND)
    assert await anext(lists) == ()
    await lists.aclose()


async def test_a_file_may_come_later(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    lists = FileSource(path, Script(path, ONE)).watch()
    assert await anext(lists) == (FIRST,)
    await lists.aclose()
