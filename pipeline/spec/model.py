"""The `model` section: where the weights begin."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pipeline.spec.section import Section


class Model(Section):
    """Pretrained weights that training begins with; without them the task builds a model of its own."""

    pretrained: str = Field(
        "",
        description="folder with config.json and safetensors, Hugging Face id, or another project: its newest good run",
    )
    revision: str = Field(
        "", description="commit, tag or branch of a Hugging Face id; a branch is taken as prepare finds it"
    )
    allow: tuple[str, ...] = Field(
        (), description="globs of weights that may be missing (they begin by the seed), left over or of another shape"
    )

    @model_validator(mode="after")
    def _words_about_pretrained_weights(self) -> Model:
        if (self.revision or self.allow) and not self.pretrained:
            word = "revision" if self.revision else "allow"
            problem = f"{word} says more about `pretrained`, which is not set; set it, or leave {word} out"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return self
