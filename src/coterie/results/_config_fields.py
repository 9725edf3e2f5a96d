"""Which fields of a configuration decide what a run computes, how it computes it, and what it records."""

from __future__ import annotations

from typing import Literal

from coterie.config import ExperimentConfig

_HOW = frozenset({"engine", "device", "kernel", "convolution", "chunk", "compile", "threads", "keep", "scratch"})
_RECORD = frozenset({"checkpoint_every", "eval_every", "eval_train", "matrix", "matrix_every", "s_acc"})


def config_fields(kind: Literal["what", "how", "record"]) -> frozenset[str]:
    known = {"how": _HOW, "record": _RECORD, "what": frozenset(ExperimentConfig.model_fields) - _HOW - _RECORD}
    return known[kind]
