"""From a method's rows to a module that predicts as the method does, whatever it makes of the network."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from coterie.algorithms.running_statistics import STATISTICS
from coterie.compute.engine import Engine
from coterie.models.batch_norm import statistics_state, use_plain_layers
from coterie.models.own_buffers import probe_inputs
from coterie.results.export.network_code import Form
from coterie.results.export.standalone.forms import TwoExits, TwoHeads
from coterie.rows import Layout, Rows
from coterie.runs.builder import Assembly

_PROBES = 8


def predictor(parts: Assembly, rows: Rows) -> tuple[Form, nn.Module] | None:
    """Give the form and the module with these parameters; ``None`` if the method predicts in a way that has none."""
    engine = parts.engine
    made = _made(engine, rows, float(parts.simulation.algorithm.settings().get("threshold", 0.0)))
    if made is None:
        return None
    form, module = made
    x = _probes(engine)
    with torch.no_grad():
        wanted = parts.simulation.algorithm.predict(
            engine.net, {name: value.unsqueeze(0) for name, value in rows.items()}, x.unsqueeze(0)
        )[0]
        found: Tensor = module.eval()(x)
    near = 1e-3 if found.dtype == torch.float32 else 1e-8  # engines differ by rounding; another rule differs by more
    same = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=near, atol=near)
    return (form, module) if same else None


def _made(engine: Engine, rows: Rows, threshold: float) -> tuple[Form, nn.Module] | None:
    problem = engine.problem
    # What is frozen is never loaded again, and may be large.
    frozen = {id(value): value for value in problem.module.parameters() if not value.requires_grad}
    network = copy.deepcopy(problem.module, frozen)
    if STATISTICS in rows:
        network.load_state_dict(statistics_state(problem.module, rows[STATISTICS]), strict=False)
        rows = {name: value for name, value in rows.items() if name != STATISTICS}
    use_plain_layers(network)
    if rows.keys() == {"w"} and rows["w"].shape == (problem.layout.size,):
        _load(network, rows["w"])
        return Form(), network
    if rows.keys() == {"w", "phi"}:
        _load(network, rows["w"])
        form = Form(TwoHeads)
        module = form.around(network)
        _load(module.get_submodule("personal"), rows["phi"])
        return form, module
    if rows.keys() == {"client", "server"}:
        classes = engine.output_shape[0]
        body = network.get_submodule("body")
        assert isinstance(body, nn.Sequential)
        lower = Layout.of(body[: engine.net.split]).size
        features = (len(rows["client"]) - lower) // classes - 1
        form = Form(TwoExits, {"features": features, "classes": classes, "threshold": threshold})
        module = form.around(network).to(rows["client"].dtype)
        # The order in which SplitGP lays its parts one after another.
        for row, names in ((rows["client"], ("lower", "early")), (rows["server"], ("upper", "head"))):
            parts = [module.get_submodule(name) for name in names]
            for part, own in zip(parts, row.split([Layout.of(part).size for part in parts]), strict=True):
                _load(part, own)
        return form, module
    return None


def _load(module: nn.Module, row: Tensor) -> None:
    found = module.load_state_dict(Layout.of(module).state_dict(row), strict=False)
    assert not found.unexpected_keys  # missing are frozen parameters, which are in no row and are there already


def _probes(engine: Engine) -> Tensor:
    """Make samples on which two ways to predict would differ."""
    words = engine.samples.x.dtype == torch.int64
    shape = tuple(engine.samples.x.shape[1:])
    return probe_inputs(engine.problem.module, shape, words, engine.samples.dtype, engine.device, _PROBES)
