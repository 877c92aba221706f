"""The report of a run, and the list of all: HTML files that need nothing else, made to be read by people."""

from pipeline.report.index import write_index
from pipeline.report.page import write_report

__all__ = ["write_index", "write_report"]
