from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from pipeline.system.errors import ResourceError, read_error
from tests.ports import free_port
from train.elastic.store import listen, main


def test_store_runs_in_its_own_process_and_ends_with_its_parent(tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "train.elastic.store", str(tmp_path), f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PIPE_PARENT_WATCH": "1"}, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == f"machines meet at 127.0.0.1:{port}\n"
        one, other = (TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(2))
        one.set("key", "value")
        assert other.get("key") == b"value"
        process.stdin.close()
        assert process.wait(timeout=300) == 143, "it goes with the node that started it"


def test_port_in_use_is_reported_with_its_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main([str(tmp_path), address]) == ResourceError.exit_code
    message = str(read_error(tmp_path / "train.partial"))
    assert f"train.rendezvous={address}: cannot listen there: address already in use; to fix it, name a" in message


def test_address_of_a_gateway_is_bound_on_all_interfaces() -> None:
    with listen("203.0.113.7", 0) as everywhere:  # an address reserved for documentation
        assert everywhere.getsockname()[0] == "0.0.0.0"
