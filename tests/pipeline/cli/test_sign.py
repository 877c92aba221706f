from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.bundle import Manifest, open_bundle, write_manifest
from pipeline.contract.signing import SIGNATURE, Trust, new_key, private_key, sign
from pipeline.steps.deploy import deploy
from pipeline.system.errors import BundleError, ConfigError, PipelineError

from ..packing import MakeRun, write_bundle
from .conftest import Pipe


def typed(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "-o", "json"])
    if isinstance(done.exception, PipelineError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_new_key_signs_a_bundle_that_then_verifies(tmp_path: Path) -> None:
    key, bundle = tmp_path / "key", tmp_path / "bundle"
    write_bundle(bundle)
    made = typed("sign", "--new-key", str(key))
    assert made["public"] == f"{key}.pub"
    with pytest.raises(BundleError, match="is not signed"):
        typed("verify", str(bundle), "--key", f"{key}.pub")
    assert typed("sign", str(bundle), "--key", str(key))["keyid"] == made["keyid"]
    assert (bundle / SIGNATURE).is_file()
    assert open_bundle(bundle, Trust(Path(f"{key}.pub"))).name == "twice"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sign", "--new-key"),
        ("sign --key a --new-key b", "--new-key"),
        ("sign --new-key b run", "--new-key"),
        ("verify --bundle some-folder", "--key FILE is needed"),
        ("verify some-run --bundle some-folder --key key.pub", "leave one out"),
    ],
)
def test_ambiguous_arguments_of_sign_and_verify_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        typed(*words.split())


def test_a_damaged_bundle_is_not_signed(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    (tmp_path / "bundle" / "codec.py").write_text("")
    typed("sign", "--new-key", str(tmp_path / "key"))
    with pytest.raises(BundleError, match=r"codec\.py: content changed"):
        typed("sign", str(tmp_path / "bundle"), "--key", str(tmp_path / "key"))
    assert not (tmp_path / "bundle" / SIGNATURE).exists()


def test_deploy_refuses_an_untrusted_bundle_before_anything_starts(make_run: MakeRun, tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    new_key(tmp_path / "other")
    run = make_run(serve={"require_signature": "key.pub"})
    with pytest.raises(BundleError, match="is not signed"):
        deploy(run, tmp_path)
    sign(run.bundle_path, private_key(tmp_path / "other"))
    with pytest.raises(BundleError, match=r"not by a key of .*key\.pub"):
        deploy(run, tmp_path)
    with pytest.raises(ConfigError, match=r"serve\.require_signature: .*gone: no such file"):
        deploy(make_run("second", serve={"require_signature": "gone"}), tmp_path)
    assert not (run.runs / "live.json").exists()


@pytest.mark.parametrize(("words", "named"), [((), "key.pub"), (("--require-signature", "mine"), "mine")])
def test_serve_requires_the_projects_signature_unless_overridden(
    words: tuple[str, ...], named: str, starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, argv, env: started.append(argv))
    write_bundle(starter / "bundle")
    new_key(starter / "key")
    with (starter / "pipe.yaml").open("a") as file:
        file.write("\nserve:\n  require_signature: key.pub\n")
    done = CliRunner().invoke(app, ["-C", str(starter), "serve", str(starter / "bundle"), *words])
    assert done.exit_code == 0, done.output
    (argv,) = started
    assert argv[-2] == "--require-signature"
    assert Path(argv[-1]).name == named
    assert argv.count("--require-signature") == 1


@pytest.mark.parametrize("words", [(), ("-o", "json")], ids=" ".join)
def test_verify_checks_signature_verdict_and_files_without_running_code(
    words: tuple[str, ...], tmp_path: Path, pipe_process: Pipe
) -> None:
    bundle, key = tmp_path / "bundle", tmp_path / "key"
    write_bundle(bundle)
    (bundle / "codec.py").write_text("raise SystemExit('it was run')\n")
    manifest = open_manifest(bundle)
    write_manifest(bundle, "twice", "pass", manifest.ancestors)
    gate = ("verify", "--bundle", str(bundle), "--key", f"{key}.pub", *words)
    new_key(key)
    assert "is not signed by a key of" in pipe_process(*gate, expect=2).stderr
    sign(bundle, private_key(key))
    assert "the gate's verdict is pass" in pipe_process(*gate).stdout
    (bundle / "card.md").write_text("changed\n")
    assert "card.md: content changed since export" in pipe_process(*gate, expect=2).stderr
    write_manifest(bundle, "twice", "fail", manifest.ancestors)
    sign(bundle, private_key(key))
    assert "the gate's verdict is 'fail'" in pipe_process(*gate, expect=3).stderr


def open_manifest(bundle: Path) -> Manifest:
    return Manifest.model_validate_json((bundle / "manifest.json").read_bytes())
