"""The plugin sets the layout that can be transferred, unless the environment has one."""

from connector.config import STATE_LAYOUT, set_state_layout


def test_the_layout_is_set() -> None:
    environ: dict[str, str] = {}
    set_state_layout(environ)
    assert environ == {STATE_LAYOUT: "DS"}


def test_an_operator_s_choice_stays() -> None:
    environ = {STATE_LAYOUT: "SD"}
    set_state_layout(environ)
    assert environ == {STATE_LAYOUT: "SD"}
