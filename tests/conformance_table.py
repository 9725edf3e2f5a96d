"""One row per algorithm: what the conformance suite needs to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coterie.rows import Layout


@dataclass(frozen=True)
class Row:
    """How to run an algorithm in the suite, and what SPEC says it sends.

    ``settings`` make it small and exercise its options. ``down`` and ``up`` give the floats that one client of the
    cohort receives and sends in a round in which everybody replies. ``discrete`` says that the server makes discrete
    choices, so that engines are compared round by round from a common state. ``clients`` have these training sizes.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    down: Callable[[Layout], float] = lambda layout: layout.size
    up: Callable[[Layout], float] = lambda layout: layout.size
    discrete: bool = False
    variants: tuple[dict[str, Any], ...] = ()


def _head(layout: Layout) -> int:
    return layout.columns("head").size


_LOCAL = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}

TABLE: dict[str, Row] = {
    "local": Row(_LOCAL, down=lambda _: 0, up=lambda _: 0, variants=({"optimiser": "adam"}, {"momentum": 0.5})),
    "fedavg": Row(_LOCAL, variants=({"aggregator": "median"}, {"weight_decay": 0.1, "lr_decay": 0.9})),
    "fedavg_ft": Row(_LOCAL, variants=({"fine_tune_epochs": 1},)),
    "fedprox": Row(_LOCAL | {"mu": 0.5}),
    "fedprox_ft": Row(_LOCAL | {"mu": 0.5}),
    "fedamp": Row(
        _LOCAL,
        variants=({"begin": "cloud"}, {"sigma": 1.0, "kappa": 0.3, "guard": False}, {"returning": "mixture"}),
    ),
    "heurfedamp": Row(_LOCAL | {"sigma": 10.0}, variants=({"returning": "mixture", "newcomers": "initial"},)),
    "fedacs": Row(
        _LOCAL | {"p": 0.4},
        discrete=True,
        variants=({"pool": "all", "offdiag": True}, {"returning": "mixture", "freshness": 0.8}),
    ),
    "fedrep": Row(
        _LOCAL | {"head_epochs": 2, "local_epochs": 1},
        down=lambda layout: layout.size - _head(layout),
        up=lambda layout: layout.size - _head(layout),
        variants=({"optimiser": "adam"}, {"momentum": 0.5, "head_epochs": 0}),
    ),
    "fedrod": Row(_LOCAL, variants=({"optimiser": "adam", "gamma": 0.5}, {"momentum": 0.5, "aggregator": "median"})),
    # The small model is split before its head, so that the auxiliary head has the head's shape.
    "splitgp": Row(
        _LOCAL,
        down=lambda layout: layout.size + _head(layout),
        up=lambda layout: layout.size + _head(layout),
        variants=({"lam": 1.0, "optimiser": "adam"}, {"gamma": 0.2, "lam": 0.5, "aggregator": "median"}),
    ),
    "fedfomo": Row(
        _LOCAL | {"candidates": 2},
        down=lambda layout: 2 * layout.size,
        up=lambda layout: layout.size + 2,
        discrete=True,
        variants=({"epsilon": 0.0, "momentum": 0.5}, {"candidates": 9, "epsilon": 1.0}),
    ),
    "fedsgd": Row({"lr": 0.5}, variants=({"lr_decay": 0.5},)),
    "scaffold": Row(
        _LOCAL,
        down=lambda layout: 2 * layout.size,
        up=lambda layout: 2 * layout.size,
        variants=({"server_lr": 0.7, "weight_decay": 0.1, "lr_decay": 0.9},),
    ),
    "fedmgda": Row(_LOCAL, variants=({"eps": 1.0, "server_lr": 0.3, "server_lr_decay": 0.9},)),
    "multi_krum": Row(_LOCAL, discrete=True, variants=({"fraction": 0.5, "select": 2},)),
    "per_fedavg": Row(_LOCAL, variants=({"variant": "hf", "adapt_steps": 3, "adapt_batch_size": 2},)),
    "fedpg": Row(
        {"lr": 0.5},
        down=lambda layout: 2 * layout.size + 1,
        up=lambda layout: layout.size + 1,
        variants=(
            {"fresh": True, "gamma": 0.3, "gamma_over_history": True},
            {"grad_mode": "pseudo", "local_epochs": 2, "batch_size": 4},
        ),
    ),
    # Along the mean gradient nothing is rescaled, so that there are always 2 s + 1 = 3 trials.
    "sfedpg": Row(
        {"lr": 2.0, "direction": "mean"},
        down=lambda layout: 2 * layout.size + 2 + 3,
        up=lambda layout: layout.size + 1 + 3,
        discrete=True,
        variants=({"direction": "common", "s": 2}, {"direction": "common", "line_search": "exchanges", "fresh": True}),
    ),
    "flame": Row(
        _LOCAL,
        variants=(
            {"centre": "global", "alpha": "size", "momentum": 0.5, "weight_decay": 0.01},
            {"dual": False, "rho": 0.3, "lam": 3.0},
            {"returning": "consensus", "alpha": "size"},
        ),
    ),
    "admm_lp_proj": Row(
        _LOCAL | {"d_sub": 4},
        down=lambda _: 4,
        up=lambda _: 4,
        variants=({"centre": "global", "alpha": "size", "momentum": 0.5},),
    ),
    "lp_proj": Row(_LOCAL | {"d_sub": 4}, down=lambda _: 4, up=lambda _: 4, variants=({"eta": 0.2, "momentum": 0.5},)),
    "pfedme": Row(
        _LOCAL | {"lam": 2.0, "inner_steps": 2},
        variants=({"local_rounds": 7, "begin": "global", "beta": 0.7}, {"momentum": 0.5, "moves": "round"}),
    ),
    "ditto": Row(
        _LOCAL,
        variants=(
            {"personal_epochs": 3, "personal_lr": 0.05, "momentum": 0.5, "local_steps": 3},
            {"optimiser": "adam", "lr": 0.01},
        ),
    ),
    "fedadmm": Row(_LOCAL | {"local_epochs": 4, "early_rounds": 2}, variants=({"begin": "own", "rho": 0.0},)),
    "apfl": Row(
        _LOCAL,
        variants=(
            {"momentum": 0.5, "alpha_decay": 0.02},
            {"adaptive": False, "alpha": 0.3},
            {"optimiser": "adam", "lr": 0.01},
        ),
    ),
}
