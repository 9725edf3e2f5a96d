"""FedAvg-FT: federated averaging, then fine-tuning.

Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage, "Federated evaluation of on-device personalization", 2019; as
compared with in Huang et al., AAAI 2021.

::

    rounds:          as FedAvg
    evaluation:      v_i ← E_ft epochs of SGD on f_i, starting from w; dropped afterwards

Departures from the paper: none; ``E_ft`` is the number of local epochs unless given. With ``E_ft = 0`` the personal
models are the global one.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from coterie.algorithms.base import Ask, Cohort, Message, Minibatches, Personalise, State, Task
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local_training import LocalTraining, ProximalTraining


def fine_tuning(settings: LocalTraining, epochs: int | None) -> ProximalTraining:
    """Return the task that fine-tunes the global model on the client."""
    passes = settings.local_epochs if epochs is None else epochs
    return ProximalTraining(settings.stepper, Minibatches(settings.batch_size, passes), reply=False)


class FedAvgFT(FedAvg):
    """FedAvg whose personal models are the global one, fine-tuned on each client."""

    name: ClassVar[str] = "fedavg_ft"
    title: ClassVar[str] = "FedAvg-FT"
    citation: ClassVar[str] = "Wang et al., 2019"

    fine_tune_epochs: int | None = Field(
        None, ge=0, le=Minibatches.MOST, description="epochs of fine-tuning; the local epochs if not given"
    )

    def tasks(self) -> dict[str, Task]:
        """Return FedAvg's training, and fine-tuning."""
        return super().tasks() | {"fine_tune": fine_tuning(self, self.fine_tune_epochs)}

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Fine-tune the global model on every client."""
        yield Ask("fine_tune", Message(shared={"w": server["w"]}))
        return Message()
