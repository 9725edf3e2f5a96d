"""A federation's project folder: what each party keeps, and how it is opened.

::

    DIR/
      federation.yaml     what all parties agree on; every party has the same file
      server/             server.yaml, ca.crt, server.crt, server.key, Flower's own state, and in inside/ what the gate
                          and Flower know each other by, on this machine, made anew at every start
      authority/          the try-out certificate authority; keep it off the server in production
      app/pyproject.toml  what is submitted to Flower: names our two apps, holds no code
      nodes/NAME/         node.yaml, federation.yaml, ca.crt, node.key, node.key.pub, its own data, state and models
      runs/               what the server records
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from coterie import data, options
from coterie.data.partitions import share_out
from coterie.errors import ConfigError, RunFolderError
from coterie.federation import agreement
from coterie.federation.agreement import Agreement
from coterie.federation.node import Node
from coterie.federation.party_data import load_own, own_population
from coterie.federation.resident import Means, check_code
from coterie.runs.storage.atomic_files import read_json, write_text
from coterie.runs.storage.seals import check_seal
from coterie.yaml_file import read_yaml

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class ServerConfig(BaseModel):
    """What ``server.yaml`` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address on which nodes reach the gate; 0.0.0.0 for all interfaces")
    port: int = Field(9092, ge=1, le=65535, description="port on which nodes reach the gate")
    superlink_port: int = Field(9093, ge=1, le=65535, description="port of Flower's SuperLink, on this machine alone")


class NodeConfig(BaseModel):
    """What ``node.yaml`` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    member: str = Field(description="the node's name in the roster")
    data: str = Field(description="the node's own data: a folder, a file, a data set's text, or import:module:function")
    server: str = Field(pattern=r"^[^\s/]+:\d+$", description="where the server's gate is, as host:port")
    ca: Path = Field(Path("ca.crt"), description="certificate of the authority that signed the server's")
    key: Path = Field(Path("node.key"), description="the node's private key")
    lost_state: Literal["refuse", "begin-anew"] = Field(
        "refuse", description="what to do where the state that the server counts on is not there"
    )
    engine: Literal["loop", "batched"] = Field("loop", description="how to compute; loop gives a simulation's bits")
    device: str = Field("cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$", description="where to compute: cpu, cuda or cuda:N")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; by default those that were agreed on")
    max_epochs: int = Field(1000, ge=1, description="epochs that a message may ask for")
    max_steps: int = Field(1_000_000, ge=1, description="steps that a message may ask for")
    max_seconds: float = Field(3600.0, gt=0, description="seconds after which a task is given up")
    allow: tuple[str, ...] = Field((), description="what federation.yaml may name as import:..., word for word")
    tell_answers: bool = Field(False, description="tell how each validation and test sample was answered at the end")

    def means(self) -> Means:
        """Give what the node computes with, and what it lets itself be asked."""
        return Means(**{each.name: getattr(self, each.name) for each in fields(Means)})


def read_server(folder: Path) -> ServerConfig:
    """Read ``server.yaml``."""
    return options.make(ServerConfig, read_yaml(folder / "server" / "server.yaml"), "server.yaml")


def read_node(folder: Path) -> NodeConfig:
    """Read ``node.yaml``."""
    return options.make(NodeConfig, read_yaml(folder / "node.yaml"), "node.yaml")


def open_node(folder: Path) -> Node:
    """Open a node: read its files, load its data, and check both against ``federation.yaml``."""
    agreed, config = agreement.read(folder / agreement.FILE), read_node(folder)
    client = agreed.number(config.member)
    key, wanted = folder / f"{config.key}.pub", agreed.members[client].key
    try:
        ours = key.read_text(encoding="utf-8", errors="replace") if key.exists() else None
    except OSError as error:
        raise ConfigError(f"the key {key} cannot be read: {error.strerror}") from error
    if wanted is not None and ours is not None and not agreement.same_key(ours, wanted):
        raise ConfigError(f"{key} is not the key that {agreement.FILE} has for {config.member!r}")
    means = config.means()
    check_code(agreed, means)
    experiment = agreed.experiment(agreed.algorithms[0] if agreed.algorithms else "fedavg", {})
    means.applied(experiment).torch_device()
    dataset = load_own(config.data, folder, agreed)
    own_population(dataset, client, experiment)
    return Node(agreed, client, dataset, folder, config.lost_state == "begin-anew", means)


def init(folder: Path, members: list[str], host: str = "127.0.0.1", port: int = 9092) -> Agreement:
    """Write a project folder for a try-out, with the embedded digits dealt out as the members' data.

    ``host`` and ``port`` are where nodes reach the server; Flower's SuperLink takes the next port, on the server alone.
    """
    from coterie.federation.flower import certificates

    if not _HOST.fullmatch(host):
        raise ConfigError(f"host is {host!r}, but must be a name such as fed.example.org, or an IPv4 address")
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty: choose another folder")
    server, authority = folder / "server", folder / "authority"
    for each in (server, authority, folder / "app", folder / "runs", *(folder / "nodes" / name for name in members)):
        each.mkdir(parents=True)
    authority.chmod(0o700)
    certificates.make_authority(authority)
    certificates.make_server_certificate(server, authority, [host])
    shutil.copy(authority / "ca.crt", server / "ca.crt")
    keys = {name: certificates.make_node_key(folder / "nodes" / name, f"{name}@coterie") for name in members}
    text = _FEDERATION.format(
        name=re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip("._-") or "federation",
        members="".join(f"  - name: {name}\n    key: {keys[name]}\n" for name in members),
    )
    write_text(folder / agreement.FILE, text)
    agreed = agreement.read(folder / agreement.FILE)
    listen = host if host in ("127.0.0.1", "localhost") else "0.0.0.0"
    write_text(server / "server.yaml", _SERVER.format(host=listen, port=port, inner=port + 1))
    write_text(folder / "app" / "pyproject.toml", _APP.format(version=importlib.metadata.version("coterie")))
    for name in members:
        node = folder / "nodes" / name
        shutil.copy(authority / "ca.crt", node / "ca.crt")
        shutil.copy(folder / agreement.FILE, node / agreement.FILE)
        write_text(node / "node.yaml", _NODE.format(name=name, server=f"{host}:{port}"))
    _deal_digits(folder, members)
    return agreed


def _deal_digits(folder: Path, members: list[str]) -> None:
    whole = data.load("digits")
    shares = share_out(whole, "dirichlet:0.5", clients=len(members), seed=1, validation=0.0)
    for client, name in enumerate(members):
        mine = torch.cat([shares.train[client], shares.test[client]]).sort().values
        np.savez(folder / "nodes" / name / "data.npz", x=whole.x[mine].numpy(), y=whole.y[mine].numpy())


def read_models(folder: Path) -> list[tuple[Path, dict[str, object]]]:
    """List the files of a node's models with what ``metrics.json`` says of each, the oldest first."""
    found = sorted((folder / "models").glob("*/model.safetensors"), key=lambda path: path.stat().st_mtime)
    for path in found:
        check_seal(path)
    return [(path, read_json(path.parent / "metrics.json")) for path in found]


_FEDERATION = """\
# What all parties agree on. Every party has the same file; one that differs is refused.
version: 1
name: {name}

# The roster: a member's place in this list is its client number. The key is the public half of the member's node.key:
# in production each member makes its own pair (ssh-keygen -t ecdsa -b 384 -f node.key) and sends you the .pub file.
members:
{members}
# What a sample is. Every node's own data must agree, or the node does not start.
data:
  task: multiclass
  input_shape: [1, 8, 8]
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  mean: [0.0]
  std: [1.0]

model: mlp
seed: 1
validation: 0.1       # fraction of a node's training samples held out
test_fraction: 0.2    # fraction of a node's samples to test on
algorithms: []        # methods that nodes agree to run; empty for all that Coterie has
threads: 1
message_limit_mb: 512
"""

_SERVER = """\
# The gate is the one port that nodes reach; it lets their calls through and nothing else. Flower's SuperLink listens on
# this machine alone, and there it answers only to who can read inside/, which is this user.
host: {host}
port: {port}
superlink_port: {inner}

# Replace in production: server.crt and server.key (a certificate for the server's public name) and ca.crt (of the
# authority that signed it, here and at every node). authority/ is for the try-out only; keep it off the server.
"""

_NODE = """\
# This folder belongs to the member alone: its data, state, models and private key never leave it.
member: {name}

# The member's own data; replace it. A folder of images by class, an .npz file with x and y, a table such as
# table:path=patients.csv,label=outcome or a function of yours, import:package.module:function.
data: data.npz

# Where the server's gate is.
server: {server}
ca: ca.crt
key: node.key         # replace in production: make your own, and send only node.key.pub to the server
lost_state: refuse    # or begin-anew: what to do where the state folder is lost

# What the node computes with.
engine: loop          # or batched, which serves a GPU better
device: cpu           # or cuda, cuda:1, auto

# What a message may ask of the node.
max_epochs: 1000
max_steps: 1000000
max_seconds: 3600

# Code that federation.yaml may name (import:package.module:name) and that this node then runs; read it first.
allow: []

# Whether the server learns of each validation and test sample how sure the models were and whether they were right,
# after the last round: reports then say who gains by federating with the exact test, and not with a bound.
tell_answers: false
"""

_APP = """\
# What is submitted to Flower. It names the two halves in the installed package and holds no code of its own.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "coterie-federation"
version = "{version}"
description = "A federation of Coterie's"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie.federation.flower.server_app:app"
clientapp = "coterie.federation.flower.client_app:app"

[tool.flwr.app.config]
federation = ""
plan = ""
out = ""
"""
