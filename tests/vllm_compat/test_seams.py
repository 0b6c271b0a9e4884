"""The names of vLLM that the connector uses are there, and the same, in every version that it is tested with."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from connector.vllm_version import TESTED
from tests.vllm_compat.__main__ import count, installed_release, main, our_seams, our_touches, version, versions
from tests.vllm_compat.check import FOUND, Kind, Seam, Version, differences, fits, misfits, seams
from tests.vllm_compat.fetch import NotFetchedError, fetched, unpack
from tests.vllm_compat.our_use import Touch, Touches, touches
from tests.vllm_compat.seams import DIFFERENCES, INSIDES, OVERRIDES, UNSEEN, Inside
from tests.vllm_compat.vllm_source import Library

# vLLM's source is parsed once a process, which takes it seconds.
pytestmark = pytest.mark.together("vLLM's source")


@pytest.fixture(scope="module")
def every() -> frozenset[Seam]:
    """The seams with any of the tested versions."""
    return frozenset[Seam]().union(*our_seams(versions()).values())


def test_the_installed_version_is_a_tested_one() -> None:
    assert installed_release() in TESTED


@pytest.mark.parametrize("release", TESTED)
def test_overrides_take_what_vllm_passes(every: frozenset[Seam], release: str) -> None:
    assert list(misfits(every, version(release).shape)) == []


@pytest.mark.parametrize("release", [each for each in TESTED if each != installed_release()])
def test_every_difference_between_versions_is_stated_with_a_reason(every: frozenset[Seam], release: str) -> None:
    """A seam that one version lacks is a difference, too. Reasons of differences that are gone must go."""
    found = dict(differences(every, version(installed_release()), version(release)))
    stated = DIFFERENCES.get(release, {})
    assert {name: found[name] for name in found if name not in stated} == {}
    assert stated.keys() - found.keys() == set()


@pytest.mark.parametrize("release", TESTED)
def test_every_override_of_the_list_is_one(release: str) -> None:
    """A method of ours whose name vLLM does not know is never called."""
    listed = {f"{owner}.{name}" for owner, names in OVERRIDES.items() for name in names.split()}
    stated = {name for reasons in DIFFERENCES.values() for name in reasons}
    known = frozenset[Seam]().union(*our_seams([version(release)]).values())
    found = {seam.name for seam in known if seam.kind is Kind.OVERRIDE}
    assert found - listed == set()
    assert listed - found - stated == set()


@pytest.mark.parametrize("inside", INSIDES, ids=lambda inside: inside.where.rpartition(":")[2])
@pytest.mark.parametrize("release", TESTED)
def test_what_stands_inside_of_vllm_is_what_the_connector_expects(release: str, inside: Inside) -> None:
    text = version(release).library.text(inside.where)
    assert text is not None
    assert [part for part in inside.holds if part not in text] == []


def test_what_is_listed_by_hand_is_used_and_not_found_by_the_scan() -> None:
    words = frozenset[str]().union(*(each.words for each in our_touches().values()))
    lists = [each for classes in UNSEEN.values() for each in classes.items()]
    members = {Touch(owner, (name,)) for owner, names in lists for name in names.split()}
    assert {name for touch in members for name in touch.chain if name not in words} == set()
    read = frozenset[Touch]().union(*(each.read for each in our_touches().values()))
    assert members & {Touch(each.owner, each.chain[:1]) for each in read} == set()


def test_the_seams_are_few() -> None:
    """Ceilings: one more seam is a decision, one fewer lowers them. `python -m tests.vllm_compat` has a table."""
    known = frozenset[Seam]().union(*our_seams([version(installed_release())]).values())
    assert count(known, *FOUND) <= 349
    assert count(known, Kind.OVERRIDE) <= 64
    assert sum(seam.private for seam in known if seam.kind in FOUND) <= 22
    assert count(known, Kind.UNSEEN, Kind.INSIDE) <= 91


def test_the_list_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "NixlPullConnectorScheduler.on_new_request" in printed
    assert "resumed requests" in printed


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
def helper(one, two=2): return "text"
"""
DEEP = "class Config:\n    size: int = 1\n"


def small(base: str = BASE, deep: str = DEEP) -> Version:
    library = Library({"vllm": "", "vllm.base": base, "vllm.deep": deep}.get)
    return Version(library, library.shape("9.9", frozenset({"vllm.base:Sub", "vllm.base:helper"})))


MINE = """
from vllm.base import Sub, helper
class Mine(Sub):
    def __init__(self, one, more): super().__init__(one)
    def hook(self, request): return self.kept, self.config.size
    def added(self): return self.hook
def use(sub: "Sub | None", sure: Sub): return sub.name, sure.config.size
"""


def ours(tmp_path: Path, text: str = MINE) -> Touches:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    return touches(tmp_path)["mine"]


def test_a_seam_is_what_vllm_has_too(tmp_path: Path) -> None:
    known = seams(ours(tmp_path), [small().shape])
    chains = {kind: {seam.touch.chain for seam in known if seam.kind is kind} for kind in FOUND}
    assert chains == {
        Kind.IMPORT: {("Sub",), ("helper",)},
        Kind.OVERRIDE: {("__init__",), ("hook",)},
        Kind.USE: {("__init__",), ("kept",), ("config",), ("hook",)},
        Kind.READ: {("name",), ("config", "size")},
    }
    assert list(differences(known, small(), small())) == []
    assert list(misfits(known, small().shape)) == []


@pytest.mark.parametrize(
    ("base", "deep", "name", "words"),
    [
        (BASE.replace("(self, request)", "(self, request, more)"), DEEP, "Sub.hook", "more"),
        (BASE.replace("(self, request)", "(self, request=None)"), DEEP, "Sub.hook", "request=None"),
        (BASE.replace("def hook", "def renamed"), DEEP, "Sub.hook", "not there in 9.9"),
        (BASE.replace("self.kept", "self.lost"), DEEP, "Sub.kept", "not there"),
        (BASE.replace("def name", "def label"), DEEP, "Sub.name", "not there"),
        (BASE.replace("two=2", "two"), DEEP, "base.helper", "two=2"),
        (BASE.replace("def helper", "def helped"), DEEP, "base.helper", "not there"),
        (BASE, DEEP.replace("size", "length"), "Sub.config.size", "not there"),
        (BASE, DEEP.replace("int = 1", "str = 1"), "Sub.config.size", "str = 1"),
    ],
)
def test_a_change_in_vllm_is_found(tmp_path: Path, base: str, deep: str, name: str, words: str) -> None:
    mine, other = small(), small(base, deep)
    known = seams(ours(tmp_path), [mine.shape, other.shape])
    found = {seam.rpartition("vllm.")[2]: line for seam, line in differences(known, mine, other)}
    assert words in next(line for seam, line in found.items() if seam.replace(":", ".").endswith(name))


def test_what_no_version_has_is_a_difference() -> None:
    gone = Seam(Kind.UNSEEN, Touch("vllm.base:Sub", ("never",)))
    assert [name for name, _ in differences([gone], small(), small())] == ["vllm.base:Sub.never"]


def test_another_text_inside_of_a_method_is_a_difference_but_comments_are_none() -> None:
    inside = Seam(Kind.INSIDE, Touch("vllm.base:helper", ()))
    commented = BASE.replace('return "text"', '\n    "A docstring."\n    return "text"  # said')
    assert list(differences([inside], small(), small(commented))) == []
    assert list(differences([inside], small(), small(BASE.replace("text", "words"))))


def test_a_class_that_is_constructed_is_compared_by_what_it_takes(tmp_path: Path) -> None:
    found = ours(tmp_path, "from vllm.base import Sub\nmade = Sub(1)\n")
    before, after = small(), small(BASE.replace("__init__(self, one)", "__init__(self, one, two)"))
    known = seams(found, [before.shape])
    assert list(differences(known, before, after)) == []
    before, after = replace(before, called=found.called), replace(after, called=found.called)
    assert ["two)" in line for _, line in differences(known, before, after)] == [True]


@pytest.mark.parametrize(
    ("mine", "theirs", "fitting"),
    [
        (("self", "a"), ("self", "a"), True),
        (("self", "a"), ("self", "b"), False),
        (("self", "a"), ("self",), False),
        (("self",), ("self", "a"), False),
        (("self", "a", "*args", "**kwargs"), ("self", "a", "b", "c"), True),
        (("self", "z", "*args"), ("self", "a", "b"), False),
    ],
)
def test_what_vllm_passes_must_fit(mine: tuple[str, ...], theirs: tuple[str, ...], fitting: bool) -> None:
    assert fits(Touch("vllm.base:Sub", ("hook",), mine), theirs) is fitting


def test_of_a_wheel_the_python_files_are_kept(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for name in ("vllm/a.py", "vllm/b/c.py", "vllm/_C.so", "vllm-1.dist-info/RECORD"):
            archive.writestr(name, "text")
    unpack(tmp_path / "vllm.whl", tmp_path / "kept")
    kept = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert kept == {"vllm/a.py", "vllm/b/c.py"}
    assert fetched("kept", tmp_path) == tmp_path / "kept"


def test_a_wheel_that_cannot_be_fetched_is_an_error_with_pips_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotFetchedError, match=r"vLLM 0\.0\.0 could not be fetched(.|\n)*No matching distribution"):
        fetched("0.0.0", tmp_path)
    assert not (tmp_path / "0.0.0").exists()
