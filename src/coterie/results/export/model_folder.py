"""The folder that exported models are written to: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.errors import ConfigError, CoterieError, RunFolderError
from coterie.models.hugging_face_network import HuggingFaceModel
from coterie.results import Result
from coterie.results.export import onnx_graph
from coterie.results.export.network_code import CODE, GRAPH, Form, network_source, write_graph
from coterie.results.export.restored import RestoredRun
from coterie.runs.storage import read_code
from coterie.runs.storage.atomic_files import write_json, write_text
from coterie.runs.storage.code_folder import write_code
from coterie.runs.storage.tensor_file import save_named
from coterie.user_code import OBJECT, as_given, find

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


def opened(run: str | os.PathLike[str], folder: Path, onnx: bool) -> Result:
    """Open a run whose models are to be written, after refusing what can be refused before anything is computed."""
    _refuse_place(folder)
    if onnx:
        onnx_graph.refuse_without_packages()
    result = Result(run)
    _refuse_object(str(result.config["model"]))
    return result


def _refuse_place(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise RunFolderError(f"{folder} is there already: choose another --out")
    if not folder.absolute().parent.is_dir():
        raise RunFolderError(f"there is no folder {folder.parent}: make it, or choose another --out")


@contextlib.contextmanager
def drafted(folder: Path) -> Iterator[Path]:
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


class ModelFolder:
    """A draft of the folder, to which models are added one by one.

    Parameters
    ----------
    draft
        Where it is written.
    restored
        The run.
    onnx
        Whether each model is written as an ONNX file too.
    """

    def __init__(self, draft: Path, restored: RestoredRun, onnx: bool) -> None:
        self.draft, self.restored, self.onnx = draft, restored, onnx
        self.entries: list[dict[str, Any]] = []

    def add(self, entry: dict[str, Any], module: nn.Module) -> None:
        """Write one model, and give its entry the file's name."""
        entry["file"] = _free_name(entry, [other["file"] for other in self.entries]) + _SUFFIX
        _save(module, self.draft / entry["file"])
        self.entries.append(entry)
        if self.onnx:
            onnx_graph.write(module, self.restored.inputs, entry, self.restored.config, self.draft / _onnx_name(entry))

    def close(self, wanted: str, module: nn.Module, form: Form) -> dict[str, Any]:
        """Write what is known of all of them, and the code that one of them is made of; give what is known."""
        self.entries.sort(key=lambda entry: -1 if entry["client"] is None else entry["client"])
        about = _about(self.restored, wanted, self.entries)
        write_json(self.draft / "model.json", about)
        _write_code(self.draft, self.restored, module, form)
        return about

    def onnx_files(self, folder: Path) -> tuple[Path, ...]:
        """Give where the ONNX files are, once the draft has taken its name."""
        return tuple(folder / _onnx_name(entry) for entry in self.entries) if self.onnx else ()


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
