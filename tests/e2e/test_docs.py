"""Run the commands of the documents, and check that what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.config import parse_config
from pipeline.contract.restarts import Event, attempts_from, describe_restart
from pipeline.contract.run import STEPS
from pipeline.contract.samples import SampleFolder
from pipeline.system.processes import describe_exit
from pipeline.system.sources import SOURCE_ROOT

from .project_folder import PIPE, ProjectFolder, environment, wait_for

DOCUMENTS = [
    *sorted(SOURCE_ROOT.glob("*.md")),
    *sorted((SOURCE_ROOT / "docs").glob("*.md")),
    SOURCE_ROOT / "benchmarks" / "RESULTS.md",
    *sorted(SOURCE_ROOT.glob("examples/*/README.md")),
]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GROUPS = ("registry", "gate")
_FILE = re.compile(r"# file: (\S+)\n")


def blocks(document: Path) -> list[tuple[str, str]]:
    """Return language and text of each fenced block."""
    return [(language, body) for language, body in _BLOCK.findall(document.read_text())]


def commands_in(document: Path) -> Iterator[list[str]]:
    """Yield the words of every `pipe …` in a shell block or in backticks."""
    text = document.read_text()
    lines = [
        line
        for language, body in blocks(document)
        if language == "sh"
        for line in body.replace("\\\n", " ").splitlines()
        if line.startswith("pipe ")  # other commands of a shell, and lines that shlex cannot split alone
    ]
    for line in [*lines, *re.findall(r"`(pipe [^`]+)`", _BLOCK.sub("", text))]:
        words = shlex.split(line, comments=True)
        if words[:1] == ["pipe"]:
            yield words[1:]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[ProjectFolder]:
    """An empty folder in which a document is followed."""
    project = ProjectFolder.with_free_port(tmp_path)
    yield project
    for name in ("flowers", "digits"):
        if (tmp_path / name).is_dir():
            ProjectFolder(tmp_path / name, project.port).stop()


@pytest.mark.long
def test_blocks_of_your_own_model_run_as_documented(project: ProjectFolder) -> None:
    """Run every block in order in one folder, changing only the port."""
    folder, printed = project.folder, ""
    for language, body in blocks(SOURCE_ROOT / "docs" / "your-own-model.md"):
        if named := _FILE.match(body):
            assert language in ("python", "yaml")
            (folder / named[1]).write_text(body)
            if named[1] == "pipe.yaml":
                (folder / named[1]).write_text(f"{body}\ndeploy: {{port: {project.port}}}\n")
            continue
        if language == "python":  # a method without its class
            compile(body, "your-own-model.md", "exec")
            continue
        assert language == "sh"
        for line in body.splitlines():
            words = shlex.split(line)
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            assert words[0] == "pipe"
            done = subprocess.run([*PIPE, *words[1:]], cwd=folder, env=environment({}), capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed += done.stdout
    assert '"flower": "setosa"' in printed
    assert "stopped flowers" in printed


@pytest.mark.long
def test_monitoring_page_ends_in_an_alarm(project: ProjectFolder) -> None:
    """Run its blocks in order, changing only the port; a look comes once the service has written all samples."""
    folder, printed, samples = project.folder, "", 0
    for language, body in blocks(SOURCE_ROOT / "docs" / "monitoring.md"):
        if language == "python":
            (folder / "traffic.py").write_text(body.replace(":8080", f":{project.port}"))
        elif language == "text":
            for line in body.splitlines():
                pattern = ".*".join(map(re.escape, line.split("…")))
                assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{line}\n{printed}"
        for line in body.splitlines() if language == "sh" else ():
            words, status = shlex.split(line), 0
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            if words[0] == "python":
                samples += 600
            elif words[1] == "demo":
                words.append(f"deploy.port={project.port}")
            else:
                wait_for(lambda: count_samples(folder / "samples") == samples)  # noqa: B023
                status = 3 if "--render" in words else 0
            argv = [sys.executable, *words[1:]] if words[0] == "python" else [*PIPE, *words[1:]]
            done = subprocess.run(argv, cwd=folder, env=environment({}), capture_output=True, text=True)
            assert done.returncode == status, f"{line}\n{done.stdout}\n{done.stderr}"
            printed = done.stdout
    assert "metric.accuracy" in (folder / "out" / "monitor.html").read_text()
    assert "pipe_monitor_as_promised{" in (folder / "out" / "monitor.prom").read_text()


def count_samples(folder: Path) -> int:
    stored = SampleFolder(str(folder))
    return sum(table.num_rows for name in stored.sizes("samples") if (table := stored.read(name)) is not None)


def readme_commands() -> list[list[str]]:
    """Return the commands of the README, split into words."""
    lines = [
        line for language, body in blocks(SOURCE_ROOT / "README.md") if language == "sh" for line in body.splitlines()
    ]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_commands_of_the_readme_work_in_order(copied: ProjectFolder) -> None:
    """Run them on a finished project; commands that write a project have their own tests."""
    commands = [words for words in readme_commands() if words[0] not in ("demo", "init", "-C", "export", "serve")]
    copied.deploy(copied.latest)
    for words in commands:
        copied.pipe(*words)
    assert [words[0] for words in commands] == [
        "status", "predict", "report", "run", "plan", "verify", "registry", "stop",
    ]  # fmt: skip


@pytest.mark.long
def test_the_demo_runs_the_pipeline_and_leaves_a_service(tmp_path: Path) -> None:
    project = ProjectFolder.with_free_port(tmp_path / "digits")
    ProjectFolder(tmp_path, 0).pipe("demo", f"deploy.port={project.port}")
    try:
        assert "digit" in project.pipe("predict").stdout
        again = ProjectFolder(tmp_path, 0).pipe("demo", f"deploy.port={project.port}")
        assert "train: reused" in again.stderr
    finally:
        project.stop()


@pytest.fixture
def wine(project: ProjectFolder) -> Iterator[ProjectFolder]:
    """The project of the README: what `pipe init` writes, with the task that the README shows."""
    init, _ = (words for words in readme_commands() if words[0] in ("init", "-C"))
    project.pipe(*init)
    ((language, body),) = [block for block in blocks(SOURCE_ROOT / "README.md") if _FILE.match(block[1])]
    assert language == "python"
    (project.folder / _FILE.findall(body)[0]).write_text(body)
    yield project
    ProjectFolder(project.folder / "wine", 0).stop()


def test_the_task_of_the_readme_passes_the_checks_before_training(wine: ProjectFolder) -> None:
    assert "prepare: done" in wine.pipe("-C", "wine", "run", "prepare").stderr


@pytest.mark.long
def test_the_task_of_the_readme_is_served_with_the_output_it_shows(wine: ProjectFolder) -> None:
    """The numbers depend on the machine; the lines do not."""
    _, run = (words for words in readme_commands() if words[0] in ("init", "-C"))
    printed = wine.pipe(*run).stderr
    (shown,) = [body for language, body in blocks(SOURCE_ROOT / "README.md") if language == "text"]
    for line in shown.splitlines():
        parts = re.split(r"\b[0-9a-f]{12}\b|[+-]?\d[\d.,]*(?:e-\d+)?", line)
        assert re.search(r"\S+?".join(map(re.escape, parts)), printed), line
    assert len(shown.splitlines()) == 6
    assert (wine.folder / "wine" / "runs" / "live.json").is_file()


def help_of(command: str, subcommand: str) -> tuple[int, str]:
    """Return exit status and text of the help of a command, or of one command of a group."""
    words = [command, *([subcommand] if subcommand else []), "--help"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_documented_commands_and_options_exist() -> None:
    wrong: list[str] = []
    helps: dict[tuple[str, str], tuple[int, str]] = {}
    for document in DOCUMENTS:
        for words in commands_in(document):
            rest = words[2:] if words[0] in ("-C", "--project") else words
            command, *arguments = rest
            key = (command, arguments[0] if command in GROUPS and arguments else "")
            helps[key] = helps.get(key) or help_of(*key)
            status, text = helps[key]
            options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
            missing = [option for option in options if not re.search(rf"{re.escape(option)}\b", text)]
            if status != 0 or missing:
                wrong.append(f"{document.name}: pipe {' '.join(words)}")
    assert wrong == []
    assert {"run", "predict", "stop", "init"} <= {command for command, _ in helps}


def test_documented_steps_exist() -> None:
    for document in DOCUMENTS:
        for command, *arguments in commands_in(document):
            options = ("--workflow", "--continue")
            values = {arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word in options}
            names = [word for word in arguments if word.isalpha() and word.islower() and word not in values]
            if command in ("run", "plan"):
                assert {name for name in names if name != "all"} <= set(STEPS), document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(SOURCE_ROOT).as_posix())
def test_links_lead_to_existing_files_and_headings(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", document.read_text())
    targets = [(document.parent / file if file else document, anchor) for file, anchor in links]
    assert [str(file) for file, _ in targets if not file.exists()] == []
    assert [f"{file}#{anchor}" for file, anchor in targets if anchor and anchor not in anchors(file)] == []


def slug(heading: str) -> str:
    """Return the anchor of a rendered Markdown heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings of a document."""
    text = _BLOCK.sub("", document.read_text())
    return {slug(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}


def test_sections_named_in_messages_exist() -> None:
    named = re.compile(r"(docs/[\w-]+\.md)(?:, ([A-Z][A-Za-z ]+))?")
    sources = [
        path
        for package in ("pipeline", "train", "export", "serve", "k8s", "examples")
        for path in (SOURCE_ROOT / package).rglob("*.py")
    ]
    references = {match for path in sources for match in named.findall(path.read_text())}
    assert len(references) >= 4
    for document, section in references:
        assert not section or slug(section.strip()) in anchors(SOURCE_ROOT / document), f"{document}, {section}"


def test_every_documented_configuration_is_valid() -> None:
    whole = {"name": "x", "task": "task.py:T", "codec": "codec.py:C"}
    examples = [
        (document.name, body)
        for document in DOCUMENTS
        for language, body in blocks(document)
        if language == "yaml" and not _FILE.match(body)
    ]
    for name, body in examples:
        parse_config({**whole, **yaml.safe_load(body)}, source=name)
    assert len(examples) > 15


def test_modules_named_in_the_documents_exist() -> None:
    files = [path.as_posix() for path in SOURCE_ROOT.rglob("*.py") if ".venv" not in path.parts]
    for document, least in (("docs/architecture.md", 15), ("AGENTS.md", 10)):
        named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", (SOURCE_ROOT / document).read_text()))
        assert len(named) >= least
        users = {"codec.py", "train.py"}  # files of a project
        assert [name for name in sorted(named - users) if not any(file.endswith(f"/{name}") for file in files)] == []


def test_documented_restart_message_is_the_logged_one() -> None:
    hosts = ("node0", "node1", "node2")
    reason = describe_exit("rank 1 on node1", -9)
    events = [
        Event(time=0.0, event="launch", attempt=0),
        Event(time=0.0, event="start", attempt=1, hosts=hosts, processes=3, step=380),
        Event(time=0.0, event="end", attempt=1, host="node0", reason=reason),
        Event(time=0.0, event="start", attempt=2, hosts=hosts, processes=3, step=400),
    ]
    assert describe_restart(attempts_from(events), allowed=3) in (SOURCE_ROOT / "docs" / "operations.md").read_text()
