"""Fingerprints: what one is, what may come in a ticket, and what a refusal names."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.fingerprint import (
    ADVICE,
    MOST_PARTS,
    NONE,
    Fingerprint,
    backends_text,
    differences,
    read_backends,
    read_fingerprint,
    summary,
)
from connector.ticket import Expected, Ticket, parse
from connector.ticket_fields import Refusal, RefusalReason, RefusedError
from tests.connector.tickets import ANYTHING, EXAMPLES, FINGERPRINT, KEY, SHAPES, good, good_wire

MINE = Fingerprint.of({"dtype": "bfloat16", "state_dtypes": "bfloat16+float32", "block_sizes": "256*4"})


def of(**other: str) -> Fingerprint:
    return MINE.extended(other)


def test_order_does_not_count() -> None:
    assert Fingerprint.of(dict(reversed(MINE.parts))) == MINE
    assert Fingerprint.of(dict(reversed(MINE.parts))).digest == MINE.digest


def test_the_digest_is_16_digits_of_the_canonical_json() -> None:
    assert Fingerprint.of({"b": "2", "a": "1"}).digest == "21f76dfbfe6dfe21"
    assert len(MINE.digest) == 16
    assert len({MINE.digest, of(dtype="float16").digest, of(more="1").digest}) == 3


@pytest.mark.parametrize("parts", [{"": "x"}, {"A": "x"}, {"a": ""}, {"a": "x y"}, {"a": "x\n"}, {"a": "x" * 129}])
def test_a_node_makes_none_that_another_would_not_read(parts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        Fingerprint.of(parts)


def test_what_a_node_makes_another_reads() -> None:
    assert read_fingerprint(json.loads(json.dumps(dict(MINE.parts)))) == MINE


def test_a_difference_names_what_to_align() -> None:
    (sentence,) = differences(MINE, of(state_dtypes="bfloat16+bfloat16"))
    assert sentence == (
        "state_dtypes is bfloat16+float32 here, bfloat16+bfloat16 on the prefill node: start both with the same "
        "--mamba-ssm-cache-dtype and --mamba-cache-dtype"
    )


@pytest.mark.parametrize("part", ADVICE)
def test_every_part_has_advice_of_its_own(part: str) -> None:
    (sentence,) = differences(Fingerprint.of({part: "1"}), Fingerprint.of({part: "2"}))
    assert sentence == f"{part} is 1 here, 2 on the prefill node: {ADVICE[part]}"
    assert any(word in ADVICE[part] for word in ("--", "VLLM_", "release"))


def test_all_backends_are_named_whatever_layer_comes_first() -> None:
    assert backends_text(["MAMBA2_ATTN", "FLASH_ATTN", "MAMBA2_ATTN"], 1, 1, 16) == "FLASH_ATTN+MAMBA2_ATTN"
    assert read_backends("FLASH_ATTN+MAMBA2_ATTN") == ("FLASH_ATTN+MAMBA2_ATTN", NONE)


@pytest.mark.parametrize(
    ("ranks", "interleave", "dealt"), [(1, 1, NONE), (1, 16, NONE), (2, 16, NONE), (2, 1, "2x1"), (4, 8, "4x8")]
)
def test_context_parallelism_that_does_not_deal_out_whole_blocks_is_named(
    ranks: int, interleave: int, dealt: str
) -> None:
    """vLLM's reader supposes whole blocks on either node."""
    assert read_backends(backends_text(["FLASH_MLA"], ranks, interleave, 16)) == ("FLASH_MLA", dealt)


def test_equal_ones_do_not_differ() -> None:
    assert differences(MINE, Fingerprint.of(dict(MINE.parts))) == ()


def test_a_part_that_only_one_node_knows_is_a_difference() -> None:
    assert "here only" in differences(of(new="1"), MINE)[0]
    assert "on the prefill node only" in differences(MINE, of(new="1"))[0]


def test_a_log_line_bears_only_so_many() -> None:
    many = differences(MINE, Fingerprint.of({f"part_{at}": "x" for at in range(50)}))
    assert len(many) == 53
    assert summary(many).endswith("; and 49 more")
    assert summary(many[:2]) == "; ".join(many[:2])


@settings(max_examples=EXAMPLES, deadline=None)
@given(ANYTHING | st.dictionaries(st.text(max_size=60), st.text(max_size=140), max_size=70))
def test_whatever_comes_is_a_fingerprint_or_refused(value: Any) -> None:
    try:
        read = read_fingerprint(value)
    except RefusedError:
        return
    assert dict(read.parts) == value
    assert len(read.parts) <= MOST_PARTS
    assert all(sentence.isascii() and "\n" not in sentence for sentence in differences(MINE, read))


def test_a_ticket_of_another_fingerprint_is_refused_with_what_differs() -> None:
    other = FINGERPRINT.extended({"checkpoint": "content:4567"})
    refused = parse(good_wire(fingerprint=other), Expected(SHAPES, (KEY,), fingerprint=FINGERPRINT))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.FINGERPRINT
    assert "checkpoint is content:0123 here, content:4567 on the prefill node: serve the same weights" in refused.detail


def test_block_sizes_that_divide_each_other_are_refused_all_the_same() -> None:
    """They poisoned the cache: read pages of 256 tokens fill half of a page of 512."""
    larger = good_wire(
        block_sizes=(32, 16), block_ids=((1, 2, 3, 4), (9,)), fingerprint=FINGERPRINT.extended({"block_sizes": "32,16"})
    )
    refused = parse(larger, Expected(SHAPES, (KEY,), fingerprint=FINGERPRINT))
    assert isinstance(refused, Refusal)
    assert (refused.reason, "--block-size" in refused.detail) == (RefusalReason.FINGERPRINT, True)


def test_what_differs_is_named_before_groups_that_do_not_fit() -> None:
    other = good_wire(block_ids=((1,),), block_sizes=(16,), fingerprint=FINGERPRINT.extended({"dtype": "float16"}))
    refused = parse(other, Expected(SHAPES, (KEY,), fingerprint=FINGERPRINT))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.FINGERPRINT


def test_a_forged_fingerprint_is_a_bad_signature() -> None:
    ticket = good_wire(fingerprint=FINGERPRINT.extended({"dtype": "float16"}))
    ticket["pdproxy"]["fingerprint"] = dict(FINGERPRINT.parts)
    refused = parse(ticket, Expected(SHAPES, (KEY,), fingerprint=FINGERPRINT))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.BAD_SIGNATURE


def test_without_an_expected_one_any_is_taken() -> None:
    assert isinstance(parse(good_wire(fingerprint=MINE), Expected(SHAPES, (KEY,))), Ticket)
    assert isinstance(parse(good_wire(), Expected(SHAPES, (KEY,))), Ticket)
    assert good().fingerprint == FINGERPRINT
