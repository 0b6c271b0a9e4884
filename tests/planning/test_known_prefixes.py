"""Prompts that were tokenized tell of those that begin with the same text. A token is a byte here."""

import hashlib
from array import array

import pytest

from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme
from pdproxy.planning.renderings import HashesByScheme, KnownPrefix, Rendering, Renderings
from pdproxy.planning.text_chain import CHUNK, Chain, chain_of_completion, chain_of_text
from pdproxy.planning.text_index import MOST_ENDING, SURE, TextIndex

UNIT = 16
SCHEME = HashScheme(HashAlgorithm.SHA256_CBOR, UNIT, UNIT, bytes(32))
SYSTEM, FIRST, ANSWER, SECOND = b"be kind. " * 80, b"first question " * 9, b"an answer " * 9, b"second question " * 9
ASK = b"<answer>"
"""The text that the template puts at the end of a prompt."""


def hashes(rendered: bytes) -> HashesByScheme:
    ends = range(UNIT, len(rendered) + 1, UNIT)
    return {SCHEME: array("Q", (int.from_bytes(hashlib.sha256(rendered[:end]).digest()[:8], "big") for end in ends))}


def chat(*messages: bytes, salt: str = "") -> Chain:
    return chain_of_text("m", salt, messages)


def tokenized(index: TextIndex, *messages: bytes, ending: bytes = b"") -> None:
    text = b"".join(messages)
    rendering = Rendering(len(text) + len(ending), len(text), hashes(text + ending))
    index.tokenized(chat(*messages), rendering)


def holds(known: KnownPrefix, *messages: bytes) -> bool:
    """Whether the hashes that are known are the prompt's."""
    units, [mine] = known.tokens // UNIT, hashes(b"".join(messages)).values()
    return known.rendering is not None and list(known.rendering.hashes[SCHEME][:units]) == list(mine[:units])


TURN_1, TURN_2 = (SYSTEM, FIRST), (SYSTEM, FIRST, ANSWER, SECOND)


def test_of_the_next_turn_all_of_the_last_one_is_known() -> None:
    index = TextIndex()
    assert index.known_prefix(chat(*TURN_1)) == KnownPrefix(-(-len(b"".join(TURN_1)) // 4))
    tokenized(index, *TURN_1)
    known = index.known_prefix(chat(*TURN_2))
    assert known.tokens == known.met == len(b"".join(TURN_1))
    assert known.prompt == pytest.approx(len(b"".join(TURN_2)), rel=0.1)
    assert holds(known, *TURN_2)
    assert not known.whole


def test_an_equal_prompt_is_known_to_the_last_token() -> None:
    index = TextIndex()
    tokenized(index, *TURN_1, ending=ASK)
    known = index.known_prefix(chat(*TURN_1))
    assert known.whole
    assert known.prompt == known.tokens == len(b"".join(TURN_1)) + len(ASK)


def test_a_conversation_is_kept_once() -> None:
    index = TextIndex(renderings=(renderings := Renderings()))
    for turn in (TURN_1, TURN_2, (*TURN_2, ANSWER, FIRST)):
        tokenized(index, *turn)
        assert len(renderings) == 1


def test_where_two_prompts_part_their_hashes_tell_how_many_tokens_lie_before() -> None:
    index, other, third = TextIndex(), b"something else " * 9, b"and again " * 9
    tokenized(index, SYSTEM, FIRST)
    first = index.known_prefix(chat(SYSTEM, other))
    assert first.tokens == pytest.approx(SURE * len(SYSTEM), abs=1), "rather less than it is"
    assert holds(first, SYSTEM, other)
    assert first.met > first.tokens, "the rest of what was met is not known"
    tokenized(index, SYSTEM, other)
    then = index.known_prefix(chat(SYSTEM, third))
    assert then.tokens == len(SYSTEM) // UNIT * UNIT
    assert holds(then, SYSTEM, third)


def test_a_completion_is_known_as_far_as_pieces_are_equal() -> None:
    index, text = TextIndex(), bytes(number % 251 for number in range(5 * CHUNK))
    for end in (3 * CHUNK + 100, 4 * CHUNK + 7):
        chain = index.refined(chain_of_completion("m", "", text[:end]))
        index.tokenized(chain, Rendering(end, end, hashes(text[:end])))
    assert index.known_prefix(index.refined(chain_of_completion("m", "", text))).tokens == 4 * CHUNK + 7
    parted = index.known_prefix(index.refined(chain_of_completion("m", "", text[: 2 * CHUNK + 9] + b"other" * 200)))
    assert parted.tokens == int(SURE * 2 * CHUNK)
    assert holds(parted, text)


def test_what_a_template_ends_prompts_with_is_not_in_those_that_go_on_from_them() -> None:
    """Once it was seen, the unit that it stands in is no longer taken to be shared."""
    index, questions = TextIndex(), [b"%04d " % number * 31 for number in range(6)]
    assert len(SYSTEM + questions[0] + ASK) // UNIT > len(SYSTEM + questions[0]) // UNIT
    wrong = 0
    for question in questions:
        tokenized(index, SYSTEM, question, ending=ASK)
        known = index.known_prefix(chat(SYSTEM, question, ANSWER))
        wrong += not holds(known, SYSTEM, question, ANSWER)
        tokenized(index, SYSTEM, question, ANSWER, ending=ASK)
    assert wrong == 1


def test_a_prompt_that_is_rendered_otherwise_than_before_is_no_ending() -> None:
    index = TextIndex()
    tokenized(index, *TURN_1)
    index.tokenized(chat(*TURN_2), Rendering(900, len(b"".join(TURN_2)), hashes(b"another day" * 90)))
    other = chat(b"x" * 900, FIRST)
    index.tokenized(other, Rendering(900, other.ends[-1], hashes(b"y" * 900)))
    assert index.known_prefix(chat(b"x" * 900, FIRST, ANSWER)).tokens == 900 > 900 - MOST_ENDING


def test_the_latest_rendering_is_believed() -> None:
    """A template that has the day in it makes other tokens of the same text."""
    index, today = TextIndex(), b"Tuesday"
    tokenized(index, *TURN_1)
    for last in (FIRST, SECOND):
        text = today + SYSTEM + last
        index.tokenized(chat(SYSTEM, last), Rendering(len(text), len(SYSTEM + last), hashes(text)))
    known = index.known_prefix(chat(SYSTEM, ANSWER))
    assert holds(known, today, SYSTEM)
    assert known.tokens == len(today + SYSTEM) // UNIT * UNIT


def test_another_salt_is_another_text() -> None:
    index = TextIndex()
    tokenized(index, *TURN_1)
    assert index.known_prefix(chat(*TURN_1, salt="tenant")).met == 0


def test_a_text_that_was_sent_and_not_tokenized_is_met_and_its_hashes_are_not_known() -> None:
    index = TextIndex()
    tokenized(index, *TURN_1)
    for _ in index._touched(chat(*TURN_2)):
        pass
    known = index.known_prefix(chat(*TURN_2, ANSWER))
    assert known.tokens == len(b"".join(TURN_1))
    assert known.met == pytest.approx(len(b"".join(TURN_2)), rel=0.1)


def test_renderings_are_bounded_and_those_that_are_used_stay() -> None:
    size = len(hashes(SYSTEM + FIRST)[SCHEME])
    index = TextIndex(renderings=(renderings := Renderings(3 * (64 + size))))
    for number in range(20):
        tokenized(index, b"%04d" % number + SYSTEM, FIRST)
        assert index.known_prefix(chat(b"0000" + SYSTEM, FIRST)).whole
        assert len(renderings) <= 3
    assert index.known_prefix(chat(b"0007" + SYSTEM, FIRST)).tokens == 0
