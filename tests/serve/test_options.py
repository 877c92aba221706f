from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.spec.errors import ConfigError
from serve.options import Named, parse
from serve.overrides import Overrides
from serve.sockets import Address


def test_by_default_the_service_is_local_and_grpc_is_one_port_above() -> None:
    options = parse(["bundle"])
    assert options.public == Address("127.0.0.1", 8080)
    assert options.grpc == Address("127.0.0.1", 8081)
    assert (options.standby, options.provider, options.threads) == (None, None, None)
    assert options.bundles == (Named("", Path("bundle").resolve()),)
    assert (options.admin, options.canary, options.shadows) == (None, 0.0, ())


def test_grpc_can_be_switched_off_and_standby_is_always_local() -> None:
    options = parse(["bundle", "--host", "0.0.0.0", "--grpc-port", "-1", "--standby", "9000"])
    assert options.grpc is None
    assert options.standby == Address("127.0.0.1", 9000)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "9000", "--standby", "9001"], "ports 9000, 9001, 9001: .* must differ"),
        (["--port", "65535"], "--grpc-port: 65536 is no port"),
        (["--grpc-port", "-2"], "--grpc-port: -2 is no port"),
        (["--admin", "8080", "--admin-token", "t"], "ports 8080, 8081, 8080: .*--admin must differ"),
        (["--admin", "9000"], "--admin PORT and --admin-token FILE go together"),
        (["--admin-token", "t"], "go together"),
    ],
)
def test_ports_that_cannot_work_are_a_config_error(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(["bundle", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "0"],
        ["--port", "x"],
        ["--threads", "-1"],
        ["--provider", "tpu"],
        ["--canary", "200%"],
        ["--shadow-share", "2"],
        ["--max-waiting", "0"],
        ["--max-batch-size", "x"],
        ["--deadline-seconds", "nan"],
        ["--batch-delay-ms", "-1"],
        ["--keep-versions", "0"],
    ],
)
def test_a_malformed_option_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["bundle", *argv])
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_several_bundles_have_names_and_a_directory_may_have_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run=3").mkdir()
    found = parse(["a=one", "b=/two", "run=3", "deep/run=4"]).bundles
    assert found == (
        Named("a", tmp_path / "one"),
        Named("b", Path("/two")),
        Named("", tmp_path / "run=3"),
        Named("", tmp_path / "deep/run=4"),
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["a b=bundle"], "'a b' is no model name"),
        (["bundle", "--name", "../x"], "'../x' is no model name"),
        (["one", "two", "--name", "a"], "--name: is for a single bundle"),
        (["a=one", "--name", "b"], "--name: is for a single bundle"),
    ],
)
def test_names_that_cannot_work_are_a_config_error(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(argv)


def test_how_a_new_bundle_comes_in() -> None:
    options = parse(["a=one", "a=two", "--canary", "10%", "--shadow", "a=three", "--shadow-share", "0.5"])
    assert (options.canary, options.shadow_share) == (0.1, 0.5)
    assert options.shadows == (Named("a", Path("three").resolve()),)


def test_an_option_that_a_variable_leaves_empty_is_the_bundles() -> None:
    words = ("threads", "max-batch-size", "max-body-bytes", "max-waiting", "deadline-seconds", "batch-rows")
    options = parse(["bundle", *(f"--{word}=" for word in words)])
    assert (options.threads, options.overrides) == (None, Overrides())
