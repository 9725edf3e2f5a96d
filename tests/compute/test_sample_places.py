"""Where samples lie: on the device, or on the host where the device has no room for them; the numbers are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.compute import samples as samples_module
from tests.support import DEVICE


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU computes where its samples lie")
@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_device_without_room_gets_its_samples_from_the_host(
    as_bytes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (240, 1, 8, 8), dtype=np.uint8)
    data = {f"{k}": (x[k::4] if as_bytes else x[k::4] / 255.0, draw.integers(0, 3, 60)) for k in range(4)}
    monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", 0)
    runs = []
    for part in (0.5, 0.0):
        monkeypatch.setattr(samples_module, "_DEVICE_PART", part)
        runs.append(
            coterie.run("ditto", data=data, rounds=2, device=str(DEVICE), out=tmp_path / str(part), progress=False)
        )
    values = [torch.from_numpy(run.metrics["value"].to_numpy().copy()) for run in runs]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
