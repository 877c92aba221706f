from __future__ import annotations

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from pipeline.system.errors import ConfigError, DeviceFault
from pipeline.system.files import write_json
from pipeline.system.processes import Rank
from train import process_group
from train.process_group import (
    ProcessGroup,
    choose_device,
    explain_device_faults,
    is_lost_contact,
    nccl_cause,
    open_store,
    rendezvous_file,
)

from .distributed import run_distributed


def test_missing_gpu_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"train\.device=cuda, but torch sees no CUDA device"):
        choose_device("cuda", Rank())


def test_auto_device_prefers_a_gpu_and_cpu_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", Rank()).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("cpu", Rank()).type == "cpu"


def test_second_process_does_not_share_the_only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /dev/nvidia* files, two processes start on a machine with one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert choose_device("auto", Rank(0, 0, 2)).index == 0
    with pytest.raises(ConfigError, match=r"train\.processes: process 2 of this machine finds only 1 GPU; to fix it"):
        choose_device("auto", Rank(1, 1, 2))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # srun may show each process only its own
    assert choose_device("auto", Rank(1, 1, 2)).index == 0


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be …"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"), True),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), True),
        (RuntimeError("NVML: GPU is lost"), True),
        (RuntimeError("No CUDA GPUs are available"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("the taxid column is missing"), False),
        (ValueError("uncorrectable ECC error"), False),
    ],
)
def test_faults_of_a_device_are_no_errors_of_the_program(error: Exception, is_fault: bool) -> None:
    rank = Rank(1, 1, 2)
    with pytest.raises(type(error) if not is_fault else DeviceFault) as raised, explain_device_faults(rank):
        raise error
    if is_fault:
        first_line = str(error).partition("\n")[0]
        assert str(raised.value) == f"rank 1 on {socket.gethostname()}: its GPU failed: {first_line}"
        assert DeviceFault.passing


def test_the_cause_in_nccls_message_is_its_last_line() -> None:
    text = (
        "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'\n\n"
    )
    assert nccl_cause(RuntimeError(text)) == "Cuda failure 2 'out of memory'"
    assert nccl_cause(RuntimeError("NCCL timeout\nLast error:\n")) == "NCCL timeout"


def _timeouts(group: ProcessGroup) -> list[float]:
    patient = replace(group, timeout=timedelta(seconds=4321))
    mesh = patient.mesh((2, 1), ("data", "tensor"))
    cpu = torch.device("cpu")
    assert mesh["data"].size() == 2
    return [mesh.get_group(name)._get_backend(cpu).options._timeout.total_seconds() for name in ("data", "tensor")]


def test_groups_of_a_mesh_wait_as_long_as_all_processes() -> None:
    assert run_distributed(_timeouts, 2) == [[4321.0, 4321.0]] * 2


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL timeout"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo"), False),
    ],
)
def test_lost_contact_is_distinguished_from_a_bug(error: Exception, lost: bool) -> None:
    assert is_lost_contact(error) is lost


FIRST, SECOND = (Rank(rank, rank, 2, local_size=2, job="a") for rank in (0, 1))


def test_first_process_opens_the_store_and_others_find_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(open_store, SECOND, "", tmp_path, 20)
        opened = open_store(FIRST, "", tmp_path, 20)
        found = waits.result(timeout=300)
    assert opened is not None
    assert found is not None
    opened.set("word", "output")
    assert found.get("word") == b"output"


def test_store_listens_on_localhost_for_one_machine(tmp_path: Path) -> None:
    store = open_store(FIRST, "", tmp_path, 5)
    received = json.loads(rendezvous_file(FIRST, tmp_path).read_text())
    assert received["host"] == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", received["port"]), timeout=5)
    assert store is not None


def test_store_of_several_machines_is_published_by_host_name(tmp_path: Path) -> None:
    store = open_store(Rank(0, 0, 2, local_size=1), "", tmp_path, 5)
    received = json.loads((tmp_path / "meeting-unnamed.json").read_text())
    assert received["host"] == socket.gethostname()
    socket.create_connection(("127.0.0.2", received["port"]), timeout=5).close()
    assert store is not None


def test_an_unreachable_address_is_ignored(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_json(rendezvous_file(SECOND, tmp_path), {"host": "127.0.0.1", "port": port, "mark": "old"})
    assert process_group._connect_to_store(rendezvous_file(SECOND, tmp_path)) is None


def test_store_of_another_launch_is_ignored(tmp_path: Path) -> None:
    """The port was reused: the old address leads to a store, but of another launch."""
    store = open_store(FIRST, "", tmp_path, 5)
    place = rendezvous_file(FIRST, tmp_path)
    assert process_group._connect_to_store(place) is not None
    write_json(place, {**json.loads(place.read_text()), "mark": "old"})
    assert process_group._connect_to_store(place) is None
    assert store is not None


def test_server_that_is_no_store_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_CONNECT_TIMEOUT_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        write_json(tmp_path / "place", {"host": "127.0.0.1", "port": other.getsockname()[1], "mark": "old"})
        received = pool.submit(process_group._connect_to_store, tmp_path / "place")
        while not received.done():
            other.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                guest, _ = other.accept()
                guest.close()
        assert received.result(timeout=300) is None


def test_an_address_from_launcher_or_user_takes_precedence(tmp_path: Path) -> None:
    assert open_store(Rank(0, 0, 2, master="head:29500"), "other:1", tmp_path, 5) is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(open_store, rank, f"127.0.0.1:{port}", tmp_path, 20) for rank in (SECOND, FIRST)]
        assert None not in [wait.result(timeout=300) for wait in waits]
    assert list(tmp_path.iterdir()) == []
