"""Settings common to all tests."""

from __future__ import annotations

import os

if os.environ.get("COTERIE_TEST_DEVICE", "cpu") == "cpu":
    # Read where kernels are defined: on a CPU they can only be interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

torch.set_num_threads(1)
