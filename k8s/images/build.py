"""Container builders: which of them really works here, and having one build, save and push an image.

The build context of an image: one folder that holds all a builder needs, the same bytes every time.

The build context of the training image: our whole source, the user's project, and what both import.
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

from k8s.images.contents import pinned
from k8s.images.modelcar import bundle_annotations
from k8s.images.registry import Reference, parse
from k8s.images.requirements import ACCELERATORS, PROJECT, locked_requirements
from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.errors import BundleError, ConfigError, StageError
from pipeline.contract.files import digest_file, digest_mapping, digest_tree
from pipeline.contract.sources import HOUSE, PACKAGES, outside_imports, project_sources

BUILDERS = ("docker", "podman", "buildah")

_ANSWER_SECONDS = 30
# Passed on by name: the builder reads the values itself, so that a password in a URL reaches no file and no argv.
_PASSED_ON = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """The first builder that works, or why none does."""

    builder: str | None
    refusals: tuple[str, ...]

    @property
    def reason(self) -> str:
        return "; ".join(self.refusals)


@dataclass(frozen=True)
class Built:
    image_digest: str | None  # None: the build failed
    said: str  # the last thing the builder said


def find_builder(wanted: str, env: Mapping[str, str]) -> Search:
    """Look for one builder by name, or with `auto` for each in turn."""
    refusals: list[str] = []
    for name in BUILDERS if wanted == "auto" else (wanted,):
        refusal = _refusal(name, env)
        if refusal is None:
            return Search(name, tuple(refusals))
        refusals.append(refusal)
    return Search(None, tuple(refusals))


@dataclass(frozen=True)
class Work:
    """What is built, of what, and what is said of it."""

    image: str
    context: Path
    annotations: Mapping[str, str]
    base: str = ""  # in place of the one that the Dockerfile names


def annotates(builder: str, env: Mapping[str, str]) -> bool:
    """Docker writes its own kind of manifest, which has no annotations, unless its buildx makes the image."""
    if builder != "docker":
        return True
    argv = ["docker", "buildx", "build", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False, env=dict(env))
    return done.returncode == 0 and "--annotation" in done.stdout


def build_argv(builder: str, work: Work, env: Mapping[str, str], *, annotated: bool) -> list[str]:
    """The same command whoever runs it, but for what the environment adds."""
    passed = [part for name in _PASSED_ON if env.get(name) for part in ("--build-arg", name)]
    if work.base:
        passed += ["--build-arg", f"BASE={work.base}"]
        passed += ["--tls-verify=false"] if builder != "docker" and parse(work.base).plain else []
    if annotated:
        passed += [
            part for name, value in sorted(work.annotations.items()) for part in ("--annotation", f"{name}={value}")
        ]
    by_buildx = builder == "docker" and annotated
    # An attestation would make an index of the image, whose digest is another one than the image's.
    command = ["docker", "buildx", "build", "--load", "--provenance=false"] if by_buildx else [builder, "build"]
    return [*command, "--tag", work.image, *passed, str(work.context)]


def build(builder: str, work: Work, id_file: Path, env: Mapping[str, str]) -> Built:
    """Run it, its output going where ours goes; the image is known by the digest the builder leaves in a file."""
    argv = build_argv(builder, work, env, annotated=annotates(builder, env))
    argv[-1:-1] = ["--iidfile", str(id_file)]
    status, last = _run(argv, env)
    if status != 0 or not id_file.is_file():
        return Built(None, f"{builder} ended with status {status}: {last}")
    digest = id_file.read_text().strip().removeprefix("sha256:")  # buildah leaves the prefix out
    id_file.unlink()
    return Built(f"sha256:{digest}", last)


def save(builder: str, image: str, archive: Path, env: Mapping[str, str]) -> None:
    """The image as one file to look into: in Docker's form, in which nobody compresses the layers."""
    argv = {
        "docker": ["docker", "save", "--output", str(archive), image],
        "podman": ["podman", "save", "--quiet", "--format", "docker-archive", "--output", str(archive), image],
        "buildah": ["buildah", "push", "--quiet", image, f"docker-archive:{archive}"],
    }[builder]
    archive.unlink(missing_ok=True)  # podman adds to what is there
    status, last = _run(argv, env)
    if status != 0:
        raise StageError(f"{builder} built {image} but cannot save it to {archive} (status {status}: {last})")


def push(builder: str, image: str, digest_file: Path, env: Mapping[str, str]) -> str:
    """To the registry its name says; returns the digest the registry knows it by."""
    reference = parse(image)
    if builder == "docker":
        argv = ["docker", "push", image]  # speaks to this machine's registries without TLS by itself
    else:
        argv = [builder, "push", "--digestfile", str(digest_file)]
        argv += [*(["--tls-verify=false"] if reference.plain else []), image, f"docker://{image}"]
    status, last = _run(argv, env)
    if status != 0:
        raise StageError(
            f"{builder} could not push {image} (status {status}: {last}); is the registry up, and are we logged in "
            f"(`{builder} login {reference.host}`)?"
        )
    if builder == "docker":
        return _docker_digest(image, reference, env)
    digest = digest_file.read_text().strip()
    digest_file.unlink()
    return digest


def _docker_digest(image: str, reference: Reference, env: Mapping[str, str]) -> str:
    argv = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False, env=dict(env))
    found = [parse(name) for name in (json.loads(done.stdout) or [])] if done.returncode == 0 else []
    for name in found:
        if (name.host, name.repository) == (reference.host, reference.repository):
            return name.digest
    raise StageError(
        f"docker pushed {image} but does not tell its digest: {done.stderr.strip() or done.stdout.strip()}"
    )


def _run(argv: list[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Its status, and the last thing it said; all it says is in our own output as it comes."""
    last = "it said nothing"
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=dict(env),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last[:300]


def _refusal(name: str, env: Mapping[str, str]) -> str | None:
    """Why a builder cannot be used; None when it can. A client alone builds nothing: its engine must answer."""
    path = shutil.which(name, path=env.get("PATH", ""))
    if path is None:
        return f"{name} is not installed"
    engine = "its daemon does not answer" if name == "docker" else "it does not work here"
    try:
        done = subprocess.run(
            [path, "info"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_SECONDS, check=False, env=dict(env),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} is installed but {engine} ({type(error).__name__})"
    if done.returncode == 0:
        return None
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"{name} is installed but {engine}" + (f" ({said[-1][:200]})" if said else "")


_IMAGES = Path(__file__).resolve().parent
_IMAGE_NAME = re.compile(r"^[a-zA-Z0-9][\w.\-/:@]*$", re.ASCII)
# What the service imports of ours; the codec inside the bundle may use any contract.
_SOURCES = ("pipeline/__init__.py", "pipeline/spec", "serve")
_IGNORE = "**/__pycache__\n**/*.pyc\n"
_NOTED = {
    "NAME": "org.opencontainers.image.title",
    "VERSION": "org.opencontainers.image.version",
    "BUNDLE": "pipe-road.bundle",
    "PROJECT": "pipe-road.project",
}


@dataclass(frozen=True)
class Recipe:
    """What an image is built of and for, beside its content."""

    base: str
    accelerator: str  # cpu or gpu
    wheels: Path | None = None  # a folder pip looks in first


def write_context(bundle: Bundle, recipe: Recipe, directory: Path) -> str:
    """Make the directory of the serving image anew; returns its digest."""
    begin(directory)
    write_dockerfile(directory, "serve", recipe, bundle_annotations(bundle))
    write_requirements(
        directory, recipe, {name: locked_requirements(name, also=bundle.signature.requires) for name in ACCELERATORS}
    )
    copy(_IMAGES / "slim.py", directory / "slim.py")
    _copy_bundle(bundle, directory / "bundle")
    for source in _SOURCES:
        copy(HOUSE / source, directory / "app" / source)
    return seal(directory)


def begin(directory: Path) -> None:
    if directory.exists():  # left by an interrupted attempt
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / ".dockerignore").write_text(_IGNORE)


def write_dockerfile(directory: Path, name: str, recipe: Recipe, notes: Mapping[str, str]) -> None:
    """With everything filled in, so that it can be built by hand as well."""
    if not _IMAGE_NAME.fullmatch(recipe.base):
        raise ConfigError(f"package.base: {recipe.base!r} is not an image name; write it as python:3.11-slim")
    values = {"BASE": recipe.base, "ACCELERATOR": recipe.accelerator}
    values |= {argument: notes[key] for argument, key in _NOTED.items() if key in notes}
    text = (_IMAGES / f"{name}.Dockerfile").read_text()
    (directory / "Dockerfile").write_text(fill_arguments(text, values))


def write_requirements(directory: Path, recipe: Recipe, pins: Mapping[str, Sequence[str]]) -> None:
    """One file an accelerator: which is taken is a build argument. Of the wheels only those that any of them names."""
    for accelerator, lines in pins.items():
        (directory / f"requirements-{accelerator}.txt").write_text("\n".join(lines) + "\n")
    target = directory / "wheels"
    target.mkdir()
    (target / "README").write_text("pip looks here before it asks an index\n")
    if recipe.wheels is None:
        return
    wanted = {(package.name, package.version) for lines in pins.values() for package in pinned(lines)}
    for wheel in sorted(recipe.wheels.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if (name, version.public) in wanted:
            shutil.copyfile(wheel, target / wheel.name)


def seal(directory: Path) -> str:
    """Readable for the image's user, whatever the umask of this process; returns its digest."""
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return digest_mapping(digest_tree(directory))


def fill_arguments(dockerfile: str, values: Mapping[str, str]) -> str:
    """The defaults of the Dockerfile's ARGs, so that a build by hand needs no options."""
    for name, value in values.items():
        dockerfile = re.sub(rf"^ARG {name}=.*$", f"ARG {name}={value}", dockerfile, flags=re.MULTILINE)
    return dockerfile


def _copy_bundle(bundle: Bundle, target: Path) -> None:
    copy(bundle.path, target)
    if (found := open_bundle(target).digest) != bundle.digest:
        raise BundleError(f"{target}: the bundle changed while it was copied ({bundle.digest[:12]} → {found[:12]})")


def copy(source: Path, target: Path) -> None:
    """A file, or the files of a tree less what Python compiled."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for file in files:
        if "__pycache__" in file.parts or file.suffix == ".pyc":
            continue
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


_RUNS = "runs"  # never part of an image: a volume is mounted there


@dataclass(frozen=True)
class Content:
    """What of a project goes into its image."""

    files: Mapping[str, str]  # path below the project → digest
    packages: tuple[str, ...]  # installed distributions its code imports
    missing: tuple[str, ...]  # modules it imports that are not installed here

    @property
    def digest(self) -> str:
        return digest_mapping(self.files)


def content_of(root: Path, references: tuple[str, ...], include: Iterable[str]) -> Content:
    """The code the task and codec reach by imports, `pipe.yaml`, and what `package.include` names."""
    sources = project_sources(root, *references)
    further = {path for pattern in include for path in _matches(root, pattern)}
    further |= {path for path in [root / "pipe.yaml"] if path.is_file()}
    files = {**sources, **{path.relative_to(root).as_posix(): digest_file(path) for path in further}}
    owners = _owners()
    modules = sorted(outside_imports(root, *references))
    packages = {name for module in modules for name in owners.get(module, ())[:1]}
    missing = tuple(module for module in modules if module not in owners)
    return Content(dict(sorted(files.items())), tuple(sorted(packages)), missing)


@functools.cache  # it reads every installed file list, and nothing is installed under a process
def _owners() -> Mapping[str, list[str]]:
    """Which distribution a module came with."""
    return packages_distributions()


def training_annotations(name: str, content: Content) -> dict[str, str]:
    """What the image says of itself."""
    return {
        "org.opencontainers.image.title": f"{name}-train",
        "org.opencontainers.image.version": content.digest[:12],
        "pipe-road.project": content.digest,
    }


def write_training_context(name: str, root: Path, content: Content, recipe: Recipe, directory: Path) -> str:
    """Make the directory anew; returns its digest."""
    begin(directory)
    write_dockerfile(directory, "train", recipe, training_annotations(name, content))
    pins = {accelerator: locked_requirements(accelerator, "train", content.packages) for accelerator in ACCELERATORS}
    write_requirements(directory, recipe, pins)
    for package in PACKAGES:
        copy(HOUSE / package, directory / "app" / package)
    _copy_identity(directory / "app")
    for path in content.files:
        copy(root / path, directory / "project" / path)
    return seal(directory)


def _copy_identity(app: Path) -> None:
    """The package step locks what we need by our own metadata, in a pod as here."""
    if (HOUSE / "pyproject.toml").is_file():
        copy(HOUSE / "pyproject.toml", app / "pyproject.toml")
        return
    ours = distribution(PROJECT)
    folder = app / f"{re.sub(r'[^a-z0-9]', '_', PROJECT)}-{ours.version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(ours.read_text("METADATA") or "")


def _matches(root: Path, pattern: str) -> list[Path]:
    found = [path for path in sorted(root.glob(pattern)) if path.is_file()]
    inside = [path for path in found if path.relative_to(root).parts[0] != _RUNS]
    if not inside:
        raise ConfigError(f"package.include: no file matches {pattern!r} in {root}")
    return inside
