"""Adds conditions on labels to PromQL queries: for the rules of one release, and for the dashboard's variables."""

import re
from collections.abc import Callable, Mapping

_SELECTOR = re.compile(r"(?<![\w:$])((?:pdproxy_|gen_ai_|vllm:)\w+|up(?=\{))(?:\{([^}]*)\})?")
"""One term of a query that reads series of the proxy, of a node, or whether they were scraped."""


def with_matchers(query: str, matchers: Callable[[str], Mapping[str, str]]) -> str:
    """The query, each of whose terms reads only series that meet further conditions.

    Args:
        matchers: by a metric's name, the operator and value for each label, such as ``{"release": '="a"'}``.
    """

    def narrowed(found: re.Match[str]) -> str:
        added = [f"{label}{condition}" for label, condition in matchers(found[1]).items()]
        return f"{found[1]}{{{','.join(filter(None, [*added, found[2]]))}}}"

    return _SELECTOR.sub(narrowed, query)
