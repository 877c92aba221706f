"""Building images: the build contexts of the serving and the training image, and the builder that builds and pushes.

A build context is one folder with all that a builder needs, the same bytes every time. Builders are docker, podman and
buildah; the first that works here is used.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.utils import parse_wheel_filename

from k8s.images.contents import (
    ACCELERATORS,
    PROJECT,
    locked_requirements,
    own_requirements,
    packages_from_pins,
    serving_requirements,
)
from k8s.images.modelcar import bundle_annotations
from k8s.images.registry import Reference, parse_reference
from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.system.errors import BundleError, ConfigError, StageError
from pipeline.system.files import digest_file, digest_mapping, digest_tree
from pipeline.system.processes import deferred_signals, end_group
from pipeline.system.sources import PACKAGES, SOURCE_ROOT, project_sources, third_party_imports

BUILDERS = ("docker", "podman", "buildah")

_BUILDER_TIMEOUT_SECONDS = 180  # to report its state, which takes long on a busy machine
_BUILDER_END_SECONDS = 20.0  # from SIGTERM to SIGKILL; a step has 45 s
# Passed by name: the builder reads the values itself, so that a password in a URL is in no file and no command line.
_PASSED_VARIABLES = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "TORCH_INDEX_URL",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
_IMAGES = Path(__file__).resolve().parent
_IMAGE_NAME = re.compile(r"^[a-zA-Z0-9][\w.\-/:@]*$", re.ASCII)
# What the service imports of ours; the bundle's codec may import the whole contract.
_SERVICE_SOURCES = ("pipeline/__init__.py", "pipeline/contract", "pipeline/system", "serve")
_DOCKERIGNORE = "**/__pycache__\n**/*.pyc\n"
_RUNS_FOLDER = "runs"  # never part of an image: a volume is mounted there
# Build arguments of the Dockerfiles that repeat an annotation as a label.
_ANNOTATION_ARGUMENTS = {
    "NAME": "org.opencontainers.image.title",
    "VERSION": "org.opencontainers.image.version",
    "BUNDLE": "pipe-road.bundle",
    "PROJECT": "pipe-road.project",
}


def find_builder(wanted: str, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Check one builder by name, or with `auto` each in turn; return the first that works, and why others do not."""
    problems: list[str] = []
    for name in BUILDERS if wanted == "auto" else (wanted,):
        if (problem := _builder_problem(name, env)) is None:
            return name, "; ".join(problems)
        problems.append(problem)
    return None, "; ".join(problems)


@dataclass(frozen=True)
class BuildRequest:
    """The image to build, its context and its annotations."""

    image: str
    context: Path
    annotations: Mapping[str, str]
    base: str = ""  # overrides the Dockerfile's


def supports_annotations(builder: str, env: Mapping[str, str]) -> bool:
    """Return whether the builder can set annotations: docker only with a recent buildx."""
    if builder != "docker":
        return True
    done = _capture(["docker", "buildx", "build", "--help"], env)
    return done.returncode == 0 and "--annotation" in done.stdout


def build_argv(builder: str, work: BuildRequest, env: Mapping[str, str], *, annotated: bool) -> list[str]:
    """Return the build command; it depends only on the arguments and on which variables are set."""
    passed = [part for name in _PASSED_VARIABLES if env.get(name) for part in ("--build-arg", name)]
    if work.base:
        passed += ["--build-arg", f"BASE={work.base}"]
        passed += ["--tls-verify=false"] if builder != "docker" and parse_reference(work.base).plain else []
    if annotated:
        passed += [
            part for name, value in sorted(work.annotations.items()) for part in ("--annotation", f"{name}={value}")
        ]
    by_buildx = builder == "docker" and annotated
    # With a provenance attestation the result would be an index, with another digest than the image.
    command = ["docker", "buildx", "build", "--load", "--provenance=false"] if by_buildx else [builder, "build"]
    return [*command, "--tag", work.image, *passed, str(work.context)]


def build(builder: str, work: BuildRequest, id_file: Path, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Build the image, printing the builder's output; return its digest, None if that failed, and the last line.

    The digest comes from the file that the builder writes.
    """
    argv = build_argv(builder, work, env, annotated=supports_annotations(builder, env))
    argv[-1:-1] = ["--iidfile", str(id_file)]
    status, last = _run(argv, env)
    if status != 0 or not id_file.is_file():
        return None, f"{builder} exited with status {status}: {last}"
    digest = id_file.read_text().strip().removeprefix("sha256:")  # buildah omits the prefix
    id_file.unlink()
    return f"sha256:{digest}", last


def push(builder: str, image: str, digest_file: Path, env: Mapping[str, str]) -> str:
    """Push the image to the registry in its name; return its digest there."""
    reference = parse_reference(image)
    if builder == "docker":
        argv = ["docker", "push", image]  # uses plain HTTP for registries on this machine by itself
    else:
        argv = [builder, "push", "--digestfile", str(digest_file)]
        argv += [*(["--tls-verify=false"] if reference.plain else []), image, f"docker://{image}"]
    status, last = _run(argv, env)
    if status != 0:
        raise StageError(
            f"{builder} could not push {image} (status {status}: {last}); to fix it: check the registry, and "
            f"`{builder} login {reference.host}`"
        )
    if builder == "docker":
        return _docker_digest(image, reference, env)
    digest = digest_file.read_text().strip()
    digest_file.unlink()
    return digest


def _docker_digest(image: str, reference: Reference, env: Mapping[str, str]) -> str:
    done = _capture(["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image], env)
    found = [parse_reference(name) for name in (json.loads(done.stdout) or [])] if done.returncode == 0 else []
    for name in found:
        if (name.host, name.repository) == (reference.host, reference.repository):
            return name.digest
    raise StageError(
        f"docker pushed {image} but does not report its digest: {done.stderr.strip() or done.stdout.strip()}"
    )


def _run(argv: list[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run a builder and print its output; return its exit status and last line."""
    last = "it printed nothing"
    with deferred_signals() as deliver, subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=dict(env), process_group=0,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            deliver()
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        except BaseException:
            end_group(process, _BUILDER_END_SECONDS)
            raise
    return process.returncode, last[:300]


def _capture(argv: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=_BUILDER_TIMEOUT_SECONDS, check=False, env=dict(env),
    )  # fmt: skip


def _builder_problem(name: str, env: Mapping[str, str]) -> str | None:
    """Return why a builder cannot be used; None if it can. A client is not enough: its daemon must answer."""
    path = shutil.which(name, path=env.get("PATH", ""))
    if path is None:
        return f"{name} is not installed"
    engine = "its daemon does not answer" if name == "docker" else "it does not work here"
    try:
        done = _capture([path, "info"], env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} is installed but {engine} ({type(error).__name__})"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"{name} is installed but {engine}" + (f" ({lines[-1][:200]})" if lines else "")


@dataclass(frozen=True)
class Recipe:
    """The base of an image and the accelerator it is for."""

    base: str
    accelerator: str  # cpu or gpu
    wheels: Path | None = None  # a folder that pip searches first


def write_context(bundle: Bundle, recipe: Recipe, directory: Path, packages: Sequence[str] = ()) -> str:
    """Write the serving image's context, with further packages; return its digest."""
    create_context(directory)
    write_dockerfile(directory, "serve", recipe, bundle_annotations(bundle))
    also = (*bundle.signature.requires, *packages)
    write_requirements(directory, recipe, {name: serving_requirements(name, also) for name in ACCELERATORS})
    copy_files(_IMAGES / "slim.py", directory / "slim.py")
    _copy_bundle(bundle, directory / "bundle")
    for source in _SERVICE_SOURCES:
        copy_files(SOURCE_ROOT / source, directory / "app" / source)
    return finish_context(directory)


def create_context(directory: Path) -> None:
    if directory.exists():  # left by an interrupted attempt
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / ".dockerignore").write_text(_DOCKERIGNORE)


def write_dockerfile(directory: Path, name: str, recipe: Recipe, notes: Mapping[str, str]) -> None:
    """Write a Dockerfile with all arguments filled in, so that it can also be built by hand."""
    if not _IMAGE_NAME.fullmatch(recipe.base):
        raise ConfigError(f"package.base_image: {recipe.base!r} is not an image name; write it as python:3.11-slim")
    values = {"BASE": recipe.base, "ACCELERATOR": recipe.accelerator}
    values |= {argument: notes[key] for argument, key in _ANNOTATION_ARGUMENTS.items() if key in notes}
    text = (_IMAGES / f"{name}.Dockerfile").read_text()
    (directory / "Dockerfile").write_text(fill_arguments(text, values))


def write_requirements(directory: Path, recipe: Recipe, pins: Mapping[str, Sequence[str]]) -> None:
    """Write the requirements for each accelerator (a build argument selects one), and copy the wheels they name."""
    for accelerator, lines in pins.items():
        (directory / f"requirements-{accelerator}.txt").write_text("\n".join(lines) + "\n")
    target = directory / "wheels"
    target.mkdir()
    (target / "README").write_text("pip searches this folder before its index\n")
    if recipe.wheels is None:
        return
    named = {(package.name, package.version) for lines in pins.values() for package in packages_from_pins(lines)}
    for wheel in sorted(recipe.wheels.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if (name, version.public) in named:
            shutil.copyfile(wheel, target / wheel.name)


def finish_context(directory: Path) -> str:
    """Make all files readable for the image's user, whatever our umask is; return the context's digest."""
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return digest_mapping(digest_tree(directory))


def fill_arguments(dockerfile: str, values: Mapping[str, str]) -> str:
    """Set the defaults of a Dockerfile's ARGs."""
    for name, value in values.items():
        dockerfile = re.sub(rf"^ARG {name}=.*$", f"ARG {name}={value}", dockerfile, flags=re.MULTILINE)
    return dockerfile


def _copy_bundle(bundle: Bundle, target: Path) -> None:
    copy_files(bundle.path, target)
    if (copied := open_bundle(target).digest) != bundle.digest:
        raise BundleError(f"{target}: the bundle changed while it was copied ({bundle.digest[:12]} → {copied[:12]})")


def copy_files(source: Path, target: Path) -> None:
    """Copy a file, or the files of a folder except compiled Python; a missing source is an error."""
    files = [source] if not source.is_dir() else sorted(path for path in source.rglob("*") if path.is_file())
    for file in files:
        if "__pycache__" in file.parts or file.suffix == ".pyc":
            continue
        destination = target / file.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, destination)


@dataclass(frozen=True)
class ProjectContent:
    """The files of a project that go into its image, and the packages they import."""

    files: Mapping[str, str]  # path below the project → digest
    packages: tuple[str, ...]  # installed distributions that its code imports
    missing: tuple[str, ...]  # imported modules that are not installed here

    @property
    def digest(self) -> str:
        return digest_mapping(self.files)


def project_content(root: Path, references: tuple[str, ...], include: Iterable[str]) -> ProjectContent:
    """Collect the code that task and codec import, `pipe.yaml`, and the files of `package.include`."""
    sources = project_sources(root, *references)
    others = {path for pattern in include for path in _included_files(root, pattern)}
    others |= {path for path in [root / "pipe.yaml"] if path.is_file()}
    files = {**sources, **{path.relative_to(root).as_posix(): digest_file(path) for path in others}}
    distributions = _distributions_by_module()
    modules = sorted(third_party_imports(root, *references))
    packages = {name for module in modules for name in distributions.get(module, ())[:1]}
    missing = tuple(module for module in modules if module not in distributions)
    return ProjectContent(dict(sorted(files.items())), tuple(sorted(packages)), missing)


@functools.cache  # reading the file lists of all installed packages is slow
def _distributions_by_module() -> Mapping[str, list[str]]:
    return packages_distributions()


def training_annotations(name: str, content: ProjectContent) -> dict[str, str]:
    """Return the annotations of the training image."""
    return {
        "org.opencontainers.image.title": f"{name}-train",
        "org.opencontainers.image.version": content.digest[:12],
        "pipe-road.project": content.digest,
    }


def write_training_context(
    name: str, root: Path, content: ProjectContent, recipe: Recipe, directory: Path, extras: Iterable[str] = ()
) -> str:
    """Write the training image's context: our whole source, the project, and the packages both import."""
    create_context(directory)
    write_dockerfile(directory, "train", recipe, training_annotations(name, content))
    also = [*content.packages, *(requirement for extra in extras for requirement in own_requirements(extra))]
    pins = {accelerator: locked_requirements(accelerator, "train", also) for accelerator in ACCELERATORS}
    write_requirements(directory, recipe, pins)
    for package in PACKAGES:
        copy_files(SOURCE_ROOT / package, directory / "app" / package)
    _copy_project_metadata(directory / "app")
    for path in content.files:
        copy_files(root / path, directory / "project" / path)
    return finish_context(directory)


def _copy_project_metadata(app: Path) -> None:
    """Copy our own metadata, from which the package step locks requirements in a pod too."""
    if (SOURCE_ROOT / "pyproject.toml").is_file():
        copy_files(SOURCE_ROOT / "pyproject.toml", app / "pyproject.toml")
        return
    installed = distribution(PROJECT)
    folder = app / f"{re.sub(r'[^a-z0-9]', '_', PROJECT)}-{installed.version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(installed.read_text("METADATA") or "")


def _included_files(root: Path, pattern: str) -> list[Path]:
    files = [path for path in sorted(root.glob(pattern)) if path.is_file()]
    included = [path for path in files if path.relative_to(root).parts[0] != _RUNS_FOLDER]
    if not included:
        raise ConfigError(f"package.include: no file matches {pattern!r} in {root}")
    return included
