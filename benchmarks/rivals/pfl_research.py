"""pfl-research (the package ``pfl``), as its documentation uses it: ``FederatedAveraging`` on a ``SimulatedBackend``.

It gets its users' samples as tensors that lie on the device already, so that its batches are slices which it caches; it
does not shuffle. The package comes from a folder that is given, with the packages that it needs and that are not here.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rivals import Federation, InProcess


def find(folder: Path | None) -> str | None:
    """Make the package importable from a folder, and say why not if it is not."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: what is installed here stays what is used
    try:
        importlib.import_module("pfl.model.pytorch")
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Learner(nn.Module):
    """The model with the two methods that pfl asks of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        with torch.no_grad():
            return {"loss": Weighted(float(F.cross_entropy(self.module(x), y, reduction="sum")), len(y))}


class PflResearch(InProcess):
    """Federated averaging by pfl."""

    def __init__(self, federation: Federation, processes: int = 1) -> None:
        os.environ["PFL_PYTORCH_DEVICE"] = str(federation.device)
        logging.getLogger("pfl").setLevel(logging.ERROR)
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.pytorch import PyTorchTensorDataset
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        work = federation.work
        self.federation, self.number, self.processes = federation, 0, processes
        self.cohort: Iterator[int] = iter(())
        self.learner = _Learner(federation.module().train())
        self.model = PyTorchModel(
            self.learner,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.learner.parameters(), lr=1.0),
        )
        users = [PyTorchTensorDataset(federation.samples(client)) for client in range(len(work.sizes))]
        training = FederatedDataset(users.__getitem__, lambda: next(self.cohort))
        weighting = [WeightByDatapoints()] if len(set(work.sizes)) > 1 else []
        self.backend = SimulatedBackend(training_data=training, val_data=training, postprocessors=weighting)
        self.training = NNTrainHyperParams(local_learning_rate=work.lr, local_num_epochs=1, local_batch_size=work.batch)
        self.algorithm = FederatedAveraging()

    def play(self) -> None:
        """Play one round: the algorithm goes on where it stopped, up to one more iteration."""
        from pfl.algorithm.base import NNAlgorithmParams

        self.number += 1
        cohort = self.federation.cohort(self.number)
        # pfl draws a client for every process, of which each keeps its own, also where some get fewer.
        self.cohort = iter(cohort + cohort[: -len(cohort) % self.processes])
        params = NNAlgorithmParams(
            central_num_iterations=self.number,
            evaluation_frequency=2**62,  # never again after the first, which is for warming up
            train_cohort_size=self.federation.work.cohort,
            val_cohort_size=0,
        )
        self.algorithm.run(params, self.backend, self.model, self.training, send_metrics_to_platform=False)

    def parameters(self) -> Tensor:
        """Give the global model."""
        return nn.utils.parameters_to_vector(self.learner.parameters()).detach()
