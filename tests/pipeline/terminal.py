"""A terminal of a given width for tests: a pseudo-terminal whose output can be read."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
import threading
import time

_POLL_SECONDS = 0.01
_FRAME = re.compile(r"\x1b\[\?25l\r([^\r\n]*)\x1b\[J\r")
_COLORS = re.compile(r"\x1b\[\d+m")


class Terminal:
    """`stream` is what the program under test writes to."""

    def __init__(self, width: int = 80, encoding: str = "utf-8") -> None:
        self._ours, theirs = pty.openpty()
        self._raw = os.fdopen(theirs, "r+b", buffering=0)
        self.stream = io.TextIOWrapper(self._raw, encoding=encoding, write_through=True)
        self.resize(width)
        self.output = ""  # all that was read so far
        self._position = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_always)  # a full terminal would block the program
        self._reader.start()

    def resize(self, width: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def close(self) -> None:
        self.stream.detach()
        self._raw.close()
        self._reader.join()
        os.close(self._ours)

    def _read_always(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                select.select([self._ours], [], [])
                self.read_all()

    def read_all(self) -> str:
        """Return everything that was written since the terminal was opened."""
        with self._lock:
            while select.select([self._ours], [], [], 0)[0]:
                self.output += os.read(self._ours, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
        return self.output

    def next_line(self) -> str:
        """Wait for the next drawn line and return it without its colors."""
        while not (frame := _FRAME.search(self.read_all(), self._position)):
            time.sleep(_POLL_SECONDS)
        self._position = frame.end()
        return _COLORS.sub("", frame[1])

    def line_with(self, text: str) -> str:
        """Wait for a drawn line that contains this text."""
        while text not in (line := self.next_line()):
            pass
        return line
