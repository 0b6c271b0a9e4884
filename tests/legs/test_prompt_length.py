"""How long a prompt is, about."""

import pytest

from pdproxy.legs.outline import facts_of
from pdproxy.request import Json

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
ASKED = {"role": "user", "content": [{"type": "text", "text": "x" * 70}, PICTURE]}
"""4 + 4 + 9 + 70 bytes of words and text."""
DEEP: list[object] = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({"prompt": "a" * 400}, 100),
        ({"prompt": "a" * 401}, 101),
        ({"prompt": "\u8a9e" * 400}, 300),
        ({"prompt": "\ud800"}, 1),
        ({"prompt": [7] * 33}, 33),
        ({"prompt": None}, 0),
        ({"messages": [ASKED], "max_tokens": 9, "user": "y" * 400}, 22),
        ({"messages": [ASKED], "tools": [{"type": "function", "function": {"description": "z" * 390}}]}, 122),
        ({"system": "s" * 40, "messages": []}, 10),
        ({"instructions": "i" * 40, "input": "j" * 40}, 20),
        ({"messages": DEEP}, 0),
    ],
)
def test_a_prompts_length_is_estimated(body: Json, about: int) -> None:
    assert facts_of(body).tokens == about
