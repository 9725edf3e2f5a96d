"""Models as ONNX files that take raw columns: categories as texts, gaps as NaN or an empty text.

PyTorch's exporter writes the network with what is done to numbers around it: filling, scaling, probabilities. What
makes numbers of columns, ONNX's own operators for texts among them, is put in front.
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.config import ExperimentConfig
from coterie.errors import ConfigError
from coterie.results.export.network_code import without_streams
from coterie.runs.storage.atomic_files import replacing

_ML = "ai.onnx.ml"
_GAP, _UNKNOWN = -2, -1  # the numbers of a gap, and of a category that the schema does not have


class FromNumbers(nn.Module):
    """A module with what is done to its inputs and outputs: from raw numbers to probabilities.

    Parameters
    ----------
    module
        The module.
    inputs
        What it is fed with.
    scaling
        How, for this client.
    dtype
        Type of its parameters.
    """

    mean: Tensor
    std: Tensor
    fill: Tensor

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, Any], scaling: Mapping[str, list[float]], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.module, self.task, self.kind, self.dtype = module, inputs["task"], inputs["type"], dtype
        over_axes = (-1, *(1,) * (len(inputs["shape"]) - 1))
        for name in ("mean", "std", "fill"):
            self.register_buffer(name, torch.tensor(scaling[name], dtype=dtype).view(over_axes))

    def forward(self, x: Tensor) -> Tensor:
        """Give probabilities, or values, for raw samples."""
        if self.kind != "int64":
            if self.fill.numel():
                x = torch.where(x.isnan(), self.fill.to(x.dtype), x)
            scale = 1 / (255.0 * self.std if self.kind == "uint8" else self.std)
            x = x.to(self.dtype) * scale - self.mean / self.std
        outputs: Tensor = self.module(x).flatten(1)
        if self.task == "multiclass":
            return outputs.softmax(1)
        return outputs if self.task == "regression" else torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], 1)


def refuse_without_packages() -> None:
    """Refuse where the packages that write ONNX are not installed."""
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"onnx needs {package}, which is not installed: install coterie[onnx]") from error


def write(
    module: nn.Module, inputs: Mapping[str, Any], entry: Mapping[str, Any], config: ExperimentConfig, path: Path
) -> None:
    """Write one client's model."""
    import onnx

    scaling = entry.get("scaling") or inputs["scaling"]
    plain = FromNumbers(without_streams(module), inputs, scaling, getattr(torch, config.dtype)).eval()
    proto = _network(plain, inputs, config.model)
    if inputs["columns"]:
        proto = _with_columns(proto, inputs["columns"])
    facts = {name: inputs[name] for name in ("task", "classes", "columns", "features")} | dict(entry)
    onnx.helper.set_model_props(proto, {"coterie": json.dumps(facts)})
    onnx.checker.check_model(proto)
    with replacing(path) as draft:
        onnx.save_model(proto, str(draft))


def _network(plain: FromNumbers, inputs: Mapping[str, Any], model: str) -> Any:
    # Two samples and not one: an axis of length one would be taken for one that never changes.
    example = torch.zeros(2, *inputs["shape"], dtype=getattr(torch, inputs["type"]))
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
                output_names=["values" if inputs["task"] == "regression" else "probabilities"],
                dynamic_shapes=({0: torch.export.Dim("samples")},),
                verbose=False,
            )
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ConfigError(f"the model {model!r} cannot be written as ONNX ({reason})") from error
    finally:
        noisy.setLevel(level)
    if program is None:
        raise ConfigError(f"the model {model!r} cannot be written as ONNX")
    return program.model_proto


def _with_columns(network: Any, columns: Mapping[str, Mapping[str, Any]]) -> Any:
    """Put in front of a network what makes its inputs of a table's columns, each an input of its own."""
    from onnx import TensorProto, compose, helper

    # Of the network's own names none may be a column's.
    network = compose.add_prefix(network, "network/", rename_outputs=False)
    nodes: list[Any] = []
    constants: list[Any] = []
    given: list[Any] = []

    def constant(name: str, kind: int, values: list[Any], shape: list[int]) -> str:
        constants.append(helper.make_tensor(name, kind, shape, values))
        return name

    def node(operator: str, sources: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, sources, [name], name=name, **attributes))
        return name

    axis = constant("columns/axis", TensorProto.INT64, [1], [1])
    made: list[str] = []
    for number, (name, column) in enumerate(columns.items()):
        at, is_text = f"columns/{number}", column["kind"] == "category"
        given.append(
            helper.make_tensor_value_info(name, TensorProto.STRING if is_text else TensorProto.FLOAT, ["samples"])
        )
        if is_text:
            keys = [*column["categories"], ""]
            numbers = [*range(len(column["categories"])), _GAP]
            table = {"keys_strings": keys, "values_int64s": numbers, "default_int64": _UNKNOWN}
            code = node("LabelEncoder", [name], f"{at}/code", domain=_ML, **table)
            code = node("Unsqueeze", [code, axis], f"{at}/codes")
            known = constant(f"{at}/known", TensorProto.INT64, numbers[:-1], [len(numbers) - 1])
            gap = constant(f"{at}/gap", TensorProto.INT64, [_GAP], [1])
            made.append(node("Cast", [node("Equal", [code, known], f"{at}/is")], f"{at}/one_hot", to=TensorProto.FLOAT))
            missing = node("Equal", [code, gap], f"{at}/missing")
        else:
            made.append(node("Unsqueeze", [name, axis], f"{at}/values"))
            missing = node("IsNaN", [made[-1]], f"{at}/missing")
        if column["gaps"] != "none" and column["indicator"]:
            made.append(node("Cast", [missing], f"{at}/indicator", to=TensorProto.FLOAT))
        else:
            nodes.pop()  # nobody asks where its gaps are
    node("Concat", made, "columns/all", axis=1)
    features = helper.make_tensor_value_info("columns/all", TensorProto.FLOAT, ["samples", None])
    front = helper.make_model(
        helper.make_graph(nodes, "columns", given, [features], constants),
        opset_imports=[*(each for each in network.opset_import if each.domain != _ML), helper.make_opsetid(_ML, 3)],
        ir_version=network.ir_version,
    )
    return compose.merge_models(front, network, io_map=[("columns/all", "network/x")])
