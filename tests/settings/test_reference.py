"""The page of all settings is what the settings say."""

from pathlib import Path

from pdproxy.settings.leaves import leaves, node_leaves, sections
from pdproxy.settings.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: python -m pdproxy settings > docs/settings.md"


def test_the_page_names_every_setting() -> None:
    page = reference()
    for section in (*sections(), "nodes"):
        assert f"## {section}\n" in page
    for leaf in (*leaves(), *node_leaves()):
        assert f"| `{leaf.name}`" in page
