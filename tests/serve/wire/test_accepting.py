"""New connections do not wait behind the requests of those that are open."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from serve.monitoring.logs import ConnectionLog
from serve.wire.listeners import Http1Listener
from tests.serve.wire.http1.fakes import Application

REQUEST = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
CLIENTS = 50


def test_many_connections_are_accepted_in_one_turn_of_the_event_loop() -> None:
    """A turn takes long under load, so that one connection for each would leave some waiting for seconds."""

    async def run() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            listener = Http1Listener(Application(), sock, [], ConnectionLog())
            await listener.start()
            try:
                clients = [socket.create_connection(sock.getsockname()) for _ in range(CLIENTS)]
                for client in clients:
                    client.sendall(REQUEST)
                turns = 0
                while len(listener.connections) < CLIENTS:
                    turns += 1
                    await asyncio.sleep(0)
                assert turns < CLIENTS / 4
                for client in clients:
                    client.setblocking(False)
                    assert (await asyncio.get_running_loop().sock_recv(client, 100)).startswith(b"HTTP/1.1 200 ")
                    client.close()
            finally:
                await listener.stop(5)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), 30))
