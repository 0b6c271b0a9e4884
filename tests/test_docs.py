"""The documentation: links lead somewhere, and the files, functions, modules and targets that it names exist."""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
CHART = ROOT / "helm/pdproxy/README.md"
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES = [README, *GUIDES, CHART, *sorted(ROOT.glob("docs/**/*.md"))]
CHANGELOG = ROOT / "CHANGELOG.md"
"""The changelog names files that are gone; its links must work."""
CODE_PAGES = [ROOT / "CONTRIBUTING.md", ARCHITECTURE, *sorted(ROOT.glob("docs/decisions/*.md"))]
"""Pages in which every Python file is ours."""
TEXTS = frozenset({".py", ".yaml", ".yml", ".md", ".txt", ".html", ".tpl", ".toml", ".json", ".Dockerfile"})
SHORT = (ROOT, ROOT / "pdproxy", ROOT / "connector")
"""Where a path in a page about code begins."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its code blocks, whose brackets are no links."""
    return re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files and headings of this repository to which a page links."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield (page.parent / file).resolve() if file else page, anchor


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page, as GitHub names them."""
    return frozenset(map(slug, re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)))


def slug(heading: str) -> str:
    """A heading as links name it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def names_in(file: Path) -> frozenset[str]:
    """The classes, functions and constants of a file; what a class has, as `Class.name`."""

    def names(body: Sequence[ast.stmt], within: str = "") -> Iterator[str]:
        for node in body:
            match node:
                case ast.ClassDef():
                    yield within + node.name
                    yield from names(node.body, f"{within}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield within + node.name
                case ast.Assign():
                    yield from (within + each.id for each in node.targets if isinstance(each, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield within + name

    return frozenset(names(ast.parse(text_of(file)).body))


def product_names() -> frozenset[str]:
    files = (file for folder in ("pdproxy", "connector") for file in (ROOT / folder).rglob("*.py"))
    return frozenset().union(*map(names_in, files))


def missing(spans: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The `path`s and `path::Name`s that stand in none of the folders."""

    def is_there(span: str) -> bool:
        path, _, name = span.partition("::")
        files = [folder / path for folder in folders if (folder / path).exists()]
        return any(not name or name in names_in(file) for file in files)

    return [span for span in spans if not is_there(span)]


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=name_of)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert [name_of(file) for file, _ in links(page) if not file.exists()] == []
    dead = [(name_of(file), anchor) for file, anchor in links(page) if anchor and anchor not in anchors(file)]
    assert dead == []


def test_every_picture_is_shown() -> None:
    shown = {target for page in PAGES for target, _ in links(page)}
    pictures = {path for kind in ("*.svg", "*.png") for path in (ROOT / "docs").glob(kind)}
    assert {name_of(picture) for picture in pictures - shown} == set()


def mentions() -> Iterator[tuple[str, Path, str]]:
    """The pages that other files name, such as comments, messages and alerts: who names it, the page, the heading."""
    folders = ("pdproxy", "connector", "deploy", "helm", "tests", ".github")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in TEXTS]
    for file in [*files, ROOT / "compose.yaml", ROOT / ".env.example", ROOT / "Makefile", ROOT / "pyproject.toml"]:
        for page, anchor in re.findall(r"(?<![\w/.])docs/([\w/-]+\.md)(?:#([\w-]+))?", text_of(file)):
            yield name_of(file), ROOT / "docs" / page, anchor


def test_pages_that_other_files_name_exist() -> None:
    named = list(mentions())
    assert len(named) > 50
    gone = [(name, name_of(page), anchor) for name, page, anchor in named if not page.exists()]
    assert gone == []
    assert [(name, anchor) for name, page, anchor in named if anchor and anchor not in anchors(page)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_modules_of_this_repository_exist(page: Path) -> None:
    paths = re.findall(r"(?<![\w/.-])((?:pdproxy|connector|deploy|tests)/[\w/.-]+\.\w+(?:::[\w.]+)?)", text_of(page))
    assert missing([path for path in paths if "::test_" not in path], [ROOT]) == []
    modules = re.findall(r"python -m ((?:pdproxy|connector|deploy|tests)[\w.]*)", text_of(page))
    files = [module.rstrip(".").replace(".", "/") for module in modules]
    assert [
        file for file in files if missing([f"{file}.py"], [ROOT]) and missing([f"{file}/__main__.py"], [ROOT])
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    asked = re.findall(r"(?:`|^)make ([a-z][\w-]*)", text_of(page), re.MULTILINE)
    assert set(asked) <= targets


@pytest.mark.parametrize("page", CODE_PAGES, ids=name_of)
def test_pages_about_code_name_files_and_functions_that_exist(page: Path) -> None:
    spans = re.findall(r"`([\w./-]+\.(?:py|toml|yml)(?:::[\w.]+)?)`", prose(page))
    assert missing(spans, SHORT) == []


def test_a_file_or_function_that_is_gone_is_found() -> None:
    gone = ["orchestration/relay.py::Relay.answered_by", "orchestration/relays.py"]
    assert missing(["orchestration/relay.py::Relay.read", *gone], SHORT) == gone


def section(heading: str) -> str:
    """A section of the page on architecture."""
    return text_of(ARCHITECTURE).partition(f"## {heading}\n")[2].partition("\n## ")[0]


def parts(folder: str) -> set[str]:
    """The rooms of a folder, and the modules that stand in none."""
    inside = [path for path in (ROOT / folder).iterdir() if not path.name.startswith("__")]
    modules = {path.name for path in inside if path.suffix == ".py"}
    return modules | {f"{path.name}/" for path in inside if (path / "__init__.py").exists()}


@pytest.mark.parametrize("folder", ["pdproxy", "connector"])
def test_every_room_and_module_has_its_row(folder: str) -> None:
    table = section("Rooms").partition(f"| `{folder}/` |")[2].partition("\n\n")[0]
    assert parts(folder) - set(re.findall(r"`([\w/]+(?:/|\.py))`", table)) == set()


def questions() -> list[list[str]]:
    """The rows of the table of questions: question, page, file, function, answer."""
    rows = [line for line in section("Ten questions").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def test_there_are_ten_questions() -> None:
    assert len(questions()) == 10


@pytest.mark.parametrize("row", questions(), ids=lambda row: row[0])
def test_each_question_is_answered_within_three_steps_from_the_readme(row: list[str]) -> None:
    _, page, file, function, answer = row
    page_target, file_target = (re.fullmatch(r"\[.+\]\((.+)\)", cell) for cell in (page, file))
    assert page_target is not None
    assert file_target is not None
    step = (ARCHITECTURE.parent / page_target[1].partition("#")[0]).resolve()
    assert step in {linked for linked, _ in links(README)}
    page_alone = text_of(step).replace(section("Ten questions"), "")
    assert Path(file_target[1]).name in re.findall(r"[\w.]+\.py", page_alone), "the page leads to the file"
    assert function.strip("`") in names_in((ARCHITECTURE.parent / file_target[1]).resolve())
    assert set(re.findall(r"`([A-Z]\w+\.\w+)`", answer)) <= product_names()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_begins_with_a_sentence_that_a_search_can_show(page: Path) -> None:
    first = re.split(r"^## ", text_of(page).partition("\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert re.search(r"^[\w*`\[(]", first, re.MULTILINE), "only a title"


HIDDEN = re.compile(r'^ *(?:\w[^"]*)?r?"""(?:Of|What|Whatever|Whoever|Whose|It|That|Such) ', re.MULTILINE)
"""Openings that hide who or what a sentence is about."""
TESTS = [folder for folder in sorted((ROOT / "tests").iterdir()) if any(folder.glob("*.py"))]


@pytest.mark.parametrize("folder", ["pdproxy", "connector", "deploy", *map(name_of, TESTS)])
def test_docstrings_begin_with_their_subject(folder: str) -> None:
    files = {name_of(file): text_of(file) for file in sorted((ROOT / folder).rglob("*.py"))}
    assert [f"{name}: {found[0].strip()}" for name, text in files.items() for found in HIDDEN.finditer(text)] == []


def test_a_docstring_that_hides_its_subject_is_found() -> None:
    for text in ('"""What is kept."""', '    """Of the node."""', 'r"""It waits."""', 'X = 1\n"""Such as this."""'):
        assert HIDDEN.search(text)
    for text in ('"""The node\'s name."""', '"""Whether it waits."""', '"""Items of the list."""'):
        assert not HIDDEN.search(text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_with_prompts_are_marked_so_that_commands_are_copied_alone(page: Path) -> None:
    blocks = re.findall(r"^ *```(\w*)\n *(.*)$", text_of(page), re.MULTILINE)
    assert [line for kind, line in blocks if line.startswith("$ ") and kind != "console"] == []


SENTENCE = re.compile(r"(?:^|(?<=[.!?:] )|(?<=\*\*))(?:Of|What|Whatever|Whoever) [^.?!:]*[.?!:]?")
"""A sentence that hides its subject; "It" and "That" may have one in the sentence before."""


def passages(text: str) -> Iterator[str]:
    """The paragraphs, items and cells of a page, each on one line; headings are left out."""
    for block in re.split(r"\n\s*\n|\n(?= *(?:-|\d+\.) )|\n(?=[|#])", text):
        line = " ".join(block.split())
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split(" | "))
        elif not line.startswith("#"):
            yield re.sub(r"^(?:-|\d+\.) ", "", line)


def hidden_subjects(text: str) -> list[str]:
    """The sentences of a page that begin with "Of" or "What" and are no questions."""
    found = (sentence for passage in passages(text) for sentence in SENTENCE.findall(passage))
    return [sentence for sentence in found if not sentence.endswith("?")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_begin_with_their_subject(page: Path) -> None:
    assert hidden_subjects(prose(page)) == []


def test_a_sentence_that_hides_its_subject_is_found() -> None:
    text = "So:\n- Of these one.\n\n**What it costs.** Little. Whatever\ncomes stays. What? No.\n\n| a | What b |"
    assert hidden_subjects(text) == ["Of these one.", "What it costs.", "Whatever comes stays.", "What b"]
    assert hidden_subjects("# What follows\n\nSee what follows. Often so: two.") == []
