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

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from coterie.errors import ConfigError
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.selection import hybrid_validation
from coterie.results import Result
from coterie.results.export.model_folder import Exported, ModelFolder, drafted, opened
from coterie.results.export.network_code import Form
from coterie.results.export.predictors import predictor
from coterie.results.export.restored import MadeModel, RestoredRun

Kind = Literal["personal", "global", "hybrid"]
"""The client's own model, the one for all, or whichever of the two is better on the client's validation samples."""


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
    result = opened(run, folder, onnx)
    summary = result.summary
    restored = RestoredRun(result, folder.absolute().parent, None if data_dir is None else Path(data_dir))
    algorithm = restored.parts.simulation.algorithm
    wanted = best or ("personal" if algorithm.has_personal else "global")
    numbers = _numbers(result, clients)
    taken = {client: _better(result, client, summary) if wanted == "hybrid" else wanted for client in numbers}
    with drafted(folder) as draft:
        written = ModelFolder(draft, restored, onnx)
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
            written.add(_entry(restored, each, taken[each.client], is_one), module)
        assert module is not None and form is not None
        about = written.close(wanted, module, form)
    return Exported(folder, about, written.onnx_files(folder))


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
