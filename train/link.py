"""The wire between the parameter server and one worker: a gloo group of these two processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.spec.errors import LostContact
from train.group import Group, lost_contact
from train.server import Result, Server, Work
from train.strategy.traffic import Traffic

_HEAD = 6  # numbers ahead of a row: whether one follows, and all of `Work` or `Result` but its tensor


class Desk(Protocol):
    """Where a worker trades a result for its next step."""

    def trade(self, result: Result | None) -> Work | None: ...


class Here:
    """The desk of the first process, in which the server lives."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def trade(self, result: Result | None) -> Work | None:
        return self._server.trade(0, result)


class Link:
    """One end of a wire; the other end is `peer`. Each wire has a group of its own: threads must not share one."""

    def __init__(self, wire: dist.ProcessGroup, peer: int, numbers: int, traffic: Traffic) -> None:
        self._wire, self._peer, self._numbers, self._traffic = wire, peer, numbers, traffic

    def trade(self, result: Result | None) -> Work | None:
        """The worker's end."""
        if result is None:
            self._send([], None)
        else:
            self._send([result.step, result.version, result.samples, result.loss, result.norm], result.gradient)
        head, weights = self._receive()
        return None if weights is None else Work(int(head[0]), int(head[1]), weights)

    def serve(self, server: Server) -> None:
        """The server's end, for one epoch; runs in a thread of its own."""
        try:
            while True:
                head, gradient = self._receive()
                work = server.trade(self._peer, None if gradient is None else _result(head, gradient))
                if work is None:
                    self._send([], None)
                    return
                self._send([work.step, work.version], work.weights)
        except Exception as error:
            server.fail(self._lost(error) if lost_contact(error) else error)

    def _send(self, head: list[float], row: Tensor | None) -> None:
        filled = [float(row is not None), *head]
        self._hand_over(torch.tensor(filled + [0.0] * (_HEAD - len(filled)), dtype=torch.float64))
        if row is not None:
            self._hand_over(row.cpu())

    def _receive(self) -> tuple[list[float], Tensor | None]:
        head = torch.empty(_HEAD, dtype=torch.float64)
        dist.recv(head, self._peer, self._wire)
        follows, *numbers = head.tolist()
        if not follows:
            return numbers, None
        row = torch.empty(self._numbers)
        dist.recv(row, self._peer, self._wire)
        return numbers, row

    def _hand_over(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer, self._wire)
        self._traffic.sent_bytes += tensor.numel() * tensor.element_size()

    def _lost(self, error: Exception) -> LostContact:
        found = LostContact(
            f"rank {self._peer} ended, or sent no gradient within train.timeout_seconds; the log tells which"
        )
        found.__cause__ = error
        return found


def make_links(group: Group, seconds: int, numbers: int, traffic: Traffic) -> list[Link]:
    """The ends this process holds: the server's for every worker, or a worker's; all take part."""
    found = []
    for rank in range(1, group.size):
        wire = dist.new_group([0, rank], timeout=timedelta(seconds=seconds), backend="gloo")
        if group.rank.rank in (0, rank):
            assert isinstance(wire, dist.ProcessGroup)
            found.append(Link(wire, rank if group.rank.first else 0, numbers, traffic))
    return found


def _result(head: list[float], gradient: Tensor) -> Result:
    step, version, samples, loss, norm = head
    return Result(int(step), int(version), int(samples), loss, norm, gradient)
