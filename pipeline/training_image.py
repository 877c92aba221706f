"""The image of the training pods: made of a project as it stands, beside its runs, and used until either changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from k8s.training_context import content_of, notes_of, write_training_context
from pipeline.images import Order, base_name, make, recipe_of
from pipeline.project import Project
from pipeline.spec.config import Config
from pipeline.spec.files import write_json

_FOLDER = "images"


def package_training(
    project: Project, config: Config, env: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Tagged by what its context holds: our source, the project's, and the versions of what both need."""
    content = content_of(project.root, (config.task, config.codec), config.package.include)
    if content.missing:
        say(f"note: not installed here, and so not in the image: {', '.join(content.missing)}")
    recipe = recipe_of(config.package, project.root, config.train.device == "cuda")
    name = f"{base_name(config)}-train"
    partial = project.runs / _FOLDER / "train.partial"
    context = write_training_context(config.name, project.root, content, recipe, partial / "context")
    final = partial.with_name(f"train-{context[:12]}")
    earlier = _earlier(final, push=config.package.push)
    if earlier is not None:
        say(f"unchanged: {earlier['image']}")
        shutil.rmtree(partial)
        return earlier
    order = Order(f"{name}:{context[:12]}", partial, final, None, notes_of(config.name, content), needed=True)
    record = {"image": order.image, "project": content.digest, "context": context, "base": recipe.base}
    record |= {"accelerator": recipe.accelerator, **make(config, order, recipe.accelerator, None, env)}
    write_json(partial / "image.json", record)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for built in final.parent.glob("train-*/context"):  # of what was made before, its record is enough
        if built.parent != final:
            shutil.rmtree(built)
    say(f"train.image={record['reference'] or record['image']}")
    return record


def _earlier(final: Path, push: bool) -> dict[str, Any] | None:
    """What was made of the very same context, if it went as far as is asked for now."""
    path = final / "image.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record if record["image_digest"] and (record["reference"] or not push) else None
