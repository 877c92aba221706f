"""`pipe sign`: a signature over a bundle, or a key pair to make some with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.cli.road import newest_bundle
from pipeline.history import find_run
from pipeline.lock import locked
from pipeline.spec.errors import ConfigError
from pipeline.spec.signing import new_key, private_key

PASSPHRASE = "PIPE_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable


@app.command()
def sign(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[RUN|BUNDLE]", help="Run or bundle; the newest by default.")] = "",
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Private ed25519 key, in PEM or as OpenSSH writes it.")
    ] = None,
    new: Annotated[
        Path | None, typer.Option("--new-key", metavar="FILE", help="Make a key: FILE to keep, FILE.pub to give away.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Sign a bundle, so that a service can refuse all others; or make a key."""
    if (key is None) == (new is None):
        raise ConfigError("give --key FILE to sign with, or --new-key FILE to make one")
    if new is not None:
        if target:
            raise ConfigError("--new-key makes a key and signs nothing; give --key FILE to sign")
        text = f"{new} signs, and is nobody's but yours; {new}.pub is for those who verify"
        return emit(output, {"key": str(new), "public": f"{new}.pub", "keyid": new_key(new)}, text)
    assert key is not None
    from pipeline.sign import sign_bundle, sign_run  # numpy is slow to load

    private = private_key(key, os.environ.get(PASSPHRASE, ""))
    if target and (Path(target) / "manifest.json").is_file():
        bundle, keyid = sign_bundle(Path(target), private)
    else:
        project = project_of(context)
        with locked(project.runs):
            bundle, keyid = sign_run(find_run(project.runs, target) if target else newest_bundle(project), private)
    found = {"path": str(bundle.path), "bundle": bundle.digest, "keyid": keyid}
    return emit(output, found, f"bundle {bundle.digest[:12]} is signed by {keyid}")
