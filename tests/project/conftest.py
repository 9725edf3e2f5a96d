"""What tests of the site share with those of reports: a headless Chromium."""

from __future__ import annotations

from tests.results.report.conftest import browser

__all__ = ["browser"]
