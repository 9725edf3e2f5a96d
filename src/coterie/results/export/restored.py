"""A finished run's models, made again from its folder, which is only read.

Models come from the checkpoint, and what was said of samples and inputs when the run began, without any data. One that
training made for the evaluation alone was kept by the run; only where it was too large for that are the data loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.config import ExperimentConfig
from coterie.errors import CheckpointError
from coterie.results import Result
from coterie.rows import Rows, put_rows, take_rows
from coterie.runs.builder import Assembly, Population, assemble
from coterie.runs.model_inputs import describe_inputs, read_inputs, stand_in
from coterie.runs.own_code import stored_config
from coterie.runs.storage import RunFolder
from coterie.runs.storage.kept_models import read_kept_models


@dataclass(frozen=True)
class MadeModel:
    """One model of a client: its parameters, without a client axis, and the name under which it was measured."""

    client: int
    rows: Rows
    recorded: str


class RestoredRun:
    """A run as it was after its last round.

    Parameters
    ----------
    result
        The run.
    near
        A folder in which something may be written, for rows that do not fit in memory.
    data_dir
        Where data sets lie, should they be needed; by default where they lay.
    """

    def __init__(self, result: Result, near: Path, data_dir: Path | None) -> None:
        self.result, self._near, self._data_dir = result, near, data_dir
        self.config = stored_config(result.path)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What the models are fed with."""
        return read_inputs(self.result.path) or describe_inputs(self._with_data.population)

    @cached_property
    def parts(self) -> Assembly:
        """Everything with stand-ins for samples; with the samples if the folder does not describe them."""
        if read_inputs(self.result.path) is None:
            return self._with_data
        config = self.portable_config
        population = stand_in(config, self.inputs, self.result.shares)
        return self._restored(assemble(config, run=self._near, population=population), ("model",))

    @property
    def portable_config(self) -> ExperimentConfig:
        """The configuration for what is computed here, whatever machine the run was on."""
        # What decided rounding or speed in training decides nothing here, and a GPU may not be there.
        here: dict[str, Any] = {
            "attack": None,
            "privacy": None,
            "device": "cpu",
            "engine": "batched",
            "keep": "auto",
            "keep_samples": "auto",
            "scratch": None,
        }
        here |= {"precision": "float32", "compile": False, "kernel": "auto", "convolution": "auto", "chunk": None}
        return self.config.model_copy(update=here)

    def joined_by(self, population: Population) -> Assembly:
        """Give everything with one more client, which has the samples of a population and its first state."""
        config = self.portable_config.model_copy(update={"clients": len(population.shares)})
        before, parts = self.parts.simulation, assemble(config, run=self._near, population=population)
        simulation = parts.simulation
        simulation.server = {name: _grown(value, simulation.server[name]) for name, value in before.server.items()}
        rows = simulation.clients.rows
        simulation.clients.rows = {name: _grown(value, rows[name]) for name, value in before.clients.rows.items()}
        simulation.round = before.round
        return parts

    @cached_property
    def _with_data(self) -> Assembly:
        choices = self._folder.choices
        data_dir = self._data_dir or (Path(choices["data_dir"]) if "data_dir" in choices else None)
        parts = assemble(self.config, data_dir, choices, self._near)
        return self._restored(parts, tuple(parts.fingerprint))

    @property
    def _folder(self) -> RunFolder:
        return RunFolder.written_elsewhere(self.result.path, self.result.config)

    def _restored(self, parts: Assembly, digests: Sequence[str]) -> Assembly:
        path, simulation = self.result.path, parts.simulation
        places = {"server": simulation.server, "clients": simulation.clients.rows}
        found = self._folder.checkpoints.latest(parts.engine.device, places)
        if found is None or found.round != self.config.rounds:
            raise CheckpointError(f"the run in {path} has no checkpoint of its last round: its models are lost")
        for what in digests:
            if found.extra.get(what) != parts.fingerprint[what]:
                raise CheckpointError(f"the {what} is not what the run in {path} began with: put the old {what} back")
        simulation.server, simulation.clients.rows, simulation.round = found.server, found.clients, found.round
        return parts

    def global_models(self, clients: Sequence[int]) -> Iterator[MadeModel] | None:
        """Give the global model as it is applied on clients; ``None`` if the method has none."""
        simulation, device = self.parts.simulation, self.parts.engine.device
        shared = simulation.algorithm.global_model(simulation.server)
        if shared is None:
            return None
        made, one = simulation.on_clients(shared, torch.tensor(clients, device=device))
        return (
            MadeModel(client, made if one else {name: value[at] for name, value in made.items()}, "global")
            for at, client in enumerate(clients)
        )

    @property
    def global_is_one(self) -> bool:
        """Whether the global model is the same for all clients, and rows are scaled alike for all."""
        return self.parts.simulation.part is None and not self.inputs["own_scaling"]

    def personal_models(self, clients: Sequence[int]) -> Iterator[MadeModel] | None:
        """Give the personal models of clients; ``None`` if the method makes none."""
        if not self.parts.simulation.algorithm.has_personal:
            return None
        newcomers = set(self.parts.population.roles.newcomers.tolist())
        trained = [client for client in clients if client not in newcomers]
        return self._each(trained, [client for client in clients if client in newcomers])

    def _each(self, trained: list[int], newcomers: list[int]) -> Iterator[MadeModel]:
        for recorded, wanted in (("personal", trained), ("newcomer", newcomers)):
            kept = read_kept_models(self.result.path, recorded) if wanted else None
            if kept is not None:
                numbers, rows = kept
                yield from _pick(wanted, numbers.tolist(), rows, recorded)
            elif wanted:
                yield from self._made_again(wanted, recorded)

    def _made_again(self, wanted: list[int], recorded: str) -> Iterator[MadeModel]:
        away = recorded == "newcomer"
        asks = self.parts.simulation.asks_to_personalise(self.parts.population.roles.trainers)
        parts = self._with_data if away or asks else self.parts
        simulation, roles, last = parts.simulation, parts.population.roles, self.config.rounds
        everyone = (roles.newcomers if away else roles.trainers).to(parts.engine.device)
        # With all clients of its block, as in the evaluation whose numbers these are.
        for block in (everyone,) if away else simulation.blocks(everyone):
            inside = [client for client in wanted if client in set(block.tolist())]
            if inside:
                with torch.no_grad():
                    rows = (
                        simulation.adapt(block, last, parts.scorer.adapt_rounds)
                        if away
                        else simulation.personal(block, last)
                    )
                yield from _pick(inside, block.tolist(), rows, recorded)


def _grown(old: Tensor, new: Tensor) -> Tensor:
    """Put what a state held into one with more clients; what is theirs stays as it was made."""
    if old.shape == new.shape:
        return take_rows(old, torch.arange(len(old))) if old.dim() else old
    clients = torch.arange(len(old))
    rows = take_rows(new, clients)
    rows[tuple(slice(0, side) for side in old.shape)] = take_rows(old, clients)
    return put_rows(new, clients, rows)


def _pick(wanted: list[int], clients: list[int], rows: Rows, recorded: str) -> Iterator[MadeModel]:
    for client in wanted:
        place = clients.index(client)
        yield MadeModel(client, {name: value[place] for name, value in rows.items()}, recorded)
