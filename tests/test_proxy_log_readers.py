"""End-to-end tests wait for the proxy's log lines, which are written a moment after what they tell of."""

import re

from tests.test_docs import ROOT

READ_AT_ONCE = re.compile(r"\bproxy[\w.]*\.log\W*(?:read_text|read_bytes|open)\b")


def test_the_log_of_a_running_proxy_is_read_by_what_waits_for_its_lines() -> None:
    found = [
        f"{path.name}: {read[0]}: use tests.e2e.proxy_log.log_when"
        for path in sorted((ROOT / "tests/e2e").glob("*.py"))
        for read in READ_AT_ONCE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
