"""An experiment that several ranks play: the first writes, all stop and fail together."""

from __future__ import annotations

from collections.abc import Callable

from coterie.config import ExperimentConfig
from coterie.runs.builder import Assembly
from coterie.runs.experiment import Experiment
from coterie.runs.storage import Checkpoint, RunFolder
from coterie.simulation.sharded import ShardedSimulation


class ShardedExperiment(Experiment):
    """An experiment as one of its ranks sees it.

    Parameters
    ----------
    config
        The configuration.
    folder
        The run's folder, which on other ranks than the first keeps nothing.
    parts
        What it computes with.
    """

    simulation: ShardedSimulation

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> None:
        super().__init__(config, folder, parts)
        self.ranks = self.simulation.ranks
        self.ranks.asked_to_stop = lambda: self._stopped_by is not None and self._in_round

    def _latest(self) -> Checkpoint | None:
        found = self.ranks.together(super()._latest)
        complaint = f"the ranks find different checkpoints in {self.folder.path}: all must see the same folder"
        self.ranks.agree(complaint, [-1 if found is None else found.round])
        return found

    def _write(self, work: Callable[[], None]) -> None:
        self.ranks.together(work)

    def _affordable(self) -> bool:
        return self.ranks.told(super()._affordable)

    def _checkpoint(self) -> None:
        placement, failure = self.simulation.placement, list[BaseException]()
        if not self.ranks.leads:
            placement.follow()
        else:
            try:
                with placement.leading():
                    super()._checkpoint()
            except BaseException as error:
                if self.ranks.gone:
                    raise
                failure.append(error)

        def fail() -> None:
            for error in failure:
                raise error

        self.ranks.together(fail)
        self._checkpointed = self.completed

    def _part_with(self, error: BaseException) -> None:
        if not self.ranks.agreed(error):
            self.ranks.leave()

    def _keep(self) -> None:
        if not self.ranks.gone:
            super()._keep()
        else:  # a checkpoint needs everybody: the last one stands
            self._closing = True
            self.folder.flush()

    def _asked_to_stop(self, number: int) -> None:
        self._stopped_by = number
        if self.ranks.apart:  # nobody waits for this rank before it has done its part, or said that it stops
            self.ranks.apart = False
            raise KeyboardInterrupt

    def _stop_if_asked(self) -> None:
        if self.ranks.any(self._stopped_by is not None) and self.completed < self.config.rounds:
            raise KeyboardInterrupt

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self.ranks.leads

    def conclude(self, work: Callable[[], None]) -> None:
        """Let the first rank do what is left; see :meth:`Experiment.conclude`."""
        self.ranks.together(lambda: work() if self.ranks.leads else None)
