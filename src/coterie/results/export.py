"""One client's model out of a finished run, as files that need nothing of the run any more.

::

    model.safetensors   the parameters
    model.json          what it is: the run, the client, its inputs and outputs, what was measured of it
    load_model.py       a few lines of Python that rebuild the module and load it
    model_code/         the source of the module, where it is the user's own
    model.onnx          the module for other programs, where it was asked for
    model_peft/         adapters and head as PEFT reads them, where the model has adapters
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.compute.samples import Split
from coterie.config import ExperimentConfig
from coterie.errors import CheckpointError, ConfigError, RunFolderError
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.selection import hybrid_validation
from coterie.models.dropout import StreamDropout
from coterie.models.hugging_face import HuggingFaceModel
from coterie.results import Result
from coterie.rows import Rows
from coterie.runs.builder import Assembly, assemble
from coterie.runs.own_code import stored_config
from coterie.runs.storage import RunFolder, read_code
from coterie.runs.storage.atomic_files import replacing, write_json, write_text
from coterie.runs.storage.code_folder import write_code

Kind = Literal["personal", "global", "hybrid"]
"""The client's own model, the one for all, or whichever of the two is better on the client's validation samples."""

_SUFFIX = ".safetensors"
_LOADER = '''"""Loads {name} (client {client}, {kind} model, {algorithm})."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from coterie.models import build{imports}

MEAN, STD = {mean}, {std}


def load_model() -> torch.nn.Module:
    """Rebuild the module and load its parameters."""
    module = build({named}, {input_shape!r}, {outputs!r}).to(torch.{dtype})
    module.load_state_dict(load_file(Path(__file__).with_name({name!r})), strict={whole})
    return module.eval()


def prepare(x: torch.Tensor) -> torch.Tensor:
    """Scale samples [samples, ...] as in training; bytes are taken as 0 to 255."""
{as_they_are}    x = x.to(torch.{dtype}) / 255 if x.dtype == torch.uint8 else x.to(torch.{dtype})
    mean, std = (torch.tensor(v, dtype=x.dtype).view(-1, *(1,) * (x.dim() - 2)) for v in (MEAN, STD))
    return (x - mean) / std
'''

_WORDS = """    if x.dtype == torch.int64:  # numbers of words
        return x
"""

_OWN_CODE = """
from coterie.user_code import Copies

CODE = Path(__file__).with_name({code!r})"""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Parameters
    ----------
    model
        The parameters.
    loader
        The Python file that loads them.
    about
        What is known of the model, as in the JSON file.
    onnx
        The module as an ONNX file, where it was asked for.
    peft
        The folder with adapters and head as PEFT reads them, where the model has adapters.
    """

    model: Path
    loader: Path
    about: dict[str, Any]
    onnx: Path | None = None
    peft: Path | None = None


def kind(name: str | None) -> Kind | None:
    """Read the name of a kind of model.

    Parameters
    ----------
    name
        The name, ``None`` for the method's own choice.

    Returns
    -------
    Kind or None
        The kind.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    for known in get_args(Kind):
        if name == known:
            found: Kind = known
            return found
    if name is not None:
        raise ConfigError(f"best is {name!r}, but must be {', '.join(get_args(Kind))}")
    return None


def export(
    run: str | os.PathLike[str],
    client: int | str,
    out: str | os.PathLike[str] = "model.safetensors",
    *,
    best: Kind | None = None,
    onnx: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
) -> Exported:
    """Write one client's model after the last round.

    A run that is not finished, and files that are there already, are refused with a ``RunFolderError``; checkpoints
    whose data or model have changed since with a ``CheckpointError``.

    Parameters
    ----------
    run
        The run's folder.
    client
        The client, by number or by name.
    out
        The file for the parameters; the others are put beside it.
    best
        Which model; by default the personal one, or the global one of a method that has no other.
    onnx
        Write the module as an ONNX file too. It takes any number of scaled samples as ``x`` and gives ``outputs``, as
        the module does, and holds what is known of the model under ``coterie`` in its metadata.
    data_dir
        Where data sets lie; by default where they lay.

    Returns
    -------
    Exported
        The files.

    Raises
    ------
    ConfigError
        If there is no such client or model, or it is more than the module with other parameters.
    """
    model = Path(out)
    loader, about = model.with_name(f"load_{model.stem}.py"), model.with_suffix(".json")
    code, adapters = model.with_name(f"{model.stem}_code"), model.with_name(f"{model.stem}_peft")
    graph = model.with_suffix(".onnx") if onnx else None
    _refuse_places(model, loader, about, code, adapters, *([graph] if graph else []))
    if graph:
        _refuse_without_onnx()
    result = Result(run)
    summary, config, copies = result.summary, stored_config(result.path), read_code(result.path)
    client = result.client_number(client)
    parts, last = _restored(result.path, config, None if data_dir is None else Path(data_dir))
    algorithm = parts.simulation.algorithm
    wanted = best or ("personal" if algorithm.has_personal else "global")
    taken = _better(result, client, summary) if wanted == "hybrid" else wanted
    rows, recorded = _rows(parts, client, taken, last)
    if rows is None:
        raise ConfigError(
            f"{algorithm.title} has no {taken} model: use --best {'global' if taken == 'personal' else 'personal'}"
        )
    module = _module(parts, client, rows)
    if module is None:
        raise ConfigError(
            f"the {taken} model of {algorithm.title} is more than the model {result.config['model']!r} with other "
            "parameters: it cannot be exported"
        )
    dataset = parts.population.seen_by(client)
    facts = {
        "run": result.path.name,
        "algorithm": algorithm.name,
        "settings": algorithm.settings(),
        "client": client,
        **({"client_name": result.client_names[client]} if client in result.client_names else {}),
        "best": wanted,
        "kind": taken,
        "round": last,
        "model": result.config["model"],
        "input_shape": list(dataset.input_shape),
        "outputs": dataset.num_outputs,
        "classes": list(dataset.classes),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        **({"fill": list(dataset.fill)} if dataset.fill else {}),
        "dtype": config.dtype,
        "test": _measured(result, client, recorded),
    }
    if graph:
        _write_onnx(
            module, facts, graph, torch.int64 if dataset.x.dtype == torch.int64 else getattr(torch, config.dtype)
        )
    # What is frozen of a model of Hugging Face's is in its own folder, and may be large.
    based = module if isinstance(module, HuggingFaceModel) else None
    state = based.trained() if based else module.state_dict()
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    with replacing(model) as draft:
        save_file(tensors, draft)
    write_json(about, facts)
    words = {
        **facts,
        "name": model.name,
        "input_shape": dataset.input_shape,
        "named": repr(facts["model"]),
        "imports": "",
        "as_they_are": _WORDS if dataset.x.dtype == torch.int64 else "",
        "whole": based is None,
    }
    if "model" in copies.settings:
        write_code(code, copies.only("model"))
        words |= {"named": 'Copies.read(CODE).use(CODE)["model"]', "imports": _OWN_CODE.format(code=code.name)}
    write_text(loader, _LOADER.format(**words))
    return Exported(model, loader, facts, graph, adapters if based and based.save_adapters(adapters) else None)


def _refuse_places(*places: Path) -> None:
    if places[0].suffix != _SUFFIX:
        raise ConfigError(f"out is {str(places[0])!r}, but must end in {_SUFFIX}")
    for place in places:
        if place.exists():
            raise RunFolderError(f"{place} is there already: choose another --out")
    if not places[0].absolute().parent.is_dir():
        raise RunFolderError(f"there is no folder {places[0].parent}: make it, or choose another --out")


def _refuse_without_onnx() -> None:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"onnx needs {package}, which is not installed: install coterie[onnx]") from error


def _write_onnx(module: nn.Module, facts: dict[str, Any], path: Path, dtype: torch.dtype) -> None:
    plain = copy.deepcopy(module).cpu().eval()
    for parent in list(plain.modules()):
        for name, child in parent.named_children():
            if isinstance(child, StreamDropout):  # which does nothing in evaluation, by arithmetic that ONNX has not
                setattr(parent, name, nn.Identity())
    # Two samples and not one: an axis of length one would be taken for one that never changes.
    example = torch.zeros(2, *facts["input_shape"], dtype=dtype)
    noisy = logging.getLogger("torch.onnx")
    level = noisy.level
    try:
        noisy.setLevel(logging.ERROR)  # it warns of packages that it could use and does not need
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                plain,
                (example,),
                dynamo=True,
                input_names=["x"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("samples")},),
                verbose=False,
            )
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ConfigError(f"the model {facts['model']!r} cannot be written as ONNX ({reason})") from error
    finally:
        noisy.setLevel(level)
    if program is None:
        raise ConfigError(f"the model {facts['model']!r} cannot be written as ONNX")
    program.model.metadata_props["coterie"] = json.dumps(facts)
    with replacing(path) as draft:
        program.save(str(draft))


def _restored(path: Path, config: ExperimentConfig, data_dir: Path | None) -> tuple[Assembly, int]:
    """Put everything together as it was after the last round, and give that round."""
    with RunFolder.open(path) as folder:
        choices = folder.choices
        if data_dir is None and "data_dir" in choices:
            data_dir = Path(choices["data_dir"])
        parts = assemble(config, data_dir, choices, path)
        simulation = parts.simulation
        places = {"server": simulation.server, "clients": simulation.clients.rows}
        found = folder.checkpoints.latest(parts.engine.device, places)
    if found is None or found.round != config.rounds:
        raise CheckpointError(f"the run in {path} has no checkpoint of its last round: its models are lost")
    for what, digest in parts.fingerprint.items():
        if found.extra.get(what) != digest:
            raise CheckpointError(f"the {what} is not what the run in {path} began with: put the old {what} back")
    simulation.server, simulation.clients.rows, simulation.round = found.server, found.clients, found.round
    return parts, found.round


def _rows(parts: Assembly, client: int, kind: str, last: int) -> tuple[Rows | None, str]:
    """Give the parameters of one model, without a client axis, and the name under which it was measured."""
    simulation, roles = parts.simulation, parts.population.roles
    if kind == "global":
        shared = simulation.algorithm.global_model(simulation.server)
        if shared is None:
            return None, kind
        made, one = simulation.on_clients(shared, torch.tensor([client], device=parts.engine.device))
        return (made if one else {name: value[0] for name, value in made.items()}), "global"
    if not simulation.algorithm.has_personal:
        return None, kind
    # With all clients of its block, as in the evaluation whose numbers these are.
    away = client in roles.newcomers.tolist()
    clients = (roles.newcomers if away else roles.trainers).to(parts.engine.device)
    if not away:
        clients = next(block for block in simulation.blocks(clients) if bool((block == client).any()))
    with torch.no_grad():
        made = (
            simulation.adapt(clients, last, parts.scorer.adapt_rounds) if away else simulation.personal(clients, last)
        )
    place = int((clients == client).nonzero())
    return {name: value[place] for name, value in made.items()}, "newcomer" if away else "personal"


def _module(parts: Assembly, client: int, rows: Rows) -> nn.Module | None:
    """Give the module with these parameters, or nothing if the method does not predict by it alone."""
    engine, problem = parts.engine, parts.engine.problem
    if rows.keys() != {"w"} or rows["w"].shape != (problem.layout.size,):
        return None
    module = copy.deepcopy(problem.module)
    module.load_state_dict(problem.layout.state_dict(rows["w"]), strict=False)
    split: Split = "test" if int(engine.sizes["test"][client]) else "train"
    whose = torch.tensor([client], device=engine.device)
    index = engine.samples.splits[split][client].unsqueeze(0)
    x = engine.samples.gather(index, whose)[0][0]
    with torch.no_grad():
        plain: Tensor = module.eval()(x)
        theirs = engine.predict(parts.simulation.algorithm.predict, rows, whose, split, shared=True)
    near = 1e-3 if plain.dtype == torch.float32 else 1e-8  # engines differ by rounding; another rule differs by more
    return module if torch.allclose(plain, theirs.view_as(plain), rtol=near, atol=near) else None


def _better(result: Result, client: int, summary: dict[str, Any]) -> str:
    """Choose between the personal and the global model as the hybrid does."""
    metric = summary["metric"]
    sign = 1.0 if metric_table.get(metric).higher_is_better else -1.0
    frame = result.metrics
    frame = frame[(frame["client"] == client) & (frame["round"] == frame["round"].max())]
    found = {
        (str(row.model), str(row.metric)): torch.tensor([row.value], dtype=torch.float64)
        for row in frame[frame["split"] == "validation"].itertuples()
    }
    if any((model, name) not in found for model in ("personal", "global") for name in (metric, "loss")):
        raise ConfigError(
            f"best is hybrid, but the run in {result.path} has no personal and global model that were both measured on "
            f"validation samples of client {client}"
        )
    personal, shared = (sign * found[model, metric] for model in ("personal", "global"))
    chosen = hybrid_validation(
        personal,
        shared,
        personal_validation=personal,
        global_validation=shared,
        personal_loss=found["personal", "loss"],
        global_loss=found["global", "loss"],
    )
    return "personal" if bool(chosen.personal) else "global"


def _measured(result: Result, client: int, recorded: str) -> dict[str, float]:
    frame = result.metrics
    of_client = frame[
        (frame["client"] == client)
        & (frame["round"] == result.config["rounds"])
        & (frame["model"] == recorded)
        & (frame["split"] == "test")
    ]
    return dict(zip(of_client["metric"].astype(str), of_client["value"].astype(float), strict=True))
