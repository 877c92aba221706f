"""What training tells while it runs: `metrics.jsonl`, TensorBoard, and a line per epoch on standard output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard.writer import SummaryWriter

from pipeline.spec.files import unwritable, write_atomic

_NO_CURVE = {"total_steps", "batch_size", "expert_loads"}  # the same in every line, or too many


class Journal:
    """Written by the first process alone."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        path, board = directory / "metrics.jsonl", directory / "tensorboard"
        with _writing(path):
            _forget_after(path, resumed_step)
        with _writing(board):
            self._board = SummaryWriter(str(board), purge_step=resumed_step + 1)
        with _writing(path):
            self._file = path.open("a")

    def record(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """One line: `step` steps are complete. Nested values become grouped TensorBoard scalars."""
        self._file.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        self._file.flush()
        self._draw(step, {name: value for name, value in values.items() if name not in _NO_CURVE})

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def _draw(self, step: int, values: Mapping[str, Any]) -> None:
        """All curves in one event: TensorBoard's checksums are plain Python and take their time from the next steps."""
        points = []
        for name, value in values.items():
            group = value if isinstance(value, Mapping) else {"": value}
            tags = {f"{name if inner else 'train'}/{inner or name}": number for inner, number in group.items()}
            points += [Summary.Value(tag=tag, simple_value=number) for tag, number in tags.items()]
        writer: Any = self._board.file_writer  # published as None, which it is before and after
        writer.add_summary(Summary(value=points), step)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def _forget_after(path: Path, step: int) -> None:
    """Drop lines of steps that will be done again, so that each step has one line whatever was killed."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break  # the half line a kill left behind
    write_atomic(path, "".join(kept))
