"""Where a command works: the project folder with `pipe.yaml`, and the folder of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.spec.config import Config, load_config
from pipeline.spec.errors import ConfigError


@dataclass(frozen=True)
class Project:
    root: Path  # every step runs here
    runs: Path
    embedded: bool = False  # the digits example, because the folder has no pipe.yaml

    def config(self, overrides: Sequence[str] = ()) -> Config:
        return load_config(self.root / "pipe.yaml", overrides)


def find_project(folder: Path) -> Project:
    """The folder itself, or the embedded example when it has no `pipe.yaml`."""
    folder = folder.resolve()
    if (folder / "pipe.yaml").is_file():
        return Project(folder, folder / "runs")
    return Project(example("digits"), folder / "runs", embedded=True)


def example(name: str) -> Path:
    """An example that ships with `pipe`: beside the packages in a checkout, inside ours when installed."""
    here = Path(__file__).resolve().parent
    for place in (here.parent / "examples" / name, here / "examples" / name):
        if (place / "pipe.yaml").is_file():
            return place
    raise ConfigError(f"no example {name!r} in this installation")
