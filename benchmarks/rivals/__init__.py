"""The same rounds of FedAvg, played by different simulators.

:class:`Work` says what a round is; each module has one simulator, made of a :class:`Federation` and with the face of
:class:`Rival`. All start from the same model, hold the same samples in memory on the same device, and take the same
number of steps over the same number of samples of equally many clients.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from coterie import randomness
from coterie.models import build

CLASSES = 10
_EVALUATED = 2000


@dataclass(frozen=True)
class Work:
    """One epoch of SGD on each client of a cohort, then the average: what a round has to do."""

    model: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    cohort: int
    batch: int
    lr: float = 0.05

    @property
    def steps(self) -> int:
        """Steps of a round, where all clients hold equally many samples; else of one in which all take part."""
        return round(sum(math.ceil(size / self.batch) for size in self.sizes) * self.cohort / len(self.sizes))

    @property
    def samples(self) -> int:
        """Samples of a round, likewise."""
        return round(sum(self.sizes) * self.cohort / len(self.sizes))

    def plain(self) -> str:
        """Give it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Work:
        """Read what :meth:`plain` gave."""
        values = json.loads(text)
        return cls(**values | {"shape": tuple(values["shape"]), "sizes": tuple(values["sizes"])})


class Rival(Protocol):
    """A simulator that has been given its work."""

    def play(self) -> None:
        """Play one round."""

    def parameters(self) -> Tensor:
        """Give the global model as one vector, parameters in the module's order."""

    def processor_seconds(self) -> float:
        """Give the processor time that it has used so far, whatever else runs on the machine."""

    def close(self) -> None:
        """Give back whatever it holds."""


class InProcess:
    """What those have in common that play in this process."""

    def processor_seconds(self) -> float:
        """Give the processor time of this process."""
        return time.process_time()

    def close(self) -> None:
        """Nothing is held."""


class Federation:
    """The samples, the initial model and the cohorts of some work; the samples can be learnt, but not at once."""

    def __init__(self, work: Work, device: torch.device | str = "cpu", folder: Path | None = None) -> None:
        self.work, self.device = work, torch.device(device)
        if folder is not None:
            x, y = np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy")
        else:
            x, y = self._drawn()
        self.x, self.y = (torch.from_numpy(array).to(self.device) for array in (x, y))
        self.bounds = [0, *itertools.accumulate(work.sizes)]

    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        draw = randomness.stream(1, "benchmark")
        y = draw.integers(CLASSES, size=sum(self.work.sizes))
        prototypes = draw.standard_normal((CLASSES, *self.work.shape), dtype="float32")
        x = draw.standard_normal((len(y), *self.work.shape), dtype="float32")
        # What a convolution sees at once is small, so the signal must be stronger there to be learnt in a few rounds.
        strength = 1.0 if self.work.model.startswith("cnn") else 0.1
        for begin in range(0, len(y), 4096):
            x[begin : begin + 4096] += strength * prototypes[y[begin : begin + 4096]]
        return x, y

    def save(self, folder: Path) -> None:
        """Put the samples and what is to be done with them where another process can map them."""
        np.save(folder / "x.npy", self.x.cpu().numpy())
        np.save(folder / "y.npy", self.y.cpu().numpy())
        (folder / "work.json").write_text(self.work.plain(), encoding="utf-8")

    def module(self) -> nn.Module:
        """Build the model; the same numbers every time."""
        with randomness.torch_stream(1, "benchmark model"):
            return build(self.work.model, self.work.shape, CLASSES).to(self.device)

    def cohort(self, number: int) -> list[int]:
        """Give the clients of a round, counted from 1, in increasing order."""
        total = len(self.work.sizes)
        if self.work.cohort == total:
            return list(range(total))
        drawn = randomness.stream(1, "benchmark cohort", number).choice(total, size=self.work.cohort, replace=False)
        return sorted(drawn.tolist())

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Give a client's samples, as views."""
        part = slice(self.bounds[client], self.bounds[client + 1])
        return self.x[part], self.y[part]

    def score(self, parameters: Tensor) -> dict[str, float]:
        """Give loss and accuracy of a model on samples of the federation, the same ones for all."""
        module = self.module().eval()
        nn.utils.vector_to_parameters(parameters.to(self.device), module.parameters())
        picked = torch.linspace(0, len(self.y) - 1, min(_EVALUATED, len(self.y)), device=self.device).long()
        with torch.no_grad():
            outputs = torch.cat([module(part) for part in self.x[picked].split(200)])
        wanted = self.y[picked]
        right = (outputs.argmax(1) == wanted).float().mean()
        return {"loss": float(F.cross_entropy(outputs, wanted)), "accuracy": float(right)}


def floor(work: Work, rates: dict[str, float], product: str = "product_gflop_s") -> dict[str, float]:
    """Say what a round must take on a machine with these ceilings, by operations and by bytes.

    Operations are counted by PyTorch on one step of the plain module. Of bytes, only those are counted that cannot be
    saved: in each step the model is read and written once, and every sample is read once. What stays in a cache can be
    faster than that; whatever else is written to memory makes it slower.
    """
    module = build(work.model, work.shape, CLASSES)
    x, y = torch.zeros(work.batch, *work.shape), torch.zeros(work.batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(x), y).backward()
    operations = counter.get_total_flops() * work.samples / work.batch
    row = 4 * sum(parameter.numel() for parameter in module.parameters())
    moved = work.steps * 2 * row + work.samples * 4 * math.prod(work.shape)
    by_operations, by_bytes = operations / rates[product] / 1e9, moved / rates["copy_gb_s"] / 1e9
    return {
        "operations": operations,
        "bytes": moved,
        "seconds_by_operations": by_operations,
        "seconds_by_bytes": by_bytes,
        "seconds": max(by_operations, by_bytes),
    }


def same_work(scores: Sequence[dict[str, float]], start: float) -> float:
    """Say how far the losses that the rivals reached lie apart, in parts of what they have learnt."""
    losses = [score["loss"] for score in scores]
    learnt = start - min(losses)
    return (max(losses) - min(losses)) / learnt if learnt > 0 else math.inf
