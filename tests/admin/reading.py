"""Text of the live page as Chromium printed it."""

import re


def text_of(page: str, name: str) -> str:
    """The text of the element with an id, tags left out; as far as the next element of its kind begins."""
    found = re.search(rf'<(\w+)[^>]* id="{name}".*?</\1>', page, re.DOTALL)
    assert found is not None, f"no {name} in the page"
    return " ".join(re.sub(r"<[^>]*>", " ", found[0]).split())
