"""The report of a run: one HTML file that needs nothing else, made to be read by people."""

from pipeline.report.page import write_report

__all__ = ["write_report"]
