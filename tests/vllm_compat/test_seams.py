"""What we touch of vLLM is there in every version that we support."""

import json
from pathlib import Path

import pytest

from connector.contract import VersionFacts
from connector.shape_check import Running, facts
from tests.vllm_compat.__main__ import main
from tests.vllm_compat.check import Seams, broken, fits, seams, wanted
from tests.vllm_compat.contract_facts import CONTRACTS as UNLOADED
from tests.vllm_compat.contract_facts import facts_of, unfit
from tests.vllm_compat.our_use import Touch, Touches, touches
from tests.vllm_compat.vllm_source import Library, Shape

# vLLM's source is parsed once a process, which takes it seconds.
pytestmark = pytest.mark.together("vLLM's source")

CONTRACTS = Path(__file__).parent / "versions"


@pytest.fixture(scope="module")
def known(touched: Touches, installed: Shape) -> Seams:
    return seams(touched, installed)


def test_the_installed_version_is_the_one_we_were_built_on(installed: Shape) -> None:
    assert installed.version == "0.32.0"


def test_the_installed_version_has_every_seam(known: Seams, installed: Shape) -> None:
    assert list(broken(known, installed)) == []


@pytest.mark.parametrize("path", sorted(CONTRACTS.glob("*.json")), ids=lambda path: path.stem)
def test_another_version_has_every_seam(known: Seams, touched: Touches, path: Path) -> None:
    """To renew a contract: `python -m tests.vllm_compat --wheel WHEEL --describe` (see there)."""
    shape = Shape.load(path.read_text(encoding="utf-8"))
    assert shape.version == path.stem
    assert wanted(touched) <= shape.names
    assert list(broken(known, shape)) == []


@pytest.mark.parametrize("path", sorted(CONTRACTS.glob("*.json")), ids=lambda path: path.stem)
def test_another_version_fits_as_a_node_s_start_asks(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))["facts"]
    assert unfit({name: VersionFacts.load(each) for name, each in raw.items()}) == []


def test_a_version_that_is_read_has_the_same_facts_as_when_it_runs(library: Library, installed: Shape) -> None:
    read = facts_of(library, installed)
    for name, contract in UNLOADED.items():
        running = facts(contract, Running())
        assert read[name].parameters == running.parameters
        assert read[name].attributes == running.attributes
        assert (read[name].fields, read[name].constants) == (running.fields, running.constants)
        assert read[name].inner == running.inner


def test_the_seams_are_few(known: Seams) -> None:
    """A ceiling, so that one more is a decision. Twenty-two are the CPU worker's, which no GPU node loads; some thirty
    are public settings in vLLM's configuration that the fingerprint reads; ten are the ticket route's, thirty-eight are
    how a stream is journaled and replayed, twenty-six are what a resumed request needs of the engine, ten are where a
    hand-over ends, two how prompts are hashed, one how long a prefill's steps are, five when an idle engine rests."""
    assert len(known.overrides) <= 64
    assert known.private <= 30
    assert len(known) <= 352


def test_the_list_can_be_printed(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], lambda: library) == 0
    printed = capsys.readouterr().out
    assert "NixlPullConnectorScheduler.on_new_request(self, request)" in printed


BASE = """
from .deep import Config
class Base:
    config: Config
    def __init__(self, one): self.kept = one
    def hook(self, request): ...
    @property
    def name(self) -> str: ...
class Sub(Base):
    def other(self): ...
"""
DEEP = "class Config:\n    size: int = 1\n"


def small(base: str = BASE, deep: str = DEEP) -> Shape:
    sources = {"vllm": "", "vllm.base": base, "vllm.deep": deep}
    return Library(sources.get).shape("9.9", frozenset({"vllm.base:Sub"}))


def ours(tmp_path: Path, text: str) -> Touches:
    (tmp_path / "mine.py").write_text("from vllm.base import Sub\n" + text, encoding="utf-8")
    return touches(tmp_path)


MINE = """
class Mine(Sub):
    def __init__(self, one, more): super().__init__(one)
    def hook(self, request): return self.kept, self.config.size
    def added(self): return self.hook
def use(sub: "Sub | None", sure: Sub): return sub.name, sure.config.size
"""


def test_a_seam_is_what_vllm_has_too(tmp_path: Path) -> None:
    known = seams(ours(tmp_path, MINE), small())
    assert [touch.chain for touch in known.overrides] == [("__init__",), ("hook",)]
    assert {touch.chain for touch in known.uses} == {("__init__",), ("kept",), ("config",), ("hook",)}
    assert {touch.chain for touch in known.reads} == {("name",), ("config", "size")}
    assert list(broken(known, small())) == []


@pytest.mark.parametrize(
    ("base", "deep", "names"),
    [
        (BASE.replace("def hook(self, request)", "def hook(self, request, more)"), DEEP, "calls"),
        (BASE.replace("def hook", "def renamed"), DEEP, "never calls"),
        (BASE.replace("self.kept", "self.lost"), DEEP, "kept"),
        (BASE.replace("def name", "def label"), DEEP, "name"),
        (BASE, DEEP.replace("size", "length"), "config.size"),
    ],
)
def test_a_change_in_vllm_is_found(tmp_path: Path, base: str, deep: str, names: str) -> None:
    known = seams(ours(tmp_path, MINE), small())
    faults = list(broken(known, small(base, deep)))
    assert faults
    assert all("9.9" in fault for fault in faults)
    assert any(names in fault for fault in faults)


def test_a_shape_survives_as_json() -> None:
    assert Shape.load(small().dump()) == small()


@pytest.mark.parametrize(
    ("mine", "theirs", "fitting"),
    [
        (("self", "a"), ("self", "b"), True),
        (("self", "a"), ("self",), False),
        (("self",), ("self", "a"), False),
        (("self", "a", "*args", "**kwargs"), ("self", "a", "b", "c"), True),
        (("self", "z", "*args"), ("self", "a", "b"), False),
    ],
)
def test_what_vllm_passes_must_fit(mine: tuple[str, ...], theirs: tuple[str, ...], fitting: bool) -> None:
    assert fits(Touch("vllm.base:Sub", ("hook",), mine), theirs) is fitting


def test_what_we_wrap_is_there_in_every_version(installed: Shape) -> None:
    """`nixl_connector` wraps them; the search above sees overrides only."""
    known = [Shape.load(path.read_text(encoding="utf-8")) for path in CONTRACTS.glob("*.json")]
    wrapped = {
        "vllm.v1.core.sched.scheduler:Scheduler": "add_request",
        "vllm.v1.engine.core:EngineCore": "preprocess_add_request",
    }
    for shape in (installed, *known):
        for owner, name in wrapped.items():
            member = shape.member(owner, (name,))
            assert member is not None, (shape.version, name)
            assert member.parameters == ("self", "request"), (shape.version, name)
