"""The report page of a run: one self-contained HTML file with plots and rollouts."""

from headrace.monitors.report.page import write_report

__all__ = ["write_report"]
