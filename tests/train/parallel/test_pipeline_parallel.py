"""Stages on several processes, trained by real ones."""

from __future__ import annotations

import pytest
import torch

from pipeline.contract.errors import ConfigError

from ..conftest import Project, equal, failure
from .conftest import assert_close, checkpoint, losses, resumed, trained

BEGINS = """
    def parallelize(self, model, mesh):
        assert mesh.mesh_dim_names == ("pipeline",)
        return {names}

    def model("""


def test_two_stages_train_the_weights_of_one_process(transformer: Project) -> None:
    """Slices of 3 and 4 samples as three micro-batches, of two sizes in some steps; two copies with 4 processes."""
    words = {"accumulate": 3, "epochs": 1}
    one = trained(transformer, "one", 1, **words)
    assert_close(trained(transformer, "two", 2, pipeline=2, pipeline_schedule="gpipe", **words), one)
    half = trained(transformer, "half", 2, pipeline=2, precision="bf16", **words)
    assert losses(half) == pytest.approx(losses(one), rel=0.02)
    transformer.replace("\n    def model(", BEGINS.format(names=["norm"]))  # the last stage is that and what follows
    assert_close(trained(transformer, "four", 4, pipeline=2, **words), one)


def test_a_pipeline_goes_on_from_the_checkpoint_of_one_process_and_leaves_the_same(project: Project) -> None:
    """Running statistics and the state of the optimizer too, though each process has those of its stage."""
    project.replace("nn.Tanh()", "nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8)")
    words = {"accumulate": 2, "epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9}
    one = trained(project, "one", 1, **words)
    two = resumed(project, one, "two", 2, 2, pipeline=2, **words)
    torch.testing.assert_close(checkpoint(two, 5), checkpoint(one, 5), rtol=1e-3, atol=1e-4)


def test_a_pipeline_that_was_cut_goes_on_bit_for_bit(project: Project) -> None:
    project.replace("nn.Tanh()", "nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.2)")
    words = {"pipeline": 2, "accumulate": 2, "epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9}
    whole = trained(project, "whole", 2, **words)
    assert equal(checkpoint(resumed(project, whole, "cut", 2, 2, **words), 5), checkpoint(whole, 5))


def test_a_model_whose_stages_would_need_more_than_the_next_unit_is_told_is_refused(transformer: Project) -> None:
    transformer.replace("x = layer(x)", "x = layer(x)\n            kept = x if layer is self.layers[0] else kept")
    transformer.replace("self.norm(x)", "self.norm(x + kept)")
    run = transformer.run("run", pipeline=2, accumulate=2)
    assert transformer.train(run, 2).returncode != 0
    assert isinstance(failure(run), ConfigError)
    assert "more goes from stage to stage than each unit hands to the next" in str(failure(run))
