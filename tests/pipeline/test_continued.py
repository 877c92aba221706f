from __future__ import annotations

import pytest

from pipeline.continued import WHERE, continue_with
from pipeline.keys import parts_of
from pipeline.project import Project
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run
from pipeline.spec.sections import Train

from .conftest import NewRun


def test_a_run_goes_on_elsewhere_and_is_known_by_what_it_began_with(project: Project, new_run: NewRun) -> None:
    run = new_run()
    before = parts_of("train", run.config, project, {})
    found = continue_with(run, ["train.processes=4", "train.restarts=9"])
    assert (found.config.train.processes, found.config.train.restarts) == (4, 9)
    assert parts_of("train", found.planned, project, {}) == before, "an unchanged rerun reuses what it computes"
    assert Run(run.path).config.train.processes == 4, "the training processes read it there"


def test_the_newest_word_counts(new_run: NewRun) -> None:
    run = continue_with(continue_with(new_run(), ["train.processes=4", "train.nodes=2"]), ["train.processes=3"])
    assert run.read().continued == ("train.nodes=2", "train.processes=3")
    assert (run.config.train.processes, run.config.train.nodes) == (3, 2)


@pytest.mark.parametrize("word", ["train.lr=1", "train.checkpoints=elsewhere", "deploy.port=1", "epochs=3"])
def test_what_a_run_computes_stays(word: str, new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=r"says what the run computes.* starts a new one"):
        continue_with(run, ["train.processes=4", word])
    assert run.read().continued == ()


def test_a_value_that_is_none_is_not_put_on_record(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=r"train\.processes"):
        continue_with(run, ["train.processes=many"])
    assert run.read().continued == ()


def test_every_word_that_may_change_is_one_of_the_section() -> None:
    assert set(WHERE) <= Train.model_fields.keys()
