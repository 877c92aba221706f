"""The functions of ours that one request or one training step enters, in order, and the files they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class CallTrace:
    """Records calls of functions in some folders, each as its file and its name."""

    folders: Sequence[Path]
    calls: list[tuple[str, str]] = field(default_factory=list)
    _frames: set[FrameType] = field(default_factory=set)

    def record(self, frame: FrameType) -> None:
        """Record a call; a coroutine that is resumed is not recorded again."""
        path = Path(frame.f_code.co_filename)
        if frame not in self._frames and any(path.is_relative_to(folder) for folder in self.folders):
            self._frames.add(frame)
            self.calls.append((str(path.relative_to(ROOT)), frame.f_code.co_qualname))

    @property
    def visits(self) -> list[str]:
        """The files in the order they are entered; calls within one file are one visit."""
        files = [file for file, _ in self.calls]
        return [file for index, file in enumerate(files) if index == 0 or files[index - 1] != file]

    @property
    def files(self) -> list[str]:
        """Each file once, in the order of the first visit."""
        return list(dict.fromkeys(self.visits))

    @property
    def returns(self) -> int:
        """How often a file is entered that had been left before."""
        return len(self.visits) - len(self.files)

    def print_calls(self) -> None:
        previous = ""
        for file, function in self.calls:
            print(f"{file if file != previous else '':34} {function}")
            previous = file
        print()
