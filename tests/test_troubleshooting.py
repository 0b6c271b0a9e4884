"""The pages of symptoms and incidents: the product still says what they quote; each reason, alert and question has an
entry."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from connector.ticket_fields import RefusalReason
from pdproxy.admin.next_step import DOCS, PAGE
from pdproxy.observe.labels import Rejection
from pdproxy.reasons import LocalReason, NoNodeReason
from tests.test_docs import ROOT, prose, slug, text_of

TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
SAYS = r"^\| it says \|.*\n\|[-|]+\n((?:\|.*\n)+)"
"""The tables whose first column is quoted from the product."""
OTHER_CELLS = {"What clients get": 1, "Requests are turned away": 1}
"""Sections whose tables have the quotation in another column."""


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of a page, up to the next one."""
    parts = re.split(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def rows_of(text: str) -> list[list[str]]:
    """The rows of all tables of a text, without their heads."""
    tables = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n?)+)", text, re.MULTILINE)
    return [cells(row) for table in tables for row in table.splitlines()]


def quotations() -> Iterator[str]:
    """The words that the page of symptoms quotes from the product; `…` stands for what differs."""
    for table in re.findall(SAYS, prose(TROUBLESHOOTING), re.MULTILINE):
        for row in table.splitlines():
            yield from re.findall(r"`([^`]+)`", cells(row)[0])
    for heading, column in OTHER_CELLS.items():
        for row in rows_of(sections(TROUBLESHOOTING)[heading]):
            yield from re.findall(r"`([^`]+)`", row[column])


@functools.cache
def spoken() -> str:
    """All texts of the product: of Python its string constants, each placeholder a line break; the page as it is."""
    files = [file for folder in ("pdproxy", "connector") for file in (ROOT / folder).rglob("*.py")]
    texts = [text for file in files for text in constants(ast.parse(text_of(file)))]
    told = [re.sub(r"%[-#0-9.]*[sdrgf]|\{[^{}]*\}", "\n", text) for text in texts]
    return "\n\n".join([*told, text_of(ROOT / "pdproxy/admin/live.html")])


def constants(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, but for its docstrings."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in (each for each in ast.walk(tree) if id(each) not in told):
        match node:
            case ast.JoinedStr(values=values):
                yield "\n".join(str(each.value) for each in values if isinstance(each, ast.Constant))
            case ast.Constant(value=str(text)):
                yield text


def unspoken(quoted: str) -> list[str]:
    """The parts of a quotation that stand nowhere in the product."""
    parts = [part for part in quoted.split("…") if re.search(r"\w", part)]
    return [part for part in parts if part not in spoken() and part.strip() not in spoken()]


def test_what_the_page_of_symptoms_quotes_is_said_by_the_product() -> None:
    quoted = list(quotations())
    assert len(quoted) > 100
    assert [each for each in quoted if unspoken(each)] == []


def test_a_quotation_that_the_product_does_not_say_any_more_is_found() -> None:
    assert unspoken("no decode node serves any more: requests are refused with 503") == []
    assert unspoken("release of … on … failed: …") == []
    assert unspoken("release of … on … went wrong: …") == [" went wrong: "]


def first_cells(heading: str) -> set[str]:
    """The names in code type in the first column of a section's tables."""
    return {name for row in rows_of(sections(TROUBLESHOOTING)[heading]) for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_reason_has_its_entry_among_the_symptoms() -> None:
    assert first_cells("Why a request was local") == set(LocalReason)
    assert first_cells("Requests are turned away") == set(Rejection)
    assert first_cells("PdproxyTicketsRefused") == set(RefusalReason)
    codes = {cell.partition(" ")[2] for cell in first_cells("What clients get")} | first_cells("What clients get")
    assert set(NoNodeReason) <= codes


def codes() -> set[str]:
    """The codes of all errors that the proxy itself answers with."""
    told = [text_of(file) for file in (ROOT / "pdproxy").rglob("*.py")]
    return {code for text in told for code in re.findall(r"\bcode=\"(\w+)\"", text)}


def test_every_code_of_an_error_has_its_row() -> None:
    rows = "\n".join(row[0] for row in rows_of(sections(TROUBLESHOOTING)["What clients get"]))
    assert len(codes()) > 20
    ours = codes() | set(Rejection) - {each for each in Rejection if each.endswith("_rate")} | set(NoNodeReason)
    assert {code for code in ours if not re.search(rf"\b{code}`", rows)} == set()


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load(text_of(ROOT / "deploy/prometheus/alerts.yml"))
    return [rule for group in rules["groups"] for rule in group["rules"]]


def test_every_alert_leads_to_its_section() -> None:
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"{DOCS}/{PAGE}#{rule['alert'].lower()}"
    told = set(re.findall(r"^### (Pdproxy\w+)$", text_of(TROUBLESHOOTING), re.MULTILINE))
    assert told == {rule["alert"] for rule in alerts()}


def test_every_alert_has_a_command_that_proves_it() -> None:
    command = re.compile(r"^\$ |`(?:curl|grep|top|pdproxy check)\b", re.MULTILINE)
    names = [rule["alert"] for rule in alerts()]
    assert [name for name in names if not command.search(section_at(TROUBLESHOOTING, name.lower()))] == []


def on_call() -> list[list[str]]:
    return rows_of(sections(TROUBLESHOOTING)["Ten questions on call"])


def test_each_question_on_call_has_a_link_that_answers_it_with_a_command() -> None:
    """A section answers where it has a command or a table, itself or in one below it."""
    assert len(on_call()) == 10
    for question, _, answer, in_a_line in on_call():
        assert in_a_line
        found = re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", answer)
        assert found, question
        for file, anchor in found:
            page = ROOT / "docs" / file if file else TROUBLESHOOTING
            assert re.search(r"^\$ |^\| |`curl", section_at(page, anchor), re.MULTILINE), (question, anchor)


def section_at(page: Path, anchor: str) -> str:
    """A section with those below it."""
    text = text_of(page)
    heads = [match for match in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE) if slug(match[2]) == anchor]
    [head] = heads
    end = re.compile(rf"^#{{1,{len(head[1])}}} ", re.MULTILINE).search(text, head.end())
    return text[head.end() : end.start() if end else len(text)]
