"""FedPG's drift factors: as far as possible towards the own gradient, without harm to the others."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.server_math.common_descent import common_descent, drift_factors
from coterie.randomness import stream

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=50, deadline=None)
F64 = torch.float64


def problem(seed: int, online: int, absent: int, parameters: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with unequal norms and conflicts, losses, and gradients of absent clients."""
    draw = stream(seed, "gradients")
    rows = draw.normal(size=(online + absent, parameters)) + 0.3 * draw.normal(size=parameters)
    rows *= 10.0 ** draw.uniform(-2, 1, size=(online + absent, 1))
    losses = draw.uniform(0.1, 4.0, size=online)
    return torch.from_numpy(rows[:online]), torch.from_numpy(losses), torch.from_numpy(rows[online:])


@given(seed=seeds, online=st.integers(1, 8), over_history=st.booleans())
@quick
def test_drifted_directions_harm_nobody_and_gamma_is_tight(seed: int, online: int, over_history: bool) -> None:
    gradients, losses, history = problem(seed, online, 4)
    direction = common_descent(gradients, losses, history).direction
    gamma = drift_factors(gradients, direction, history=history if over_history else None)
    assert gamma.dtype == F64
    assert ((gamma >= 0) & (gamma <= 1)).all()
    others = torch.cat([gradients, history]) if over_history else gradients
    scale = others.norm(dim=1) * float(gradients.norm(dim=1).max())

    def harm(factor: Tensor, i: int) -> Tensor:
        drifted = direction + factor * (-gradients[i] - direction)
        inner = others @ drifted / scale
        inner[i] = -1.0  # its own objective does not constrain it
        return inner

    for i in range(online):
        assert float(harm(gamma[i], i).max()) <= 1e-13
        assert float(gradients[i] @ (direction + gamma[i] * (-gradients[i] - direction))) < 0
        if gamma[i] < 1:
            assert float(harm(gamma[i] * (1 + 1e-6) + 1e-9, i).max()) > 0


def test_no_conflict_means_the_clients_own_gradient() -> None:
    gradients = torch.tensor([[1.0, 0.2], [1.0, 0.0], [0.5, 0.5]], dtype=F64)
    direction = common_descent(gradients, torch.tensor([1.0, 2.0, 3.0])).direction
    assert drift_factors(gradients, direction).tolist() == [1.0, 1.0, 1.0]


def test_gamma_in_closed_form() -> None:
    # g_1.g_2 = -1, |a_1| = |a_2| = 1/2 for d = (-1/2, -1/2): gamma = (1/2)/(1/2 + 1) = 1/3 for both.
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=F64)
    direction = torch.tensor([-0.5, -0.5], dtype=F64)
    assert (gradients @ direction).tolist() == [-0.5, -0.5]
    torch.testing.assert_close(drift_factors(gradients, direction), torch.full((2,), 1 / 3, dtype=F64))


def test_a_client_the_direction_does_not_serve_is_not_harmed_further() -> None:
    # Client 0 loses by d already (g_0.d = 1 > 0), as a mean direction may do. Client 1's own gradient would harm it
    # more than d does (gamma = 0); client 2's helps it, and client 3's harms it less than d: neither is bound.
    gradients = torch.tensor([[1.0, 0.0], [-3.0, 0.0], [1.0, 1.0], [-0.5, 0.0]], dtype=F64)
    direction = torch.tensor([1.0, -1.0], dtype=F64)
    gamma = drift_factors(gradients, direction, constraining=torch.tensor([True, False, False, False]))
    assert gamma.tolist() == [1.0, 0.0, 1.0, 1.0]
    harm = [float(gradients[0] @ (direction + 0.1 * (-g - direction))) for g in gradients[1:]]
    assert harm[0] > 1.0 > max(harm[1:])


def test_clients_that_do_not_constrain_are_passed_over() -> None:
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=F64)
    direction = torch.tensor([-0.5, -0.5], dtype=F64)
    gamma = drift_factors(gradients, direction, constraining=torch.tensor([True, False]))
    torch.testing.assert_close(gamma, torch.tensor([1.0, 1 / 3], dtype=F64))


def test_one_client_drifts_freely() -> None:
    assert drift_factors(torch.ones(1, 3), -torch.ones(3)).tolist() == [1.0]
