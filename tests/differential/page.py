"""The page "What differs from vLLM": `python -m tests.differential.page > docs/differences.md`."""

import sys
from pathlib import Path

from pdproxy.intake.routes import WITHHELD
from tests.differential import ledger as grid
from tests.upstream import ledger as upstream

LEDGER = Path(__file__).with_name("ledger.toml")
ENTRYPOINTS = Path(__file__).parents[1] / "upstream" / "entrypoints.toml"
PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
_HEAD = """\
# What differs from vLLM

Clients get the answers of a single vLLM server, but for what stands here. `make test-differential` compares: odd values
in every field of vLLM's own schema, and vLLM's own entrypoint tests, each to one engine and through the proxy.

## Requests and answers
"""
_PATHS = """
## Paths that clients do not reach

They are answered with 404 and the reason, `/v1/realtime` with 501. A path of a later vLLM that stands in no list is
withheld too.

| path | why |
|---|---|
"""


def differences_page() -> str:
    """Markdown, with the sentences of both ledgers, each once."""
    told = grid.page(grid.read(LEDGER.read_text(encoding="utf-8")))
    told += upstream.read(ENTRYPOINTS.read_text(encoding="utf-8")).page
    sentences = "".join(f"- {sentence}\n" for sentence in dict.fromkeys(told))
    paths = "".join(f"| `{path}` | {reason} |\n" for path, reason in WITHHELD.items())
    return f"{_HEAD}\n{sentences}{_PATHS}{paths}"


if __name__ == "__main__":
    sys.stdout.write(differences_page())
