"""The images' environments, made line by line as their Dockerfiles say, run the services of compose.yaml."""

from pathlib import Path

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.stack import logs_of
from deploy.local.supervise import Supervisor
from tests.deploy.building import build
from tests.deploy.dockerfile import FOLDER
from tests.e2e.composed import chat, start

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_chat_is_answered_from_clean_environments(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("cpu-node", "proxy", "home")}
    for folder in folders.values():
        folder.mkdir()
    nodes, proxy = (build(FOLDER / f"{name}.Dockerfile", folders[name]) for name in ("cpu-node", "proxy"))
    question = quiz(903, 900)
    with Supervisor(logs_of("e2e-images")) as supervisor:
        composed = start(supervisor, folders["home"], nodes, proxy)
        with chat(composed, question) as told:
            assert "".join(told) == question.answer
