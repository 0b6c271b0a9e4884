"""Properties of the choice that hold for any offers."""

from hypothesis import given
from hypothesis import strategies as st

from connector.tiers.pending_loads import AskAgain, Choice, ComputeHere, LoadFrom, Offer, bounded_offer, choose, worth

PROMPT = 1000
WEIGHTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 10.0])


@st.composite
def offers_and_hit(draw: st.DrawFn) -> tuple[list[Offer], int]:
    """Answers of up to five children, some of them undecided, some on a deeper hit than the shared one."""
    shared = draw(st.integers(0, PROMPT))
    deeper = draw(st.integers(shared, PROMPT))
    offers = []
    for child in range(draw(st.integers(0, 5))):
        base = draw(st.sampled_from([shared, deeper]))
        tokens = draw(st.none() | st.integers(0, PROMPT - base))
        offers.append(Offer(child, base, tokens, draw(WEIGHTS)))
    return offers, shared


def chosen(offers: list[Offer], shared: int, *, late: bool = True) -> Choice:
    return choose(offers, shared=shared, prompt=PROMPT, late=late)


@given(offers_and_hit())
def test_nothing_is_worth_more_than_the_winner(case: tuple[list[Offer], int]) -> None:
    offers, shared = case
    best = max((worth(offer, shared) for offer in offers), default=0.0)
    match chosen(offers, shared):
        case LoadFrom(offer):
            assert worth(offer, shared) == best > 0
        case ComputeHere():
            assert best == 0
        case AskAgain():
            raise AssertionError("no child is waited for when it is late")


def test_no_request_waits_for_a_child_that_has_nothing_left_to_load() -> None:
    assert chosen([Offer(0, PROMPT, None)], 0, late=False) == ComputeHere()
    assert chosen([Offer(0, PROMPT - 1, None)], 0, late=False) == AskAgain()


@given(offers_and_hit())
def test_of_equals_the_first_wins(case: tuple[list[Offer], int]) -> None:
    offers, shared = case
    choice = chosen(offers, shared)
    if isinstance(choice, LoadFrom):
        equal = [offer.child for offer in offers if worth(offer, shared) == worth(choice.offer, shared)]
        assert choice.offer.child == equal[0]


@given(offers_and_hit(), st.data())
def test_waiting_is_for_those_that_could_win(case: tuple[list[Offer], int], data: st.DataObject) -> None:
    """However the undecided decide, a choice that did not wait for them stays the same."""
    offers, shared = case
    choice = chosen(offers, shared, late=False)
    decided = [
        offer
        if offer.tokens is not None
        else Offer(offer.child, offer.base, data.draw(st.integers(0, PROMPT - offer.base)), offer.weight)
        for offer in offers
    ]
    if not isinstance(choice, AskAgain):
        assert chosen(decided, shared) == choice
    else:
        every = [Offer(c.child, c.base, PROMPT - c.base, c.weight) if c.tokens is None else c for c in offers]
        assert isinstance(chosen(every, shared), LoadFrom)
        assert chosen(every, shared) != chosen(offers, shared)


@given(offers_and_hit())
def test_weights_are_relative(case: tuple[list[Offer], int]) -> None:
    offers, shared = case
    doubled = [Offer(offer.child, offer.base, offer.tokens, offer.weight * 2) for offer in offers]
    before, after = chosen(offers, shared), chosen(doubled, shared)
    assert type(before) is type(after)
    if isinstance(before, LoadFrom) and isinstance(after, LoadFrom):
        assert before.offer.child == after.offer.child


@given(offers_and_hit(), WEIGHTS)
def test_more_tokens_never_lose(case: tuple[list[Offer], int], weight: float) -> None:
    """A winner that would have brought more still wins."""
    offers, shared = case
    choice = chosen(offers, shared)
    if isinstance(choice, LoadFrom):
        won = choice.offer
        better = Offer(won.child, won.base, PROMPT - won.base, won.weight)
        again = chosen([better if offer is won else offer for offer in offers], shared)
        assert isinstance(again, LoadFrom)
        assert again.offer.child == won.child


@given(st.none() | st.integers(-(10**6), 10**6), st.integers(0, PROMPT))
def test_only_what_the_scheduler_can_take_is_counted(tokens: int | None, base: int) -> None:
    counted = bounded_offer(tokens, base=base, prompt=PROMPT)
    if tokens is None:
        assert counted is None
    else:
        assert counted is not None
        assert counted in (0, tokens)
        assert 0 <= counted <= PROMPT - base


def test_a_state_makes_the_local_attention_worth_something() -> None:
    """Locally attention up to 96, state nowhere: a ticket to 131 saves 131, more than a tier's 130 from nothing."""
    ticket, disk = Offer(1, base=96, tokens=35), Offer(0, base=0, tokens=130)
    assert chosen([disk, ticket], shared=0) == LoadFrom(ticket)
    assert chosen([disk, ticket], shared=96) == LoadFrom(ticket)


def test_an_offer_below_the_shared_hit_saves_nothing() -> None:
    assert worth(Offer(0, base=0, tokens=90), shared=96) == 0
