"""What a node tells of training: each new attempt in a line, and the log where nobody else shows it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.spec.attempts import FILE, read_story
from pipeline.spec.restarts import told
from pipeline.spec.run import Run


class News:
    def __init__(self, run: Run, log: Path, restarts: int) -> None:
        self._run, self._log, self._restarts = run, log, restarts
        self._record = run.path / FILE
        self._seen = self._size()
        self._known = len(read_story(run.path).attempts)
        self._shown = log.stat().st_size if log.exists() else 0

    def tell(self) -> None:
        """What is new since the last call."""
        self._show_log()
        if self._size() == self._seen:
            return
        self._seen = self._size()
        story = read_story(self._run.path)
        if len(story.attempts) > self._known:
            self._known = len(story.attempts)
            if sentence := told(story, self._restarts):
                self.say(sentence)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def _size(self) -> int:
        return self._record.stat().st_size if self._record.exists() else 0

    def _show_log(self) -> None:
        if not self._log.exists() or os.path.samestat(os.fstat(1), self._log.stat()):
            return
        with self._log.open("rb") as file:
            file.seek(self._shown)
            data = file.read()
        self._shown += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
