"""Pipeline stages, trained by real processes."""

from __future__ import annotations

import pytest
import torch

from pipeline.system.errors import ConfigError

from ..conftest import Project, equal, failure
from .conftest import assert_close, checkpoint, resumed, trained

STAGE_STARTS = """
    def parallelize(self, model, mesh):
        assert mesh.mesh_dim_names == ("pipeline",)
        return {names}

    def model("""


@pytest.mark.long  # test_together.py has the same for known families
def test_stages_train_the_weights_of_one_process(transformer: Project) -> None:
    """Slices of 3 and 4 samples as three micro-batches, of two sizes in some steps; two copies with 4 processes."""
    settings = {"accumulate": 3, "epochs": 1}
    one = trained(transformer, "one", 1, **settings)
    assert_close(trained(transformer, "two", 2, pipeline_parallel=2, **settings), one)
    transformer.replace("\n    def model(", STAGE_STARTS.format(names=["norm"]))  # the last stage starts there
    assert_close(trained(transformer, "four", 4, pipeline_parallel=2, **settings), one)


@pytest.mark.long
def test_pipeline_resumes_from_the_checkpoint_of_one_process(project: Project) -> None:
    """Running statistics and optimizer state, too, though each process only has those of its stage."""
    project.replace("nn.Tanh()", "nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8)")
    settings = {"accumulate": 2, "epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9}
    one = trained(project, "one", 1, **settings)
    two = resumed(project, one, "two", 2, 2, pipeline_parallel=2, **settings)
    torch.testing.assert_close(checkpoint(two, 5), checkpoint(one, 5), rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_interrupted_pipeline_resumes_bit_for_bit(project: Project) -> None:
    project.replace("nn.Tanh()", "nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.2)")
    settings = {"pipeline_parallel": 2, "accumulate": 2, "epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9}
    whole = trained(project, "whole", 2, **settings)
    assert equal(checkpoint(resumed(project, whole, "resumed", 2, 2, **settings), 5), checkpoint(whole, 5))


def test_model_whose_stages_need_more_than_their_arguments_is_refused(transformer: Project) -> None:
    transformer.replace("x = layer(x)", "x = layer(x)\n            kept = x if layer is self.layers[0] else kept")
    transformer.replace("self.norm(x)", "self.norm(x + kept)")
    run = transformer.run("run", pipeline_parallel=2, accumulate=2)
    assert transformer.train(run, 2).returncode != 0
    assert isinstance(failure(run), ConfigError)
    assert "its output needs values of other stages besides those arguments of layers.2 that have" in str(failure(run))
