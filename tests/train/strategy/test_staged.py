"""Stages on several processes, trained by real ones."""

from __future__ import annotations

import pytest

from pipeline.spec.errors import ConfigError

from ..conftest import Project, equal, failure, weights
from .conftest import assert_close, losses, resumed, trained


@pytest.mark.parametrize(("processes", "schedule"), [(2, "gpipe"), (4, "1f1b")])
def test_two_stages_train_the_weights_of_one_process(transformer: Project, processes: int, schedule: str) -> None:
    """Slices of 3 and 4 samples as three micro-batches, of two sizes in some steps; two copies with 4 processes."""
    words = {"accumulate": 3, "epochs": 1}
    many = trained(transformer, "many", processes, pipeline=2, pipeline_schedule=schedule, **words)
    assert_close(many, trained(transformer, "one", 1, **words))


def test_a_pipeline_goes_on_bit_for_bit_and_its_checkpoint_is_that_of_one_process(project: Project) -> None:
    """With running statistics and dropout; from the checkpoint of the pipeline, and to it from that of one process."""
    project.replace("nn.Tanh()", "nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.0)")
    words = {"accumulate": 2, "epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9}
    one = trained(project, "one", 1, **words)
    whole = resumed(project, one, "whole", 2, 2, pipeline=2, **words)
    assert_close(whole, one)
    assert_close(resumed(project, whole, "back", 4, 1, **words), one)
    project.replace("nn.Dropout(0.0)", "nn.Dropout(0.2)")
    dropped = trained(project, "dropped", 2, pipeline=2, **words)
    assert equal(weights(resumed(project, dropped, "cut", 2, 2, pipeline=2, **words)), weights(dropped))


def test_in_bf16_a_pipeline_follows_fp32(transformer: Project) -> None:
    words = {"pipeline": 2, "accumulate": 2, "epochs": 1}
    half, whole = (trained(transformer, kind, 2, precision=kind, **words) for kind in ("bf16", "fp32"))
    assert losses(half) == pytest.approx(losses(whole), rel=0.02)


def test_a_model_whose_stages_would_need_more_than_the_next_unit_is_told_is_refused(transformer: Project) -> None:
    transformer.replace("x = layer(x)", "x = layer(x)\n            kept = x if layer is self.layers[0] else kept")
    transformer.replace("self.norm(x)", "self.norm(x + kept)")
    run = transformer.run("run", pipeline=2, accumulate=2)
    assert transformer.train(run, 2).returncode != 0
    assert isinstance(failure(run), ConfigError)
    assert "more goes from stage to stage than each unit hands to the next" in str(failure(run))


BEGINS = """
    def parallelize(self, model, mesh):
        assert mesh.mesh_dim_names == ("pipeline",)
        return {names}

    def model("""


def test_the_task_may_name_where_stages_begin(transformer: Project) -> None:
    transformer.replace("\n    def model(", BEGINS.format(names=["norm"]))
    words = {"accumulate": 2, "epochs": 1}
    named = trained(transformer, "named", 2, pipeline=2, **words)
    assert_close(named, trained(transformer, "one", 1, **words))


def test_names_of_beginnings_that_are_none_are_refused(transformer: Project) -> None:
    transformer.replace("\n    def model(", BEGINS.format(names=["layers.7"]))
    run = transformer.run("run", pipeline=2, accumulate=2)
    assert transformer.train(run, 2).returncode != 0
    assert "parallelize() names layers.7" in str(failure(run))
