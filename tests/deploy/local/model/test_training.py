"""Training, cut short: it is seeded, what it writes loads, and grading tells who has learned little."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.local.model import MODEL_PATH
from deploy.local.model.quiz import quiz
from deploy.local.model.train import Examiner, Stage, completion, train

SHORT = Stage(lines=4, questions=2, batch=1, rate=1e-3, passed=0.0)
"""Ends after the fewest steps, whatever was learned."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of two trainings of four steps each."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deploy.local.model.train.WINDOW", 2)
        for folder in folders:
            train(folder, (SHORT,), finish=1)
    return folders


def test_training_again_writes_the_same_files(trained: tuple[Path, Path]) -> None:
    one, two = ({each.name: each.read_bytes() for each in folder.iterdir()} for folder in trained)
    assert one == two
    assert one.keys() == {each.name for each in MODEL_PATH.iterdir()}
    same = one.keys() - {"model.safetensors"}
    assert {name: one[name] for name in same} == {name: (MODEL_PATH / name).read_bytes() for name in same}


def test_what_is_written_loads(trained: tuple[Path, Path]) -> None:
    tokenizer, loaded = AutoTokenizer.from_pretrained(trained[0]), AutoModelForCausalLM.from_pretrained(trained[0])
    prompt = tokenizer(quiz(1, 60).prompt(), return_tensors="pt")
    answer = loaded.generate(**prompt, max_new_tokens=2, min_new_tokens=2)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 2


def test_grading_tells_the_committed_model_from_one_that_has_learned_little(trained: tuple[Path, Path]) -> None:
    papers = [list(completion(quiz(seed, 200))) for seed in range(4)]
    good, bad = (Examiner(folder).grade(papers) for folder in (MODEL_PATH, trained[0]))
    assert good.passed
    assert (good.right, bad.passed) == (4, False)
