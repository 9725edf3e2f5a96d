"""The server's half of most methods reads nothing from a device: to read from a GPU is to wait for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from coterie.algorithms import registry
from coterie.algorithms.base import Cohort, Replies, Start
from coterie.compute.nets.row_net import ModuleNet
from coterie.rows import ClientMatrix, Layout, repeat_row
from coterie.rows.host_copies import on_device, on_host
from coterie.rows.placement import Placement
from coterie.runs.storage import as_restored
from coterie.simulation.client_states import commit_rows, part_rows

META = torch.device("meta")  # has no numbers, so that whoever reads them fails
CLIENTS, INPUTS = 12, 4
REPLIED = ("w", "dw", "dc", "g", "u", "v", "delta")  # what a method may look at
METHODS = (
    *("apfl", "ditto", "fedacs", "fedadmm", "fedavg", "fedavg_ft", "fedprox", "fedprox_ft", "fedsgd", "flame"),
    *("heurfedamp", "local", "multi_krum", "per_fedavg", "pfedme", "scaffold"),
)


def there(values: Tensor) -> Tensor:
    """The same on the device; of a matrix with a row per client, its shape."""
    return repeat_row(values[0].to(META), len(values)) if isinstance(values, ClientMatrix) else on_device(values, META)


@pytest.mark.parametrize("held_out", [0, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_round_reads_nothing_from_the_device(name: str, held_out: int) -> None:
    method, module = registry.make(name, {}), nn.Linear(INPUTS, 1)
    layout = Layout.of(module)
    row, sizes, members = torch.zeros(layout.size), torch.arange(1, CLIENTS + 1), torch.arange(CLIENTS - held_out)
    own = members if held_out else None
    start = Start(
        row, CLIENTS, ModuleNet(module, layout), sizes, 1, lambda client: row + client, torch.ones(1, INPUTS), own
    )
    begun = {name: there(value) for name, value in method.init(start)[0].items()}
    server, _ = Placement("device", META, None).place(begun, {}, CLIENTS)
    for number, cohort in enumerate([(1, 4, 6), (0, 4, 8)], 1):
        clients = there(torch.tensor(cohort))
        script, asked = method.round(server, Cohort(clients, number, there(sizes), 1, layout)), 0
        try:
            next(script)
            while True:
                asked += 1
                reply = {each: torch.empty(len(cohort), layout.size, device=META) for each in REPLIED}
                script.send(Replies(clients, reply))
        except StopIteration as end:
            server, _ = end.value
        assert asked
        part_rows(server)
        commit_rows(server)
        server = as_restored(server)
        assert all(value.device == META for value in server.values())
        if "members" in server:
            assert on_host(server["members"]).tolist() == members.tolist()
