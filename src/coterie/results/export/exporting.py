"""Models out of a finished run, as a folder that needs nothing of the run, nor of Coterie, any more.

::

    MODEL/
      model.json          what the models are: the run, the columns and categories, scaling, classes, what was measured
      predict.py          reads raw rows and predicts, with torch, numpy and safetensors alone
      network.py          the layers, as PyTorch code
      NAME.safetensors    the parameters of each client's model
      NAME.onnx           the same with what is done to raw rows, for other programs, where it was asked for
      NAME.peft/          adapters and head as PEFT reads them, where the model has adapters
      code/               the source of the module, where it is the user's own
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from coterie.errors import ConfigError, CoterieError, RunFolderError
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.selection import hybrid_validation
from coterie.models.hugging_face_network import HuggingFaceModel
from coterie.results import Result
from coterie.results.export import onnx_graph
from coterie.results.export.network_code import CODE, GRAPH, Form, network_source, write_graph
from coterie.results.export.predictors import predictor
from coterie.results.export.restored import MadeModel, RestoredRun
from coterie.runs.storage import read_code
from coterie.runs.storage.atomic_files import write_json, write_text
from coterie.runs.storage.code_folder import write_code
from coterie.runs.storage.tensor_file import save_named
from coterie.user_code import OBJECT, as_given, find

Kind = Literal["personal", "global", "hybrid"]
"""The client's own model, the one for all, or whichever of the two is better on the client's validation samples."""

FORMAT = 1
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Parameters
    ----------
    folder
        The folder.
    about
        What is known of the models, as in ``model.json``.
    onnx
        The ONNX files, one for each model, where they were asked for.
    """

    folder: Path
    about: dict[str, Any]
    onnx: tuple[Path, ...] = ()


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
    out: str | os.PathLike[str] = "model",
    *,
    clients: int | str | Sequence[int | str] | None = None,
    best: Kind | None = None,
    onnx: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
) -> Exported:
    """Write models after the last round as a folder from which they can be fed with raw rows.

    Nothing in the run's folder is changed, and the data need not be there, unless the models are made by fine-tuning
    and were too large to be kept (more than 1 GB for all clients). A run that is not finished, and a folder that is not
    empty, are refused with a ``RunFolderError``; checkpoints whose model has changed since with a ``CheckpointError``.

    Parameters
    ----------
    run
        The run's folder.
    out
        The folder to write.
    clients
        Whose models, by number or name; by default all clients'.
    best
        Which model; by default the personal one, or the global one of a method that has no other.
    onnx
        Write each model as an ONNX file too. It takes raw columns by their names (of other data, samples as ``x``) and
        gives ``probabilities``, or ``values`` where numbers are predicted.
    data_dir
        Where data sets lie, should they be needed; by default where they lay.

    Returns
    -------
    Exported
        The folder and what is in it.

    Raises
    ------
    ConfigError
        If there is no such client or model, or the method predicts in a way of its own.
    """
    folder = Path(out)
    _refuse_place(folder)
    if onnx:
        onnx_graph.refuse_without_packages()
    result = Result(run)
    _refuse_object(str(result.config["model"]))
    summary = result.summary
    restored = RestoredRun(result, folder.absolute().parent, None if data_dir is None else Path(data_dir))
    algorithm = restored.parts.simulation.algorithm
    wanted = best or ("personal" if algorithm.has_personal else "global")
    numbers = _numbers(result, clients)
    taken = {client: _better(result, client, summary) if wanted == "hybrid" else wanted for client in numbers}
    with _drafted(folder) as draft:
        entries: list[dict[str, Any]] = []
        module: nn.Module | None = None
        form: Form | None = None
        for each, is_one in _models(restored, taken):
            found = predictor(restored.parts, each.rows)
            if found is None:
                raise ConfigError(
                    f"the {taken[each.client]} model of {algorithm.title} is more than the model "
                    f"{result.config['model']!r} with other parameters: it cannot be exported"
                )
            if form not in (None, found[0]):
                raise ConfigError(
                    f"best is hybrid, but the personal models of {algorithm.title} have another form than the global "
                    "one: export each apart, with --best personal and --best global"
                )
            form, module = found
            entry = _entry(restored, each, taken[each.client], is_one)
            entry["file"] = _free_name(entry, [other["file"] for other in entries]) + _SUFFIX
            _save(module, draft / entry["file"])
            entries.append(entry)
            if onnx:
                onnx_graph.write(module, restored.inputs, entry, restored.config, draft / _onnx_name(entry))
        assert module is not None and form is not None
        entries.sort(key=lambda entry: -1 if entry["client"] is None else entry["client"])
        about = _about(restored, wanted, entries)
        write_json(draft / "model.json", about)
        _write_code(draft, restored, module, form)
    files = tuple(folder / _onnx_name(entry) for entry in entries) if onnx else ()
    return Exported(folder, about, files)


def _refuse_object(model: str) -> None:
    """Refuse a model that was handed over by another program, of which nothing is here."""
    if not model.startswith(OBJECT):
        return
    try:
        find("model", model)
    except CoterieError:
        raise ConfigError(
            f"model is {as_given(model)!r}, an object, of which the run's folder has no code that could be taken home: "
            "export it in the program that handed it over, or begin a run with import:module:Class"
        ) from None


def _refuse_place(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise RunFolderError(f"{folder} is there already: choose another --out")
    if not folder.absolute().parent.is_dir():
        raise RunFolderError(f"there is no folder {folder.parent}: make it, or choose another --out")


@contextlib.contextmanager
def _drafted(folder: Path) -> Iterator[Path]:
    """Give a folder to write in, which takes its name when all is there, and is removed if anything fails."""
    draft = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        yield draft
        draft.rename(folder)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _numbers(result: Result, clients: int | str | Sequence[int | str] | None) -> list[int]:
    if clients is None:
        return list(range(int(result.config["clients"])))
    asked = [clients] if isinstance(clients, int | str) else list(clients)
    if not asked:
        raise ConfigError("clients is empty: name at least one client, or leave it out for all of them")
    return list(dict.fromkeys(result.client_number(client) for client in asked))


def _models(restored: RestoredRun, taken: dict[int, str]) -> Iterator[tuple[MadeModel, bool]]:
    """Give the models in the order of the clients' numbers; of a global one that is the same for all only one."""
    clients = {model: [client for client in taken if taken[client] == model] for model in ("personal", "global")}
    one = not clients["personal"] and restored.global_is_one
    made: list[MadeModel] = []
    for model, some in clients.items():
        if not some:
            continue
        found = restored.global_models(some) if model == "global" else restored.personal_models(some)
        if found is None:
            title = restored.parts.simulation.algorithm.title
            other = "personal" if model == "global" else "global"
            raise ConfigError(f"{title} has no {model} model: use --best {other}")
        if not (clients["personal"] and clients["global"]):  # of one kind, none has to wait for another
            yield from ((each, one) for each, _ in zip(found, some[:1] if one else some, strict=False))
            return
        made += found
    yield from ((each, False) for each in sorted(made, key=lambda each: each.client))


def _entry(restored: RestoredRun, made: MadeModel, taken: str, is_one: bool) -> dict[str, Any]:
    result, own = restored.result, restored.inputs["own_scaling"]
    if is_one:
        return {"client": None, "kind": taken, "test": _measured(result, None, made.recorded)}
    names = result.client_names
    return {
        "client": made.client,
        **({"name": names[made.client]} if made.client in names else {}),
        "kind": taken,
        **({"scaling": own[made.client]} if own else {}),
        "test": _measured(result, made.client, made.recorded),
    }


def _free_name(entry: dict[str, Any], taken: Sequence[str]) -> str:
    if entry["client"] is None:
        return "everyone"
    name = re.sub(r"[^\w.-]+", "-", entry.get("name", "")).strip("-.")
    used = {file.removesuffix(_SUFFIX).lower() for file in taken}
    return name if name and name.lower() not in used else f"client-{entry['client']}"


def _onnx_name(entry: dict[str, Any]) -> str:
    return str(entry["file"]).removesuffix(_SUFFIX) + ".onnx"


def _about(restored: RestoredRun, wanted: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    algorithm, inputs = restored.parts.simulation.algorithm, restored.inputs
    return {
        "format": FORMAT,
        "run": restored.result.path.absolute().name,
        "algorithm": algorithm.name,
        "settings": algorithm.settings(),
        "best": wanted,
        "round": restored.config.rounds,
        "model": restored.result.config["model"],
        "dtype": restored.config.dtype,
        **{name: value for name, value in inputs.items() if name != "own_scaling"},
        "clients": entries,
    }


def _save(module: nn.Module, path: Path) -> None:
    # What is frozen of a model of Hugging Face's is in a folder of its own, and may be large.
    state = module.trained() if isinstance(module, HuggingFaceModel) else module.state_dict()
    save_named(path, {name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
    if isinstance(module, HuggingFaceModel):
        module.save_adapters(path.with_suffix(".peft"))


def _write_code(draft: Path, restored: RestoredRun, module: nn.Module, form: Form) -> None:
    result, inputs, copies = restored.result, restored.inputs, read_code(restored.result.path)
    if "model" in copies.settings:
        copies = copies.only("model")
        write_code(draft / CODE, copies)
    if restored.config.model.startswith(OBJECT):
        kind = torch.int64 if inputs["type"] == "int64" else getattr(torch, restored.config.dtype)
        # Two samples and not one: an axis of length one would be taken for one that never changes.
        write_graph(module, torch.zeros(2, *inputs["shape"], dtype=kind), draft / GRAPH)
    title = f"{result.config['model']}, of the run {result.path.absolute().name}"
    plain = restored.parts.engine.problem.module
    shape = tuple(inputs["shape"])
    text = network_source(title, restored.config.model, plain, shape, inputs["outputs"], form, copies)
    write_text(draft / "network.py", text)
    standalone = resources.files("coterie.results.export.standalone")
    write_text(draft / "predict.py", standalone.joinpath("predict.py").read_text(encoding="utf-8"))


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


def _measured(result: Result, client: int | None, recorded: str) -> dict[str, float]:
    """Give what was measured of a model on a client's test samples; of one for all, the means over clients."""
    frame = result.metrics
    last = frame["round"] == result.config["rounds"]
    found = frame[last & (frame["model"] == recorded) & (frame["split"] == "test")]
    if client is not None:
        found = found[found["client"] == client]
    means = found.groupby(found["metric"].astype(str), sort=False)["value"].mean()
    return {str(name): float(value) for name, value in means.items()}
