from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.bundle import open_bundle
from pipeline.contract.errors import BundleError, ConfigError, PipelineError
from pipeline.contract.signing import SIGNATURE, Trust, new_key, private_key, sign
from pipeline.steps.deploy import deploy

from ..packing import MakeRun, write_bundle


def typed(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "-o", "json"])
    if isinstance(done.exception, PipelineError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_key_is_made_a_bundle_signed_and_verified(tmp_path: Path) -> None:
    key, bundle = tmp_path / "key", tmp_path / "bundle"
    write_bundle(bundle, "pass")
    made = typed("sign", "--new-key", str(key))
    assert made["public"] == f"{key}.pub"
    with pytest.raises(BundleError, match="is not signed"):
        typed("verify", str(bundle), "--key", f"{key}.pub")
    assert typed("sign", str(bundle), "--key", str(key))["keyid"] == made["keyid"]
    assert (bundle / SIGNATURE).is_file()
    assert open_bundle(bundle, Trust(Path(f"{key}.pub"))).name == "twice"


@pytest.mark.parametrize("words", [(), ("--key", "a", "--new-key", "b"), ("--new-key", "b", "run")])
def test_signing_and_making_a_key_are_two_things(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--new-key"):
        typed("sign", *words)


def test_a_damaged_bundle_is_not_signed(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", "pass")
    (tmp_path / "bundle" / "codec.py").write_text("")
    typed("sign", "--new-key", str(tmp_path / "key"))
    with pytest.raises(BundleError, match=r"codec\.py: content changed"):
        typed("sign", str(tmp_path / "bundle"), "--key", str(tmp_path / "key"))
    assert not (tmp_path / "bundle" / SIGNATURE).exists()


def test_a_deployment_refuses_what_no_key_signed_before_anything_starts(make_run: MakeRun, tmp_path: Path) -> None:
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
def test_serving_by_hand_requests_the_signature_that_the_project_requests(
    words: tuple[str, ...], named: str, starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, argv, env: started.append(argv))
    write_bundle(starter / "bundle", "pass")
    new_key(starter / "key")
    with (starter / "pipe.yaml").open("a") as file:
        file.write("\nserve:\n  require_signature: key.pub\n")
    done = CliRunner().invoke(app, ["-C", str(starter), "serve", str(starter / "bundle"), *words])
    assert done.exit_code == 0, done.output
    (argv,) = started
    assert argv[-2] == "--require-signature"
    assert Path(argv[-1]).name == named
    assert argv.count("--require-signature") == 1
