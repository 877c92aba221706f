"""The frame of every step's process: arguments in, a fresh partial directory, one clear error out."""

from __future__ import annotations

import argparse
import errno
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.spec import leash
from pipeline.spec.errors import PipelineError, ResourceError, StageError, write_error
from pipeline.spec.rank import Rank
from pipeline.spec.run import Run


def run_step(name: str, work: Callable[[Run, Path], None], argv: Sequence[str]) -> int:
    """Call `work(run, root)`, where root is the project; a PipelineError is left for the runner and printed."""
    parser = argparse.ArgumentParser(prog=name, description=f"the {name} step of one run")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder with task.py (default: here)")
    options = parser.parse_args(argv)
    leash.hold()
    run, root = Run(options.run.resolve()), options.root.resolve()
    run.partial(name).mkdir(parents=True, exist_ok=True)
    try:
        work(run, root)
    except PipelineError as error:
        write_error(error, run.partial(name))
        print(f"{'echo' if error.echo else 'error'}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        told = _unexpected(error, root)
        write_error(told, run.partial(name))
        return told.exit_code
    return 0


def _unexpected(error: Exception, root: Path) -> PipelineError:
    """What the terminal says of a bug; the traceback is in the log."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(f"disk full on {socket.gethostname()}; free some space, then `pipe run --resume`")
    rank = f"rank {Rank.from_env().rank}: " if Rank.from_env().world_size > 1 else ""
    return StageError(f"{rank}{describe(error, root)}")


def describe(error: Exception, root: Path) -> str:
    """A bug in one line, with the line of the user's own code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"
