"""Several worker processes behind one port: the supervisor accepts connections and gives each to the least busy worker.

The supervisor binds the ports, loads the models and forks the workers, so that memory which is only read, such as
weights, exists once. It answers the health port itself and replaces workers that die. A worker gets its
connections from a socket that only the supervisor writes to; its end is the request to drain.

Threads do not survive a fork: models that need some (CUDA, several threads in one inference, text generation) are
loaded by each worker after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import mmap
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import onnxruntime
import uvloop

from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError, PipelineError
from pipeline.system.processes import cuda_problem
from serve.limits import divide
from serve.models import LoadedModel
from serve.monitoring.logs import ConnectionLog, LogLimit, log_fatal, log_fields, log_loop_exception
from serve.monitoring.snapshot import Snapshot, merge
from serve.options import Options
from serve.process.server import STUCK_SECONDS, Health, Server, beat, wait_for_first
from serve.process.service import GRACE_SECONDS, Port, Service
from serve.security import Security, reload_changed_files
from serve.wire.accepting import ACCEPTED_PER_TURN, PAUSE_SECONDS, Acceptor, close_listener
from serve.wire.listeners import BACKLOG, Http1Listener, Listener

_MAX_DEATHS, _DEATHS_SECONDS = 5, 60.0  # more in that time end the service: replacing would not help
_FORK_RETRY_SECONDS = 1.0
_SLOW_SECONDS = 2.0  # without a turn of its event loop a worker gets no connection, if another is quicker
_CALL_SECONDS = 2.0  # of a busy process; of a worker's metrics, the last ones count then
_TOTAL_SECONDS = 10.0  # of a supervisor that has busy workers
_PORTS: tuple[Port, ...] = ("http", "grpc", "standby")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

log = logging.getLogger(__name__)

Load = Callable[[], list[LoadedModel]]
MakeService = Callable[[], Service]
Methods = Mapping[str, Callable[..., Any]]  # some are coroutine functions


class Channel:
    """Calls between the supervisor and a worker, in both directions. Values are pickled: both are the same program."""

    def __init__(self, sock: socket.socket, methods: Methods) -> None:
        self._socket, self._methods = sock, methods
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    async def run(self) -> None:
        """Answer calls until the other side ends."""
        reader = self._reader
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(4))
                number, method, value = pickle.loads(await reader.readexactly(size))  # noqa: S301  # from our own fork
                if method:
                    task = asyncio.create_task(self._answer(number, method, value))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif (answer := self._waiting.pop(number, None)) is not None and not answer.done():
                    answer.set_result(value)
        self._writer.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)

    async def call(self, method: str, *args: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Return what the other side's method returns; None if that fails or takes too long, or if it ends before."""
        if self._writer.is_closing():
            return None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(number, method, args)
        await asyncio.wait([answer], timeout=seconds)
        self._waiting.pop(number, None)
        return answer.result() if answer.done() else None

    def notify(self, method: str) -> None:
        """Call a method of the other side without waiting for its answer."""
        self._send(0, method, ())

    async def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        answer = None
        try:
            value = self._methods[method](*args)
            answer = await value if inspect.isawaitable(value) else value
        finally:  # the event loop logs the error
            self._send(number, "", answer)

    def _send(self, number: int, method: str, value: Any) -> None:
        data = pickle.dumps((number, method, value))
        self._writer.write(len(data).to_bytes(4) + data)


class Board:
    """Memory that all processes share: of each worker the time of its last turn, and the connections it has closed."""

    def __init__(self, workers: int) -> None:
        self._values = memoryview(mmap.mmap(-1, 16 * workers)).cast("d")

    def note(self, index: int, now: float, closed: int) -> None:
        self._values[2 * index], self._values[2 * index + 1] = now, closed

    def turned_at(self, index: int) -> float:
        return self._values[2 * index]

    def closed(self, index: int) -> int:
        return int(self._values[2 * index + 1])


class Worker:
    """A process that answers; belongs to one event loop."""

    def __init__(self, service: Service, connections: socket.socket, channel: socket.socket, note: Any) -> None:
        """`note` publishes the time and how many connections were closed."""
        self._service, self._connections, self._note = service, connections, note
        metrics, status = service.requests.metrics, service.repository.status
        methods = {"status": status, "snapshot": metrics.snapshot, "become_unready": service.become_unready}
        self._channel = Channel(channel, methods)
        metrics.of_service = self._total
        service.on_connection_end = self._publish
        self._taken = 0

    async def serve(self, ports: Sequence[Port], security: Security) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_loop_exception)
        for port in ports:
            await self._service.listen(port, None)
        await self._channel.open()
        tasks = [
            asyncio.create_task(self._channel.run()),
            asyncio.create_task(reload_changed_files(security.reloaded_files())),
            asyncio.create_task(beat(lambda _: self._publish())),
        ]
        self._ended = asyncio.Event()
        loop.add_reader(self._connections, self._receive)
        await self._channel.call("ready", self._service.identity())
        await self._ended.wait()
        await self._service.drain()
        self._service.close()
        for task in tasks:
            task.cancel()

    def _receive(self) -> None:
        """Take the connections that the supervisor has accepted; the end of them all is the request to drain."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            for _ in range(ACCEPTED_PER_TURN):
                port, files, _, _ = socket.recv_fds(self._connections, 1, 1)
                if not port:
                    asyncio.get_running_loop().remove_reader(self._connections)
                    self._ended.set()
                    return
                client = socket.socket(fileno=files[0])
                client.setblocking(False)
                self._taken += 1
                self._service.take(_PORTS[port[0]], client)

    def _publish(self) -> None:
        """Let the supervisor see that this process makes turns, and how many connections have ended."""
        self._note(time.monotonic(), self._taken - self._service.open_connections)

    async def _total(self) -> Snapshot:
        total = await self._channel.call("total", seconds=_TOTAL_SECONDS)
        return total or self._service.requests.metrics.snapshot()


class WorkerProcess:
    """A worker, as the supervisor sees it."""

    def __init__(self, index: int, pid: int, connections: socket.socket, channel: Channel) -> None:
        self.index, self.pid, self.connections, self.channel = index, pid, connections, channel
        self.given = 0  # connections
        self.ready = False
        self.snapshot: Snapshot | None = None  # the last one


class Supervisor(Server):
    """Starts the workers, gives them connections, replaces those that die, and sums up what they report."""

    def __init__(self, make_service: MakeService, options: Options, *args: Any) -> None:
        super().__init__(options, *args)
        self._make_service = make_service
        self._board = Board(options.workers)
        self._workers: dict[int, WorkerProcess] = {}  # by index
        self._missing = deque(range(options.workers))  # workers that are to be forked
        self._fork_needed, self._all_ready, self._all_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._fork_needed.set()
        self._identity: dict[str, Any] = {}
        self._inherited = open_files()  # all that a worker may need: what the models have opened
        self._acceptors: list[tuple[socket.socket, Port, Acceptor]] = []
        self._queue: deque[tuple[Port, socket.socket]] = deque()  # connections that no worker has taken yet
        self._is_paused = False
        self._health: Listener[Any] | None = None
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._retired: Snapshot | None = None  # counters of workers that died: no sum ever decreases
        self._status: int | None = None  # of a worker without which the service cannot go on
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> int:
        """Return the exit status once the last worker has ended.

        Workers are forked between two runs of the event loop. It polls, so that a child can leave it behind.
        """
        loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        serving = loop.create_task(self.serve())
        while not serving.done():
            needed = loop.create_task(self._fork_needed.wait())
            loop.run_until_complete(asyncio.wait({serving, needed}, return_when=asyncio.FIRST_COMPLETED))
            self._fork_needed.clear()
            while self._missing and not self._stop_requested.is_set():
                if not self._fork(loop, self._missing.popleft()):
                    break
        needed.cancel()
        loop.run_until_complete(asyncio.gather(needed, *self._tasks, return_exceptions=True))
        loop.close()
        serving.result()
        return self._status or 0

    # The life of the service

    async def start(self) -> None:
        await wait_for_first(self._all_ready, self._stop_requested)

    async def listen(self, port: Port, sock: socket.socket) -> None:
        acceptor = Acceptor(sock, partial(self._give, port), ConnectionLog())
        acceptor.start(BACKLOG)
        self._acceptors.append((sock, port, acceptor))

    async def listen_health(self, health: Health, sock: socket.socket) -> None:
        self._health = Http1Listener(health, sock, [("x-served-by", str(os.getpid()))], ConnectionLog())
        await self._health.start()

    def is_live(self) -> bool:
        now = time.monotonic()
        return all(now - self._board.turned_at(worker.index) < STUCK_SECONDS for worker in self._ready_workers())

    def is_ready(self) -> bool:
        return bool(self._ready_workers()) and not self._stop_requested.is_set()

    def identity(self) -> dict[str, Any]:
        return {**self._identity, "workers": self.options.workers}

    async def drain(self) -> None:
        for worker in self._ready_workers():
            worker.channel.notify("become_unready")
        await asyncio.gather(*(self._stop_accepting(*listening) for listening in self._acceptors))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * GRACE_SECONDS):
                while self._queue and self._ready_workers():
                    await asyncio.sleep(PAUSE_SECONDS)
                for worker in self._workers.values():
                    worker.connections.close()
                    if not worker.ready:  # it is still loading
                        os.kill(worker.pid, signal.SIGKILL)
                if self._workers:
                    await self._all_ended.wait()
        self._kill_all()
        if self._health is not None:
            await self._health.stop(GRACE_SECONDS)

    def _on_signal(self, number: int) -> None:
        if self._stop_requested.is_set():
            self._kill_all()
        super()._on_signal(number)

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    # Connections

    async def _stop_accepting(self, sock: socket.socket, port: Port, acceptor: Acceptor) -> None:
        acceptor.close()
        for client in await close_listener(sock):
            self._give(port, client)

    def _give(self, port: Port, client: socket.socket) -> None:
        self._queue.append((port, client))
        self._share_out()

    def _share_out(self) -> None:
        """Give the connections to workers; accept no more while none of these takes them."""
        while self._queue and self._send(*self._queue[0]):
            _, client = self._queue.popleft()
            client.close()  # this process's copy
        if self._queue and not self._is_paused:
            self._is_paused = True
            for _, _, acceptor in self._acceptors:
                acceptor.pause()
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._is_paused = False
        self._share_out()

    def _send(self, port: Port, client: socket.socket) -> bool:
        """Send a connection to the worker that has the fewest, of those that make turns."""
        now = time.monotonic()

        def load(worker: WorkerProcess) -> tuple[bool, int]:
            is_slow = now - self._board.turned_at(worker.index) > _SLOW_SECONDS
            return is_slow, worker.given - self._board.closed(worker.index)

        for worker in sorted(self._ready_workers(), key=load):
            try:
                socket.send_fds(worker.connections, [bytes([_PORTS.index(port)])], [client.fileno()])
            except OSError:  # it has died, or takes no more at the moment
                continue
            worker.given += 1
            return True
        return False

    # Workers

    def _ready_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.ready]

    def _fork(self, loop: asyncio.AbstractEventLoop, index: int) -> bool:
        """Start a worker; return whether that was possible."""
        connections, workers_connections = socket.socketpair()
        channel, workers_channel = socket.socketpair()
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the child must not run handlers of this loop
        try:
            pid = os.fork()
        except OSError as error:  # the limit of processes or memory
            log.error("cannot start a worker, trying again: %s", error)
            pid = -1
        if pid == 0:
            self._be_worker(index, workers_connections, workers_channel)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        workers_connections.close()
        workers_channel.close()
        if pid < 0:
            connections.close()
            channel.close()
            self._missing.appendleft(index)
            loop.call_later(_FORK_RETRY_SECONDS, self._fork_needed.set)
            return False
        connections.setblocking(False)
        self._board.note(index, time.monotonic(), 0)
        methods: Methods = {"ready": partial(self._on_ready, index), "total": self._total}
        worker = self._workers[index] = WorkerProcess(index, pid, connections, Channel(channel, methods))
        task = loop.create_task(self._follow(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _be_worker(self, index: int, connections: socket.socket, channel: socket.socket) -> NoReturn:
        """Serve until the end of this process."""
        status = 1
        try:
            for number in _SIGNALS:  # which a terminal sends to all processes: the supervisor decides
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            nothing = os.open(os.devnull, os.O_RDWR)
            own = {nothing, connections.fileno(), channel.fileno()}
            for file in open_files() - self._inherited - own:
                os.dup2(nothing, file)  # what the supervisor closes must be closed; the number stays taken
            for sock in self.sockets.values():
                sock.close()
            connections.setblocking(False)
            channel.setblocking(False)
            LogLimit.lines_per_second = divide(LogLimit.lines_per_second, self.options.workers)
            _held = channel.dup()  # its end reports that of the process, whose exit status is known then
            ports = [port for port in _PORTS if port in self.sockets]
            worker = Worker(self._make_service(), connections, channel, partial(self._board.note, index))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(worker.serve(ports, self.security))
            status = 0
        except PipelineError as error:
            log_fatal(error, self.options.log_format)
            status = error.exit_code
        except BaseException:
            log.exception("a worker failed")
        finally:
            logging.shutdown()
            sys.stderr.flush()
            os._exit(status)

    async def _follow(self, worker: WorkerProcess) -> None:
        """Answer a worker until it ends, and replace it if it died."""
        await worker.channel.open()
        await worker.channel.run()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)  # nothing can reach it any more
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        status = 128 - status if status < 0 else status
        worker.connections.close()
        del self._workers[worker.index]
        if worker.snapshot is not None:
            worker.snapshot.end()
            self._retired = merge([*filter(None, [self._retired]), worker.snapshot])
        if self._stop_requested.is_set():
            if not self._workers:
                self._all_ended.set()
            return
        now = time.monotonic()
        hopeless = len(self._deaths) == _MAX_DEATHS and now - self._deaths[0] < _DEATHS_SECONDS
        if hopeless or not self._all_ready.is_set():
            if hopeless:
                log.error("workers die again and again; ending", extra=log_fields(worker=worker.pid, status=status))
            self._status = self._status or status or 1
            self._stop_requested.set()
            return
        self._deaths.append(now)
        log.error("a worker died and is replaced", extra=log_fields(worker=worker.pid, status=status))
        self._missing.append(worker.index)
        self._fork_needed.set()

    def _on_ready(self, index: int, identity: dict[str, Any]) -> None:
        worker = self._workers[index]
        self._identity = identity
        worker.ready = True
        if len(self._ready_workers()) == self.options.workers:
            self._all_ready.set()

    # Reports

    async def status(self) -> dict[str, Any]:
        """Return the status of a worker, as each has the same models, with the counters of all workers."""
        await wait_for_first(self._all_ready, self._stop_requested)
        replies = await asyncio.gather(*(worker.channel.call("status") for worker in self._ready_workers()))
        body: dict[str, Any] = next(filter(None, replies), {"models": {}})
        for version in (await self._total()).versions.values():
            if version.shadow is not None and (model := body["models"].get(version.name)) and model["shadow"]:
                model["shadow"].update(asdict(version.shadow))
        return body

    async def _total(self) -> Snapshot:
        """Return what all workers have counted."""
        await asyncio.gather(*map(self._take_snapshot, self._ready_workers()))
        snapshots = [worker.snapshot for worker in self._workers.values()]
        return merge(list(filter(None, (*snapshots, self._retired))))

    async def _take_snapshot(self, worker: WorkerProcess) -> None:
        worker.snapshot = await worker.channel.call("snapshot") or worker.snapshot


def share_models(load: Load, bundles: Sequence[Bundle]) -> list[LoadedModel] | None:
    """Load the models for all workers, or return None if each has to: a device or threads do not survive a fork."""
    available = onnxruntime.get_available_providers()
    for bundle in bundles:
        runtime = bundle.signature.runtime
        on_device = runtime.provider != "cpu" and not cuda_problem(available)
        if on_device or runtime.threads != 1 or bundle.signature.generation is not None:
            return None
    threads = count_threads()
    loaded = load()
    if count_threads() > threads:
        raise ConfigError(
            "--workers: the bundle's codec starts threads while it is loaded, which do not survive the fork of a "
            "worker; to fix it: start them at the first request, or serve with one worker"
        )
    return loaded


def count_threads() -> int:
    """Return the number of threads of this process, those of libraries included; 0 where the system has no list."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 0


def open_files() -> set[int]:
    """Return the numbers of all open files of this process."""
    return {int(name) for name in os.listdir("/dev/fd")}
