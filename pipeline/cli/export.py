"""The command `pipe export`: a project, and its verified bundle, for a model that exists already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit
from pipeline.cli.project import model_name
from pipeline.cli.run import run_facts, run_project
from pipeline.contract.run import Run
from pipeline.given.write import write_project
from pipeline.history import find_project
from pipeline.system.errors import ConfigError
from pipeline.system.files import read_object

SOURCES = "folder of Hugging Face, timm:NAME, torchvision:NAME, FILE.py:CLASS, a .pt2 or an .onnx file"
_FILES = (".onnx", ".pt2")
_LIBRARIES = ("timm:", "torchvision:")

To = Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="Folder of the project to write.")]
Weights = Annotated[str, typer.Option("--weights", metavar="FILE", help="Its weights: safetensors, or a state dict.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="NAME=TYPE[AXES]", help="An input, as x=float32[batch,3,224,224], or an .npz file."
    ),
]


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=f"The model: {SOURCES}.")],
    to: To = None,
    weights: Weights = "",
    inputs: Inputs = None,
    data: Annotated[
        Path | None, typer.Option(exists=True, help="Labelled data: a folder of each class, or a table with `label`.")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="SOURCE", help="A model, or its bundle, to compare with on --data.")
    ] = "",
    trust_remote_code: Annotated[
        bool, typer.Option(help="Copy the code of the model's folder into the project, and run it.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Write a project for a model that exists already, and make its verified bundle."""
    options: dict[str, Any] = {"trusts_code": trust_remote_code, "data": str(data.resolve()) if data else ""}
    if baseline and not data:
        raise ConfigError("--baseline: is compared on labelled data; to fix it: add --data")
    if baseline:
        options["baseline"] = str(_baseline_bundle(baseline, to or _default_folder(source)).resolve())
    run = export_source(source, to, weights, inputs or (), **options)
    facts, parity = run_facts(run), read_object(run.output("export") / "parity.json")
    folder, rows = run.runs.parent, [*parity["runs"], *parity["coverage"]]
    facts |= {"folder": str(folder), "bundle": str(run.bundle_path)}
    largest = max(row["max_abs_error"] for row in rows)
    lines = [
        f"equal to the model on {parity['samples']} samples and at every size; largest difference {largest:.2g}",
        f"verdict: {facts['verdict']}",
        f"serve it: pipe -C {folder} serve",
    ]
    emit(output, facts, "\n".join(lines))


def is_source(target: str) -> bool:
    """Return whether a target of `pipe serve` is a model, and not a run or a bundle."""
    path = Path(target.partition(":")[0])
    is_folder = (path / "config.json").is_file() or (path / "modules.json").is_file()
    return target.startswith(_LIBRARIES) or path.suffix in _FILES or ".py:" in target or is_folder


def export_source(source: str, to: Path | None, weights: str = "", inputs: Sequence[str] = (), **options: Any) -> Run:
    """Write the project, unless the same one is there, and run it up to the bundle."""
    folder, options_of_all = to or _default_folder(source), {"weights": weights, "inputs": list(inputs)}
    write_project(source, folder, model_name(folder.resolve().name), **options_of_all, **options)
    return run_project(find_project(folder), ["export"])


def _baseline_bundle(source: str, folder: Path) -> Path:
    """Return the bundle of a model to compare with; one that is none yet is exported beside the project."""
    if (Path(source) / "manifest.json").is_file():
        return Path(source)
    return export_source(source, folder.with_name(f"{folder.resolve().name}-baseline")).bundle_path


def _default_folder(source: str) -> Path:
    """Return a folder with the model's name, beside the model if that is a folder here."""
    folder = Path(model_name(source.partition(":")[2] or Path(source).resolve().stem))
    return folder.with_name(f"{folder.name}-service") if folder.resolve() == Path(source).resolve() else folder
