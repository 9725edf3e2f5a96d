"""Models taken home from a finished run: a folder that predicts for raw rows without Coterie."""

from __future__ import annotations

from coterie.results.export.exporting import Kind, export, kind
from coterie.results.export.model_folder import Exported
from coterie.results.export.personalizing import personalize
from coterie.results.export.predicting import predict

__all__ = ["Exported", "Kind", "export", "kind", "personalize", "predict"]
