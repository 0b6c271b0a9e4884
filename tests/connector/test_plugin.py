"""The plugin asks for the layout that can travel, and overrules nobody."""

from connector.config import LAYOUT, prepare


def test_the_layout_is_asked_for() -> None:
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {LAYOUT: "DS"}


def test_an_operator_s_choice_stays() -> None:
    environ = {LAYOUT: "SD"}
    prepare(environ)
    assert environ == {LAYOUT: "SD"}
