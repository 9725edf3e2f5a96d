"""The source of a network, in terms of PyTorch alone, as it is written into an exported folder.

Coterie's own models become a list of layers; a module of the user's is made by the user's own class, whose source goes
into the folder ``code`` beside it. What a method adds to the network stands around it
(:mod:`~coterie.results.export.standalone.forms`).
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError
from coterie.models import hugging_face_network, residual
from coterie.models.dropout import StreamDropout
from coterie.models.hugging_face_network import HuggingFaceModel
from coterie.models.network import Network
from coterie.models.registry import import_call
from coterie.results.export.standalone.forms import TwoHeads
from coterie.user_code import IMPORT, OBJECT, Copies

CODE, GRAPH = "code", "network.pt2"
_BLOCKS = (residual.ScaledStandardisedConv2d, residual.NormaliserFreeBlock, residual.GroupNormBlock)

_NETWORK = '''class Network(nn.Module):
    """Layers that make features, and a head that makes outputs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            {body}
        )
        self.head = {head}
        self.split = {split}

    def forward(self, x: Tensor) -> Tensor:
        """Give the outputs for samples [samples, ...]."""
        return self.head(self.body(x))
'''

_GRAPH = '''def make() -> nn.Module:
    """Load what it computes, as PyTorch wrote it down: the module was an object, whose source nobody knows."""
    found = torch.export.load(Path(__file__).resolve().with_name({file!r})).module()
    found.eval = lambda: found  # it is what evaluation computes, and cannot be changed into anything else
    return found
'''

_MAKE = '''def make() -> nn.Module:
    """Build it, with parameters that are still to be loaded."""
    return {call}
'''

_BASED = '''BASE = {folder!r}
"""The base: its folder, or its name on the Hub. Where it lies elsewhere, COTERIE_BASE says in the environment."""


def make() -> nn.Module:
    """Build it, with parameters that are still to be loaded."""
    import os
    from pathlib import Path

    base = os.environ.get("COTERIE_BASE") or BASE
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise OSError(f"its base is not in {{base}}: say where it lies with COTERIE_BASE=FOLDER")
    return load_network(base, {rest})
'''

_OWN = '''CODE = Path(__file__).resolve().with_name({code!r})


def ours() -> list[str]:
    """Name the loaded modules that are called like the copied ones."""
    return [name for name in sys.modules if name.split(".")[0] in {names!r}]


def own() -> Any:
    """Import what makes the network from the copy of its source, whatever else is loaded under these names."""
    others = {{name: sys.modules.pop(name) for name in ours()}}
    sys.path.insert(0, str(CODE))
    try:
        return importlib.import_module({module!r}).{target}
    finally:
        main = getattr(sys.modules["__main__"], "__file__", None)
        if main is None or Path(main).resolve().parent != CODE.parent:  # else the copies are the only ones here
            sys.path.remove(str(CODE))
            for name in ours():
                del sys.modules[name]
            sys.modules.update(others)
'''


@dataclass(frozen=True)
class Form:
    """How a predictor is put together around the network: the class that does it, and with what besides the network."""

    maker: type[nn.Module] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def around(self, network: nn.Module) -> nn.Module:
        """Put it around a network."""
        return network if self.maker is None else self.maker(network, **self.arguments)

    def call(self, network: str) -> str:
        """Write that as Python."""
        if self.maker is None:
            return network
        return f"{self.maker.__name__}({', '.join([network, *_written(self.arguments)])})"


def network_source(
    title: str, model: str, module: nn.Module, shape: tuple[int, ...], outputs: int, form: Form, copies: Copies
) -> str:
    """Write a Python file with a function ``make`` that gives the predictor, its parameters still to be loaded.

    ``copies`` are the user's own source as it lies in the folder ``code``, nothing if there is none.
    """
    if isinstance(module, HuggingFaceModel) and form.maker is None:
        given = dict(module.made_with)
        made = _BASED.format(folder=given.pop("folder"), rest=", ".join(_written(given)))
        return inspect.getsource(hugging_face_network) + "\n\n" + made
    if model.startswith(OBJECT):
        imports = {"from pathlib import Path", "import torch", "from torch import nn"}
        return _file(title, imports, [_GRAPH.format(file=GRAPH)])
    imports = {"from torch import Tensor, nn"}
    if form.maker is not None:
        imports |= {"from typing import Any", "import copy" if form.maker is TwoHeads else "import torch"}
    pieces = [inspect.getsource(form.maker)] if form.maker is not None else []
    if model.startswith(IMPORT):
        place, target, arguments = import_call(model, shape, outputs)
        call = f"{target}({', '.join(_written(arguments))})"
        if "model" not in copies.settings:
            imports.add(f"from {place} import {target}")
        else:
            imports |= {"import importlib", "import sys", "from pathlib import Path", "from typing import Any"}
            names = sorted({each.module.split(".")[0] for each in copies.files})
            pieces.append(_OWN.format(code=CODE, names=names, module=copies.settings["model"][1], target=target))
            call = f"own()({', '.join(_written(arguments))})"
    else:
        assert isinstance(module, Network)
        layers = [_layer(each) for each in module.body]
        if any(isinstance(each, _BLOCKS) for each in module.body):
            imports |= {"import math", "import torch", "import torch.nn.functional as F"}
            pieces += [_constants(), *(inspect.getsource(block) for block in _BLOCKS)]
        body = ",\n            ".join(layers)
        pieces.append(_NETWORK.format(body=f"{body},", head=_layer(module.head), split=module.split))
        call = "Network()"
    pieces.append(_MAKE.format(call=form.call(call)))
    return _file(title, imports, pieces)


def _file(title: str, imports: set[str], pieces: Sequence[str]) -> str:
    head = f'"""The network of {title}."""\n\nfrom __future__ import annotations\n\n'
    return head + "\n\n\n".join([_sorted(imports), *(piece.strip("\n") for piece in pieces)]) + "\n"


def _sorted(imports: set[str]) -> str:
    """Put Python's own first, then the others."""
    ours = {line for line in imports if line.split()[1].split(".")[0] in sys.stdlib_module_names}
    groups = (sorted(some, key=lambda line: (line.startswith("from"), line)) for some in (ours, imports - ours))
    return "\n\n".join("\n".join(some) for some in groups if some)


def _layer(layer: nn.Module) -> str:
    if isinstance(layer, StreamDropout):
        return f"nn.Dropout({layer.p})"
    if isinstance(layer, residual.NormaliserFreeBlock):
        outputs, inputs = layer.conv1.weight.shape[:2]
        return f"NormaliserFreeBlock({inputs}, {outputs}, {layer.conv1.stride}, {layer.beta!r})"
    if isinstance(layer, residual.GroupNormBlock):
        return f"GroupNormBlock({layer.conv1.in_channels}, {layer.conv1.out_channels}, {layer.conv1.stride[0]})"
    if isinstance(layer, residual.ScaledStandardisedConv2d):
        outputs, inputs, kernel = layer.weight.shape[:3]
        return f"ScaledStandardisedConv2d({inputs}, {outputs}, {kernel}, {layer.stride}, {layer.padding}, {layer.eps})"
    return f"nn.{type(layer).__name__}({layer.extra_repr()})"  # which PyTorch writes as Python reads it


def _constants() -> str:
    names = ("_RELU_GAIN", "_RESIDUAL_SCALE")
    return "\n".join(f"{name} = {getattr(residual, name)!r}" for name in names)


def _written(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in arguments.items()]


def without_streams(module: nn.Module) -> nn.Module:
    """Copy a module for the host, without dropout, which does nothing in evaluation, by arithmetic of our own."""
    plain = copy.deepcopy(module).cpu().eval()
    for parent in list(plain.modules()):
        for name, child in parent.named_children():
            if isinstance(child, StreamDropout):
                setattr(parent, name, nn.Identity())
    return plain


def write_graph(module: nn.Module, example: Tensor, path: Path) -> None:
    """Write down what a module computes for any number of samples like some."""
    plain = without_streams(module)
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.export.export(plain, (example,), dynamic_shapes=({0: torch.export.Dim("samples")},))
            torch.export.save(program, path)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the model was an object, whose source nobody knows, and PyTorch cannot write down what it computes "
            f"({reason}): give the model as import:module:Class"
        ) from error
