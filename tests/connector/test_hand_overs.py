"""Hand-over ids: released before, during or after the prefill."""

from connector.prefill_tickets import HandOverIds

ID = "hand-over-0123456789"


def table(memory: float = 60.0, capacity: int = 100) -> HandOverIds:
    return HandOverIds(memory=memory, capacity=capacity)


def test_a_release_names_the_requests_that_carry_the_id() -> None:
    known = table()
    assert not known.add(ID, "a")
    assert not known.add(ID, "b")
    assert known.release(ID, now=0.0) == {"a", "b"}
    assert known.is_released("a")
    assert not known.is_released("c")


def test_a_release_that_comes_first_is_remembered() -> None:
    known = table()
    assert known.release(ID, now=0.0) == frozenset()
    assert known.add(ID, "a")


def test_a_request_that_left_is_not_named() -> None:
    known = table()
    known.add(ID, "a")
    known.remove("a")
    known.remove("a")
    assert len(known) == 0
    assert known.release(ID, now=0.0) == frozenset()


def test_early_releases_are_forgotten_by_age() -> None:
    known = table(memory=60.0)
    known.release(ID, now=0.0)
    known.release("another-id-0123456789", now=100.0)
    assert not known.add(ID, "a")


def test_early_releases_are_bounded_in_number() -> None:
    known = table(capacity=10)
    for index in range(100):
        known.release(f"{ID}-{index}", now=0.0)
    assert len(known) == 10


def test_a_flood_of_releases_does_not_make_it_forget_living_requests() -> None:
    known = table(capacity=10)
    known.add(ID, "a")
    known.release(ID, now=0.0)
    for index in range(100):
        known.release(f"{ID}-{index}", now=0.0)
    assert known.is_released("a")


def test_a_long_prefill_does_not_keep_old_releases_alive() -> None:
    known = table(memory=60.0)
    known.add(ID, "a")
    known.release("another-id-0123456789", now=0.0)
    known.release("a-third-id-0123456789", now=100.0)
    assert not known.add("another-id-0123456789", "b")
    assert known.release(ID, now=100.0) == {"a"}
