"""Models with BatchNorm under every method: by hand in plain PyTorch, and both engines beside each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms import registry
from coterie.algorithms.running_statistics import STATISTICS
from coterie.compute.samples import Samples
from coterie.errors import ConfigError
from coterie.models.batch_norm import statistics_state
from coterie.models.problem import Problem
from coterie.simulation.scoring import Scorer
from coterie.simulation.simulation import Simulation
from tests.conformance_table import TABLE
from tests.oracles.residual import ResidualNet
from tests.support import DEVICE, ENGINES, classification, everyone, play, samples_of, simulate
from tests.test_conformance import assert_close, cohort_of, copied, lose_some, models_of, put

SIZES = (6, 10, 14, 19, 23)  # in batches of 4 none is left with a single sample
METHODS = sorted(registry.names())
STEP = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}


class Normed(nn.Module):
    """An MLP with two kinds of BatchNorm layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 5, bias=False),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 4, bias=False),
            nn.BatchNorm1d(4, momentum=None),
            nn.Tanh(),
        )
        self.head = nn.Linear(4, 3)
        self.split = 3

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Images(nn.Module):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(4 * 7 * 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def built(kind: type[nn.Module]) -> nn.Module:
    with randomness.torch_stream(11, "test model"):
        return kind().to(DEVICE)


def made(name: str, settings: dict[str, Any], buffers: str = "", **more: Any) -> Simulation:
    engine, local, lost = more.pop("engine", "batched"), more.pop("local", ()), more.pop("lost", None)
    problem = Problem.of(built(Normed), dtype=torch.float64, device=DEVICE, buffers=buffers)
    computes = ENGINES[engine](problem, classification(5, sizes=SIZES), 3, **more)
    return Simulation(registry.make(name, settings), computes, local=local, lost=lost)


def images() -> Samples:
    draw = randomness.stream(1, "test images")
    parts = [
        (torch.from_numpy(draw.normal(size=(size, 1, 32, 32))), torch.from_numpy(draw.integers(3, size=size)))
        for size in (10, 6)
    ]
    return samples_of(parts, task="multiclass", classes=3)


def assert_equal_rounds(loop: Simulation, batched: Simulation, discrete: bool, rounds: int = 3) -> None:
    for number in range(1, rounds + 1):
        for simulation in (loop, batched):
            some = everyone(simulation)
            simulation.play_round(cohort_of(number) if len(some) == 5 else some, number)
        assert_close(loop.server, batched.server, 1e-10, "server")
        assert_close(loop.clients.rows, batched.clients.rows, 1e-10, "clients")
        assert_close(models_of(loop, number), models_of(batched, number), 1e-10, "models")
        if discrete:
            put(batched, copied(loop))


POLICIES = {"mixed": {"buffers": "body.1=local,body.4=frozen"}, "fedbn": {"local": ("norm",)}}


@pytest.mark.parametrize(
    ("name", "more"),
    [pytest.param(name, {}, id=name) for name in METHODS]
    + [
        pytest.param(name, more, id=f"{name}-{policy}")
        for policy, more in POLICIES.items()
        for name in ("fedavg_ft", "fedrep", "splitgp", "ditto", "apfl", "flame", "fedfomo", "sfedpg")
    ],
)
def test_engines_agree(name: str, more: dict[str, Any]) -> None:
    loop, batched = (made(name, TABLE[name].settings, engine=each, lost=lose_some, **more) for each in ENGINES)
    assert_equal_rounds(loop, batched, TABLE[name].discrete, rounds=2)
    own = loop.clients.rows[STATISTICS]
    assert own.isfinite().all() and bool((own[0] != own[1]).any())


@pytest.mark.parametrize("options", [{"kernel": "vmap"}, {"kernel": "module"}, {"record": True}, {"chunk": 2}])
@pytest.mark.parametrize("name", ["fedavg", "fedpg", "ditto"])
def test_every_way_of_the_batched_engine(name: str, options: dict[str, Any]) -> None:
    loop, batched = made(name, TABLE[name].settings, engine="loop"), made(name, TABLE[name].settings, **options)
    assert_equal_rounds(loop, batched, discrete=False, rounds=2)


@pytest.mark.parametrize("kind", [Images, ResidualNet])
@pytest.mark.parametrize("name", ["fedavg", "fedacs", "fedamp", "flame", "fedpg", "ditto", "apfl", "scaffold"])
def test_networks_of_images(name: str, kind: type[nn.Module]) -> None:
    settings = TABLE[name].settings | ({"local_epochs": 1} if "local_epochs" in TABLE[name].settings else {})
    loop, batched = (
        simulate(name, images(), built(kind), task="multiclass", settings=settings, engine=each) for each in ENGINES
    )
    assert batched.engine.choices["kernel"] == "stacked"
    assert_equal_rounds(loop, batched, TABLE[name].discrete, rounds=2 if kind is Images else 1)


# ------------------------------------------------------------------------------------------------------------ by hand


def batches_of(simulation: Simulation, client: int, round_number: int, size: int, epochs: int) -> list[Tensor]:
    """A client's batches, as places in its samples: epoch after epoch in the order that its stream gives."""
    count = SIZES[client]
    key = randomness.keys(simulation.engine.seed, "round batches", round_number, torch.tensor([client]))
    key = randomness.fold_in(randomness.fold_in(key, 0), 0)
    out: list[Tensor] = []
    for epoch in range(epochs):
        drawn = randomness.fold_in(randomness.fold_in(key, 0), epoch)
        out += randomness.permutations(drawn, torch.tensor([count]), count)[0].split(size)
    return out


def share_mean(models: list[dict[str, Tensor]], clients: list[int]) -> dict[str, Tensor]:
    total = sum(SIZES[client] for client in clients)
    return {
        name: sum(each[name].double() * SIZES[client] / total for each, client in zip(models, clients, strict=True))
        for name in models[0]
    }


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("policy", ["averaged", "local", "fedbn"])
def test_fedavg_in_plain_pytorch(engine: str, policy: str) -> None:
    """FedAvg with ``nn.BatchNorm1d`` in training and evaluation mode; local statistics, and FedBN's local layers."""
    simulation = made(
        "fedavg",
        STEP,
        engine=engine,
        buffers="local" if policy == "local" else "",
        local=("norm",) if policy == "fedbn" else (),
    )
    samples, problem = simulation.engine.samples, simulation.engine.problem
    module = built(Normed).double()
    shared = copy.deepcopy(module.state_dict())
    own = [copy.deepcopy(module.state_dict()) for _ in SIZES]
    kept = {
        "averaged": set(),
        "local": set(problem.statistics.names),
        "fedbn": {name for name in shared if name.startswith(("body.1.", "body.4."))},
    }[policy]
    for number in (1, 2, 3):
        clients = cohort_of(number).tolist()
        for client in clients:
            at_home = {name: own[client][name] for name in kept}
            counts = {name: value.round().long() for name, value in (shared | at_home).items() if "tracked" in name}
            module.load_state_dict(shared | at_home | counts)
            if any("tracked" in name for name in shared.keys() - kept):
                # The server's mean count is no whole number, and the cumulative mean goes on from it.
                cumulative = float((shared | at_home)["body.4.num_batches_tracked"])
            optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
            index = samples.splits["train"][client]
            for step, places in enumerate(batches_of(simulation, client, number, 4, 2)):
                module.train()
                if "body.4.num_batches_tracked" not in kept:
                    module.body[4].momentum = 1 / (cumulative + step + 1)
                x, y = samples.x[index[places]], samples.y[index[places]]
                optimiser.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimiser.step()
            own[client] = copy.deepcopy(module.state_dict())
            if "body.4.num_batches_tracked" not in kept:
                steps = len(batches_of(simulation, client, number, 4, 2))
                for layer in ("body.1", "body.4"):
                    name = f"{layer}.num_batches_tracked"
                    own[client][name] = torch.tensor(float(shared[name]) + steps, dtype=torch.float64, device=DEVICE)
        mean = share_mean([own[client] for client in clients], clients)
        shared |= {name: mean[name] for name in shared.keys() - kept}
        simulation.play_round(cohort_of(number), number)
    # The personal models are the clients' own, the global one the server's, with what stays at home on each client.
    made_models = simulation.personal(everyone(simulation), 3)
    for client in range(5):
        found = problem.layout.views(made_models["w"][client]) | problem.statistics.views(
            made_models[STATISTICS][client]
        )
        for name, value in own[client].items():
            torch.testing.assert_close(found[name], value.to(torch.float64), rtol=0, atol=1e-10)
    scores = Scorer(simulation, everyone(simulation), everyone(simulation)[:0], ("test",)).scores(3)
    losses = {score.model: score.values for score in scores if score.metric == "loss"}
    for client in range(5):
        index = samples.splits["test"][client]
        for model, state in {"personal": own[client], "global": shared | {n: own[client][n] for n in kept}}.items():
            module.load_state_dict(
                {name: value.long() if "tracked" in name else value for name, value in state.items()}
            )
            loss = F.cross_entropy(module.eval()(samples.x[index]), samples.y[index])
            torch.testing.assert_close(losses[model][client].cpu(), loss.detach().double().cpu(), rtol=0, atol=1e-10)


# For one batch a pass: how many batches were counted by the statistics that are sent, and by those of a personal model
# of its own. A pass that only looks, at a loss or at a model on the way to another, counts none.
COUNTS = {
    "fedavg": ({"local_epochs": 2}, 2, None),
    "local": ({"local_epochs": 2}, 2, None),
    "fedacs": ({"local_epochs": 2}, 2, None),
    "flame": ({"local_epochs": 2}, 2, None),
    "scaffold": ({"local_epochs": 2}, 2, None),
    "fedfomo": ({"local_epochs": 2, "candidates": 2}, 2, None),
    "per_fedavg": ({"local_epochs": 2, "variant": "hf"}, 2, None),
    "pfedme": ({"local_epochs": 2, "inner_steps": 3}, 6, None),
    "fedrep": ({"local_epochs": 2, "head_epochs": 3}, 5, None),
    "fedrod": ({"local_epochs": 2}, 2, None),
    "splitgp": ({"local_epochs": 2}, 2, None),
    "ditto": ({"local_epochs": 2, "personal_epochs": 3}, 2, 3),
    "apfl": ({"local_epochs": 2}, 2, 2),
    "fedsgd": ({}, 1, None),
    "fedpg": ({}, 1, None),
    "sfedpg": ({}, 1, None),
}


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_which_passes_count(name: str, engine: str) -> None:
    settings, kept, own = COUNTS[name]
    if "local_epochs" in settings:
        settings = settings | {"batch_size": 0}
    simulation = made(name, settings, engine=engine)
    play(simulation, 1)
    state, layout = simulation.clients.rows, simulation.engine.problem.statistics
    wanted = {STATISTICS: kept} | ({} if own is None else {f"{STATISTICS} {simulation.algorithm.own_statistics}": own})
    assert {each for each in state if each.startswith(STATISTICS)} == wanted.keys()
    for which, count in wanted.items():
        for layer in ("body.1", "body.4"):
            assert set(layout.views(state[which])[f"{layer}.num_batches_tracked"].tolist()) == {count}, which
    if name != "local":
        assert layout.views(simulation.server[STATISTICS])["body.1.num_batches_tracked"] == kept


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("per_fedavg", {"lr": 0.5, "inner_lr": 0.5, "local_epochs": 1, "batch_size": 0}),
        ("per_fedavg", {"lr": 0.5, "inner_lr": 0.5, "local_epochs": 1, "batch_size": 0, "variant": "hf"}),
        ("fedpg", {}),
        ("sfedpg", {}),
        ("sfedpg", {"line_search": "exchanges"}),
    ],
)
def test_statistics_are_of_the_model_that_is_kept(name: str, settings: dict[str, Any]) -> None:
    """One step on one batch: they are those of the initial model, not of the adapted one or of one that was tried."""
    simulation = made(name, settings)
    play(simulation, 1)
    samples, layout = simulation.engine.samples, simulation.engine.problem.statistics
    first = built(Normed).double().body[0]
    for client in range(5):
        features = first(samples.x[samples.splits["train"][client]]).detach()
        found = layout.views(simulation.clients.rows[STATISTICS][client])
        torch.testing.assert_close(found["body.1.running_mean"], 0.1 * features.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(found["body.1.running_var"], 0.9 + 0.1 * features.var(0), rtol=0, atol=1e-12)


def test_full_gradients_are_those_of_the_loss_in_training_mode() -> None:
    """FedSGD: one step along the mean of the gradients of ``module.train()``, by samples."""
    simulation = made("fedsgd", {"lr": 0.5})
    play(simulation, 1)
    samples, module, problem = simulation.engine.samples, built(Normed).double(), simulation.engine.problem
    for client, size in enumerate(SIZES):
        index = samples.splits["train"][client]
        (F.cross_entropy(module.train()(samples.x[index]), samples.y[index]) * size / sum(SIZES)).backward()
    stepped = {name: value.detach() - 0.5 * value.grad for name, value in module.named_parameters()}
    torch.testing.assert_close(simulation.server["w"], problem.layout.row_of(stepped), rtol=0, atol=1e-12)


def test_ditto_and_apfl_have_fedavgs_statistics() -> None:
    """Their global models are FedAvg's, whatever their personal ones are."""
    ends = []
    for name in ("fedavg", "ditto", "apfl"):
        simulation = made(name, STEP)
        play(simulation, 2)
        ends.append(simulation.server)
    for other in ends[1:]:
        torch.testing.assert_close(other["w"], ends[0]["w"], rtol=0, atol=1e-13)
        torch.testing.assert_close(other[STATISTICS], ends[0][STATISTICS], rtol=0, atol=1e-13)


# ----------------------------------------------------------------------------------------------------------- policies


def crossed(simulation: Simulation, rounds: int = 2) -> list[dict[str, Tensor]]:
    """Everything that the server sent or was sent."""
    inner, seen = simulation.exchange.deliver, list[dict[str, Tensor]]()

    def deliver(request: Any) -> Any:
        replies = inner(request)
        seen.extend((request.message.shared, request.message.each, replies.rows))
        return replies

    simulation.exchange.deliver = deliver  # type: ignore[method-assign]
    play(simulation, rounds)
    return seen


@pytest.mark.parametrize("name", ["fedavg", "fedacs", "fedpg", "fedrep", "splitgp", "ditto", "fedfomo"])
def test_what_stays_at_home_never_crosses(name: str) -> None:
    simulation = made(name, TABLE[name].settings, buffers="local")
    assert all(STATISTICS not in rows for rows in crossed(simulation)) and STATISTICS not in simulation.server
    some = made(name, TABLE[name].settings, buffers="body.1=local")
    sent = [rows[STATISTICS] for rows in crossed(some) if STATISTICS in rows]
    assert sent and {value.shape[-1] for value in sent} == {4 + 4 + 1}  # the second layer's alone


def test_local_sends_nothing() -> None:
    assert all(not rows for rows in crossed(made("local", STEP)))


def test_fedbn_keeps_parameters_and_statistics_at_home() -> None:
    simulation = made("fedavg", STEP, local=("norm",))
    norms, statistics = 2 * 5 + 2 * 4, 2 * 5 + 2 * 4 + 2
    play(simulation, 1)
    assert simulation.clients.rows["local_part"].shape == (5, norms)
    assert simulation.clients.rows[STATISTICS].shape == (5, statistics)
    assert simulation.server.keys() == {"w"}
    assert simulation.server["w"].shape == (simulation.engine.problem.layout.size - norms,)


def test_statistics_follow_their_layer_unless_told_otherwise() -> None:
    def stays(buffers: str, *local: str) -> set[str]:
        problem = Problem.of(built(Normed), buffers=buffers)
        return {name.rpartition(".")[0] for name in problem.local_statistics(local)}

    assert stays("") == set()
    assert stays("", "body.1") == {"body.1"}
    assert stays("", "body") == stays("", "norm") == {"body.1", "body.4"}
    assert stays("", "*.bias") == set()  # half of a layer is no layer
    assert stays("averaged", "norm") == set()
    assert stays("averaged,body.4=local") == {"body.4"}
    assert stays("body=local,body.4=averaged") == {"body.1"}


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ("mean", "buffers has 'mean', but must be averaged, local or frozen"),
        ("body=", "buffers has 'body='"),
        ("head=local", "buffers has 'head', which matches no layer with running statistics: those are body.1, body.4"),
    ],
)
def test_wrong_policies_are_refused(buffers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Problem.of(built(Normed), buffers=buffers)


def test_without_such_layers_there_is_nothing_to_say() -> None:
    with pytest.raises(ConfigError, match=r"buffers has 'local', .* the model has none"):
        Problem.of(nn.Linear(2, 2), buffers="local")


@pytest.mark.parametrize("noise", [0.0, -9.0])
def test_the_servers_variances_are_never_negative(noise: float) -> None:
    """Whatever protects replies, or attacks them: statistics that cannot be are brought back to what can."""
    simulation = made("fedavg", STEP)
    inner = simulation.exchange.deliver

    def deliver(request: Any) -> Any:
        replies = inner(request)
        replies.rows[STATISTICS] = replies.rows[STATISTICS] + noise
        return replies

    simulation.exchange.deliver = deliver  # type: ignore[method-assign]
    play(simulation, 2)
    running = statistics_state(simulation.engine.problem.module, simulation.server[STATISTICS])
    assert all(bool((value >= 0).all()) for name, value in running.items() if name.endswith("running_var"))
    assert all(bool(value >= 0) for name, value in running.items() if name.endswith("num_batches_tracked"))
    assert any(bool((value < -5).any()) for value in running.values()) == (noise < 0)
