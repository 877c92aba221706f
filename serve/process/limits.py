"""The limits of one process of a service: connections, and memory by what takes it; several processes divide them."""

from __future__ import annotations

from dataclasses import dataclass

from serve.memory import memory_limit, resident_memory
from serve.wire.connection_limits import MAX_CALL_BYTES, MEMORY_BYTES, max_grpc_connections, max_http_connections


def divide(limit: int, workers: int) -> int:
    """Return the part of one of several processes, which is at least 1."""
    return max(limit // workers, 1)


@dataclass(frozen=True)
class ProcessLimits:
    http_connections: int
    grpc_connections: int
    request_bytes: int  # from the first byte of a body to the last of its answer
    connection_bytes: int  # of what has arrived over HTTP/1.1, and again of what clients have not read
    call_bytes: int  # of gRPC calls that wait for their clients

    @classmethod
    def of_each(cls, workers: int = 1) -> ProcessLimits:
        """Divide the open files, and most of the memory that the models have left; batches have the rest."""
        free = max(0, memory_limit() - resident_memory())

        def share(part: float, least: int, most: int) -> int:
            return min(max(int(part * free) // workers, least), most)

        return cls(
            http_connections=divide(max_http_connections(), workers),
            grpc_connections=divide(max_grpc_connections(), workers),
            request_bytes=share(0.4, least=32 << 20, most=4 << 30),
            connection_bytes=share(0.08, least=8 << 20, most=MEMORY_BYTES),
            call_bytes=share(0.14, least=16 << 20, most=MAX_CALL_BYTES),
        )
