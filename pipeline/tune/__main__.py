"""The process of one worker: `python -m pipeline.tune STUDY …`, started by `pipe tune` and stopped with it."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from pipeline.display import Display
from pipeline.history import find_project
from pipeline.system.errors import Interrupted, PipelineError, write_error
from pipeline.system.processes import TERMINATED, raise_interrupt, watch_parent
from pipeline.tune.record import read_study
from pipeline.tune.trial import run_worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="pipeline.tune", description="one worker of a search")
    parser.add_argument("study")
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True, help="number of workers on this machine")
    parser.add_argument("--errors", type=Path, required=True, help="folder for an error file")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    watch_parent()
    signal.signal(signal.SIGTERM, raise_interrupt)  # another worker can continue the trial
    project = find_project(options.project)
    try:
        body = read_study(project.runs, options.study)
        run_worker(
            body, project, lambda: project.config(options.overrides), options.workers, Display(live=False).report
        )
    except KeyboardInterrupt as interrupt:
        return TERMINATED if interrupt.args else Interrupted.exit_code  # SIGTERM's has an argument
    except PipelineError as error:
        write_error(error, options.errors)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
