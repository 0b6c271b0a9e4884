"""The prompts of known-answer tests."""

import json

import pytest

from deploy.local.paths import MODEL
from pdproxy.orchestration.known_answer_prompt import NAMES, plain_ids, prompt_tokens, question, up_to_boundary


def test_a_question_asks_for_a_name_far_back_in_its_list() -> None:
    *listed, asked = question(7, 100).split("\n")
    names = [line.split(" ")[0] for line in listed]
    assert (len(names), len(set(names))) == (100, 100)
    assert asked in [f"? {name} =" for name in names[:25]]
    assert question(7, 100) != question(8, 100)


def test_a_list_may_be_longer_than_there_are_names() -> None:
    *listed, asked = question(1, 2000).split("\n")
    assert len(listed) == 2000
    assert [line.rpartition(" ")[0] for line in listed].count(asked.removeprefix("? ").removesuffix(" =")) == 1


def test_the_tiny_model_knows_the_names() -> None:
    """Its answers depend on its state only for what it was trained on (see the module)."""
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(NAMES) <= set(vocabulary)


def test_plain_ids_end_as_they_begin() -> None:
    ids = plain_ids(3, 200)
    assert len(ids) == 200
    assert ids[-24:] == ids[:24]
    assert len(plain_ids(3, 10)) == 10


@pytest.mark.parametrize(
    ("block_sizes", "longest", "tokens"),
    [
        ((16, 16), (4096, 4096), 256),
        ((272, 1056), (32768, 32768), 2640),
        ((0, 0), (0, 0), 1280),
        ((1056, 1056), (2000, 900), 890),
        ((0, 256), (0, 4096), 640),
        ((16, 16), (8, 8), 1),
    ],
)
def test_some_blocks_and_a_part_of_one_as_far_as_both_nodes_take_it(
    block_sizes: tuple[int, int], longest: tuple[int, int], tokens: int
) -> None:
    assert prompt_tokens(block_sizes, longest, 10) == tokens


@pytest.mark.parametrize(("length", "unit", "kept"), [(680, 16, 672), (640, 16, 640), (680, 0, 680), (10, 16, 10)])
def test_a_prompt_ends_where_a_hand_over_of_one_token_more_does(length: int, unit: int, kept: int) -> None:
    ids = list(range(length))
    assert up_to_boundary(ids, unit) == ids[length - kept :]
