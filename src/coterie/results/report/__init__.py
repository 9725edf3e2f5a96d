"""Reports: runs, or whole comparisons, as one HTML file to look at, and as figures for papers."""

from __future__ import annotations

from coterie.results.report.writer import ReportFiles, write

__all__ = ["ReportFiles", "write"]
