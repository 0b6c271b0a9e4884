"""Ids that nobody can guess, and no two of which are the same."""

import itertools
import re

from pdproxy.random_ids import random_ids


def test_ids_are_128_bits_in_hex_and_never_the_same() -> None:
    found = [*itertools.islice(random_ids(), 1000), *itertools.islice(random_ids(), 1000)]
    assert len(set(found)) == len(found)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in found)
