"""The log of connections, which the service implements: refusals that reach no application, and faults."""

from __future__ import annotations

from typing import Any, Protocol


class Log(Protocol):
    """Clients can cause each of these lines: no number of clients may make more than so many a second."""

    def refused(self, label: str, **fields: Any) -> None:
        """Count a refusal under this label, and write its fields in a line, if there are any."""

    def failed(self, text: str, **fields: Any) -> None:
        """Write a fault of ours, with the exception that is being handled, if any."""
