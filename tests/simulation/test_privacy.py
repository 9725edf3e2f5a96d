"""Clipping and noise on replies, and the privacy loss: held to their definitions."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Replies, Task
from coterie.errors import AlgorithmError, ConfigError
from coterie.randomness import secret_normal
from coterie.rows import Rows
from coterie.runs import launch
from coterie.runs.builder import assemble
from coterie.simulation.exchange import Exchange, Request
from coterie.simulation.privacy import Privacy, Protection, parse, protect, spent
from coterie.simulation.simulation import Simulation
from tests.small_runs import Killed, assert_same_end, config_of, finish, last_state, stop

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: these tests need coterie[privacy]")

CLIP = 1.5


def nothing(name: str, rows: slice, count: int) -> Tensor:
    raise AssertionError("no noise is to be drawn")


def whole_norm(rows: Rows) -> Tensor:
    """The norm of each client's tensors together."""
    return (
        torch.stack([value.reshape(len(value), -1).double().square().sum(1) for value in rows.values()]).sum(0).sqrt()
    )


# ------------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_is_of_the_change_and_of_all_tensors_together(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    message = {"w": torch.randn(6, 40, generator=generator).to(dtype)}
    # By how much clients changed the message: from far below the clip to far above it.
    length = torch.tensor([0.0, 0.1, 1.0, 1.6, 5.0, 1e6], dtype=torch.float64).unsqueeze(1)
    change = torch.randn(6, 43, generator=generator, dtype=torch.float64)
    change = length * change / change.norm(dim=1, keepdim=True)
    reply = {
        "w": message["w"] + change[:, :40].to(dtype),
        "loss": change[:, 40].to(dtype),
        "c": change[:, 41:].to(dtype),
    }
    before = {name: value.clone() for name, value in reply.items()}
    out = protect(reply, message, {"loss": None, "c": None}, Privacy(clip=CLIP, noise=0), nothing)
    assert all(torch.equal(reply[name], before[name]) for name in reply)
    assert {name: (value.shape, value.dtype) for name, value in out.items()} == {
        name: (value.shape, value.dtype) for name, value in reply.items()
    }
    for name in reply:  # what is short enough is what it was, to the last bit
        assert torch.equal(out[name][:3], reply[name][:3])
    told = {"w": out["w"].double() - message["w"].double(), "loss": out["loss"], "c": out["c"]}
    room = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(whole_norm(told)[3:], torch.full((3,), CLIP, dtype=torch.float64), rtol=room, atol=0)
    # The direction stays: everything is scaled by the same factor.
    wanted = CLIP / length[3:, 0] * change[3:, 40]
    torch.testing.assert_close(told["loss"][3:].double(), wanted, rtol=1e-3 if dtype == torch.float32 else 1e-9, atol=0)


def test_a_row_does_not_depend_on_the_others_nor_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    reply, message = ({"w": torch.randn(5, 7, generator=generator)} for _ in range(2))
    protection = Protection(Privacy(clip=0.5, noise=1.0), seed=3, clients=9)
    clients = torch.tensor([0, 2, 3, 7, 8])
    together = protection(reply, message, {}, clients, ("round 0", 4))["w"]
    alone = protection({"w": reply["w"][3:4]}, {"w": message["w"][3:4]}, {}, clients[3:4], ("round 0", 4))["w"]
    assert torch.equal(together[3:4], alone)
    monkeypatch.setattr("coterie.simulation.privacy._BLOCK_ELEMENTS", 14)
    assert torch.equal(protection(reply, message, {}, clients, ("round 0", 4))["w"], together)
    assert protection.replies.tolist() == [2, 0, 2, 2, 0, 0, 0, 3, 2]


def test_what_cannot_be_protected_is_refused() -> None:
    message = {"w": torch.zeros(2, 3)}
    privacy = Privacy(clip=1.0, noise=0.0)
    with pytest.raises(AlgorithmError, match=r"'count' holds torch\.int64"):
        protect({"count": torch.ones(2, 1, dtype=torch.int64)}, message, {"count": None}, privacy, nothing)
    with pytest.raises(AlgorithmError, match="the reply 'v' is not a changed copy of a tensor of the message"):
        protect({"v": torch.zeros(2, 3)}, message, {}, privacy, nothing)
    with pytest.raises(AlgorithmError, match="the reply 'w' is not a changed copy"):
        protect({"w": torch.zeros(2, 4)}, message, {}, privacy, nothing)
    assert protect({}, message, {}, privacy, nothing) == {}


# ---------------------------------------------------------------------------------------------------------------- noise


def test_the_noise_has_the_promised_variance_and_is_drawn_anew() -> None:
    clients, width, sigma = 50, 20_000, 0.8 * 2.5
    protection = Protection(Privacy(clip=2.5, noise=0.8), seed=1, clients=clients)
    zeros = {"w": torch.zeros(clients, width, dtype=torch.float64), "v": torch.zeros(clients, 5, dtype=torch.float64)}

    def noise(exchange: str, round_number: int) -> Rows:
        return protection(zeros, zeros, {}, torch.arange(clients), (exchange, round_number))

    first = noise("round 0", 1)["w"]
    count = first.numel()
    # For normal numbers the mean of n has standard deviation σ/√n, and their mean square σ² √(2/n): six of these.
    assert abs(float(first.mean())) < 6 * sigma / math.sqrt(count)
    assert abs(float(first.square().mean()) / sigma**2 - 1) < 6 * math.sqrt(2 / count)
    assert abs(float(first.pow(4).mean()) / (3 * sigma**4) - 1) < 6 * math.sqrt(32 / 3 / count)  # and no other shape
    others = [noise("round 1", 1)["w"], noise("round 0", 2)["w"], noise("personalise 0", 1)["w"], first.roll(1, 0)]
    for other in others:
        assert abs(float((first * other).mean())) < 6 * sigma**2 / math.sqrt(count)
    assert torch.equal(noise("round 0", 1)["w"], first)  # and the same again for the same exchange
    assert not torch.equal(noise("round 0", 1)["v"], first[:, :5])


def test_secret_noise_is_normal_and_depends_on_every_bit_of_its_key() -> None:
    count = 300_000
    drawn = secret_normal(b"key", count)
    assert abs(float(drawn.mean())) < 6 / math.sqrt(count)
    assert abs(float(drawn.square().mean()) - 1) < 6 * math.sqrt(2 / count)
    assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 6 / math.sqrt(count)
    assert torch.equal(secret_normal(b"key", count), drawn)
    assert abs(float((drawn * secret_normal(b"kez", count)).mean())) < 6 / math.sqrt(count)
    assert len(secret_normal(b"key", 2**20 + 3)) == 2**20 + 3
    assert secret_normal(b"key", 0).shape == (0,)


# ---------------------------------------------------------------------------------------------------- the privacy loss


def renyi(noise: float, replies: int, delta: float) -> float:
    """ε by hand.

    N(u, σ²) and N(u', σ²) have Rényi divergence α |u − u'|² / 2σ² of order α; with |u − u'| = 2C and σ = noise · C that
    is 2α/noise² a reply, and replies add up. An (α, ρ) Rényi guarantee gives ε = ρ + log(1 − 1/α) − log(δ α)/(α − 1)
    (Canonne, Kamath and Steinke, 2020, proposition 12). The best α is found by a search over reals.
    """

    def loss(log: float) -> float:
        alpha = 1 + math.exp(log)
        rho = replies * 2 * alpha / noise**2
        return rho + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)

    return float(minimize_scalar(loss, bounds=(-12, 12), method="bounded", options={"xatol": 1e-10}).fun)


@pytest.mark.parametrize(
    ("noise", "replies", "delta"),
    [(8.0, 1, 1e-5), (8.0, 50, 1e-5), (20.0, 300, 1e-6), (2.0, 10, 1e-5), (0.8, 3, 1e-3), (100.0, 7, 1e-5)],
)
def test_epsilon_is_that_of_composed_gaussian_mechanisms(noise: float, replies: int, delta: float) -> None:
    found = Privacy(clip=3.0, noise=noise, delta=delta).epsilon(replies)
    assert found == pytest.approx(renyi(noise, replies, delta), abs=1e-6 * max(1.0, found))
    # The promise holds: k Gaussian mechanisms are one with √k times the sensitivity, whose δ at ε is known exactly
    # (Balle and Wang, ICML 2018, theorem 8). Composition by Rényi divergences is an upper bound, and not a poor one.
    mu = math.sqrt(replies) * 2 / noise

    def exact(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)))

    assert exact(found) <= delta
    assert exact(0.6 * found) > delta


def test_epsilon_of_nothing_of_no_noise_and_of_several_amounts() -> None:
    assert spent({}, 1e-5) == spent({2.0: 0}, 1e-5) == 0.0
    assert Privacy(clip=1.0, noise=0.0).epsilon(0) == 0.0
    assert math.isinf(Privacy(clip=1.0, noise=0.0).epsilon(1))
    # Divergences are proportional to replies/noise²: four replies with twice the noise are one.
    assert spent({8.0: 4, 4.0: 2}, 1e-5) == pytest.approx(spent({4.0: 3}, 1e-5), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("clip=1.0", "'noise' must be given"),
        ("noise=1.0", "'clip' must be given"),
        ("clip=0,noise=1", "clip is '0', but must be number > 0"),
        ("clip=1,noise=-1", "noise is '-1', but must be number ≥ 0"),
        ("clip=1,noise=1e300", "noise is 1e+300, but must be 0, or between 1e-06 and 1e+06"),
        ("clip=1,noise=1e-300", "noise is 1e-300, but must be 0, or between 1e-06 and 1e+06"),
        ("clip=1,noise=1,delta=1", "delta is '1', but must be number > 0 and < 1"),
        ("clip=1,noise=1,sigma=2", "no parameter 'sigma'"),
        ("1.0", "write parameters as key=value"),
    ],
)
def test_mistakes_are_told(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse(text)
    assert says in str(told.value)


def test_a_missing_accountant_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"dp-accounting, which is not installed: install coterie\[privacy\]"):
        parse("clip=1,noise=1")
    assert parse("clip=1,noise=0").noise == 0


# ---------------------------------------------------------------------------------------------------- whole experiments


class Observed:
    """An exchange that keeps what was sent and what came back, with the tensors that replies are relative to."""

    def __init__(self, inner: Exchange, tasks: dict[str, Task]) -> None:
        self.inner, self.tasks = inner, tasks
        self.seen: list[tuple[dict[str, str | None], Rows, Rows]] = []

    def deliver(self, request: Request) -> Replies:
        replies = self.inner.deliver(request)
        place = torch.searchsorted(request.clients, replies.clients)
        message = {name: value[place] for name, value in request.rows.items()}
        references = {name: self.tasks[request.task].references.get(name, name) for name in replies.rows}
        self.seen.append((references, message, dict(replies.rows)))
        return replies


def observed(name: str, privacy: str, engine: str = "loop", rounds: int = 2) -> tuple[Simulation, Observed]:
    whole = assemble(config_of(name, engine=engine, dtype="float64", privacy=privacy, device="cpu")).simulation
    found = Simulation(whole.algorithm, whole.engine, protection=whole.protection, members=torch.arange(5))
    found.exchange = watched = Observed(found.exchange, found.tasks)
    for number in range(1, rounds + 1):
        found.play_round(torch.arange(5), number)
        found.personal(torch.arange(5), number)
    return found, watched


@pytest.mark.parametrize("name", registry.names())
def test_no_reply_of_any_method_tells_more_than_the_clip(name: str) -> None:
    for references, message, replies in observed(name, "clip=0.01,noise=0")[1].seen:
        told = {
            key: value if references[key] is None else value - message[str(references[key])]
            for key, value in replies.items()
        }
        if told:
            assert bool((whole_norm(told) <= 0.01 * (1 + 1e-9)).all())
            assert bool((whole_norm(told) > 0).any())


@pytest.mark.parametrize("name", ["fedavg", "flame", "fedpg", "scaffold"])
def test_engines_agree_on_protected_replies(name: str) -> None:
    one, other = (observed(name, "clip=0.5,noise=0.1", engine)[0] for engine in ("loop", "batched"))
    for state, twin in ((one.server, other.server), (one.clients.rows, other.clients.rows)):
        for key, value in state.items():
            torch.testing.assert_close(value, twin[key], rtol=0, atol=1e-10)


def test_nobody_tells_its_number_of_samples() -> None:
    found, watched = observed("fedavg", "clip=1e6,noise=0", rounds=1)
    (_, _, replies) = watched.seen[0]
    assert len(set(found.engine.sizes["train"].tolist())) > 1 or found.engine.sizes["train"][0] > 1
    torch.testing.assert_close(found.server["w"], replies["w"].mean(0), rtol=0, atol=1e-12)
    assert found.cohort(torch.arange(5), 1).sizes.tolist() == [1] * 5


@pytest.mark.parametrize(("name", "more"), [("fedavg_ft", {}), ("fedpg", {"settings": {"fresh": True}})])
def test_a_resumed_run_ends_the_same(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    config = config_of(name, privacy="clip=1.0,noise=5.0", **more)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    stop(launch.resume(tmp_path / "cut"), "in evaluation", 5, Killed)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
    assert last_state(tmp_path / "whole").extra["replies"] == last_state(tmp_path / "cut").extra["replies"]


def test_the_loss_is_recorded_every_round_and_shown(tmp_path: Path) -> None:
    config = config_of("fedavg", privacy="clip=1.0,noise=5.0,delta=1e-4", participation=0.6, eval_every=2)
    result = finish(launch.begin(config, tmp_path / "run"))
    recorded = result.metrics.query("metric == 'epsilon'")
    assert recorded["round"].tolist() == [1, 2, 3, 4, 5]
    counts = last_state(tmp_path / "run").extra["replies"]
    assert sum(counts) == 5 * 3
    assert float(recorded["value"].iloc[-1]) == Privacy(clip=1.0, noise=5.0, delta=1e-4).epsilon(max(counts))
    assert recorded["value"].is_monotonic_increasing
    assert result.summary["privacy"] == {
        "clip": 1.0,
        "noise": 5.0,
        "delta": 1e-4,
        "epsilon": float(recorded["value"].iloc[-1]),
    }
    assert "privacy loss ε" in str(result.table().notes)
    clipped = finish(launch.begin(config_of("fedavg", privacy="clip=1.0,noise=0"), tmp_path / "clipped"))
    assert clipped.summary["privacy"]["epsilon"] is None
    assert "no bound on the privacy loss" in str(clipped.table().notes)
