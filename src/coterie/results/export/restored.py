"""A finished run's models, made again from its folder, which is only read.

Models come from the checkpoint, and what was said of samples and inputs when the run began, without any data. One that
training made for the evaluation alone was kept by the run; only where it was too large for that are the data loaded.

Of a run between machines the folder is the server's: there are the models that the method makes of the server's state
alone, and of the clients' where the server keeps all of it, as their replies; no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from coterie.config import ExperimentConfig
from coterie.errors import CheckpointError, ConfigError
from coterie.results import Result
from coterie.rows import Rows, put_rows, take_rows
from coterie.runs.builder import Assembly, Population, assemble
from coterie.runs.model_inputs import describe_inputs, read_inputs, stand_in
from coterie.runs.own_code import stored_config
from coterie.runs.storage import RunFolder
from coterie.runs.storage.kept_models import read_kept_models
from coterie.runs.storage.run_files import SHARES


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
        self._needs_clients = False

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What the models are fed with."""
        return read_inputs(self.result.path) or describe_inputs(self._with_data.population)

    @cached_property
    def parts(self) -> Assembly:
        """Everything with stand-ins for samples; with the samples if the folder does not describe them."""
        if read_inputs(self.result.path) is None:
            if self._federation:
                raise CheckpointError(
                    f"the run in {self.result.path} does not say what its models are fed with: it was made by a "
                    "version of Coterie whose federations did not"
                )
            return self._with_data
        config = self.portable_config
        population = stand_in(config, self.inputs, self._shares)
        parts = assemble(config, run=self._near, population=population)
        return self._restored(parts, () if self._federation else ("model",))

    @property
    def portable_config(self) -> ExperimentConfig:
        """The configuration for what is computed here, whatever machine the run was on."""
        # What decided rounding or speed in training decides nothing here, and a GPU may not be there.
        here: dict[str, Any] = {
            "attack": None,
            "privacy": None,
            "device": "cpu",
            "engine": "loop" if self.config.engine == "loop" else "batched",  # some models only the one can run
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

    @property
    def _federation(self) -> bool:
        """Whether the run was one between machines."""
        return "federation" in self._folder.choices

    @property
    def _shares(self) -> pd.DataFrame:
        if not self._federation or (self.result.path / SHARES).exists():
            return self.result.shares
        return pd.DataFrame(1, index=range(self.config.clients), columns=["train", "validation", "test"])

    def _refuse_what_nodes_have(self, kind: str) -> None:
        """Refuse models of a federation that are made of what only its nodes have."""
        simulation = self.parts.simulation
        mine = not simulation.shares_all
        if kind == "personal":
            mine = mine or self._needs_clients or simulation.asks_to_personalise(self.parts.population.roles.trainers)
        if self._federation and mine:
            other = "" if kind == "global" or not simulation.algorithm.has_global else ", or use --best global"
            raise ConfigError(
                f"the {kind} models of {simulation.algorithm.title} in {self.result.path} are made of what the nodes "
                f"keep to themselves: take each from its node's folder, models/{self._folder.choices.get('run')}{other}"
            )

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
        places = {"server": simulation.server, "clients": {} if self._federation else simulation.clients.rows}
        found = self._folder.checkpoints.latest(parts.engine.device, places)
        if found is None or found.round != self.config.rounds:
            raise CheckpointError(f"the run in {path} has no checkpoint of its last round: its models are lost")
        for what in digests:
            if found.extra.get(what) != parts.fingerprint[what]:
                raise CheckpointError(f"the {what} is not what the run in {path} began with: put the old {what} back")
        clients = found.clients
        if self._federation:
            clients = self._at_server(simulation.clients.rows, found.server)
            self._needs_clients = bool(simulation.clients.rows) and not clients
        simulation.server, simulation.clients.rows, simulation.round = found.server, clients, found.round
        return parts

    def _at_server(self, wanted: Rows, server: Rows) -> Rows:
        """Give the clients' states if the server has them, as replies that it keeps; nothing if they are elsewhere."""
        kept = {
            name: server[name] for name, rows in wanted.items() if name in server and server[name].shape == rows.shape
        }
        return kept if kept.keys() == wanted.keys() and self.config.privacy is None else {}

    def global_models(self, clients: Sequence[int]) -> Iterator[MadeModel] | None:
        """Give the global model as it is applied on clients; ``None`` if the method has none."""
        simulation, device = self.parts.simulation, self.parts.engine.device
        shared = simulation.algorithm.global_model(simulation.server)
        if shared is None:
            return None
        self._refuse_what_nodes_have("global")
        made, one = simulation.on_clients(shared, torch.tensor(clients, device=device))
        return (
            MadeModel(client, made if one else {name: value[at] for name, value in made.items()}, "global")
            for at, client in enumerate(clients)
        )

    @property
    def global_is_one(self) -> bool:
        """Whether the global model is the same for all clients, and rows are scaled alike for all."""
        return self.parts.simulation.shares_all and not self.inputs["own_scaling"]

    def personal_models(self, clients: Sequence[int]) -> Iterator[MadeModel] | None:
        """Give the personal models of clients; ``None`` if the method makes none."""
        if not self.parts.simulation.algorithm.has_personal:
            return None
        self._refuse_what_nodes_have("personal")
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
    if any(side < before for side, before in zip(new.shape, old.shape, strict=True)):
        return new  # with so many clients a method keeps it no more
    clients = torch.arange(len(old))
    rows = take_rows(new, clients)
    rows[tuple(slice(0, side) for side in old.shape)] = take_rows(old, clients)
    return put_rows(new, clients, rows)


def _pick(wanted: list[int], clients: list[int], rows: Rows, recorded: str) -> Iterator[MadeModel]:
    for client in wanted:
        place = clients.index(client)
        yield MadeModel(client, {name: value[place] for name, value in rows.items()}, recorded)
