from __future__ import annotations

import pytest

from pipeline.spec.errors import ConfigError
from serve.options import parse
from serve.sockets import Address


def test_by_default_the_service_is_local_and_grpc_is_one_port_above() -> None:
    options = parse(["bundle"])
    assert options.public == Address("127.0.0.1", 8080)
    assert options.grpc == Address("127.0.0.1", 8081)
    assert (options.standby, options.provider, options.threads, options.name) == (None, None, None, "")


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
    ],
)
def test_ports_that_cannot_work_are_a_config_error(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(["bundle", *argv])


@pytest.mark.parametrize("argv", [["--port", "0"], ["--port", "x"], ["--threads", "-1"], ["--provider", "tpu"]])
def test_a_malformed_option_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["bundle", *argv])
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err
