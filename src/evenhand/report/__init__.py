"""The report of one or several runs: a single HTML page that needs nothing else to be read."""

from evenhand.report.page import write_report

__all__ = ["write_report"]
