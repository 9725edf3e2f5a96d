"""Flower's simulation engine: its own ``FedAvg`` on virtual nodes, which Ray runs in a process for each core.

It runs in a process of its own, which plays a round each time it is asked to, so that rounds can be taken in turn with
the others'. A client's process keeps the model and maps the samples, so that only models travel. Ray is not installed
with Coterie; it comes from a folder that is given. Flower draws cohorts itself.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rivals import Federation, Work

FOLDER = "COTERIE_BENCHMARK_FOLDER"


def find(folder: Path | None) -> str | None:
    """Say why Flower's engine cannot run, if it cannot."""
    done = subprocess.run(
        [sys.executable, "-c", "import flwr, ray"],
        env=_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def _environment(folder: Path | None) -> dict[str, str]:
    # The folder comes last, so that what is installed here stays what is used.
    path = [str(Path(__file__).parents[1]), *([str(folder)] if folder is not None else [])]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "1"}
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    return os.environ | quiet | ray | {"PYTHONPATH": os.pathsep.join(path)}


class FlowerSimulation:
    """Federated averaging by Flower, in another process."""

    def __init__(self, federation: Federation, folder: Path | None = None, processes: int = 2) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        federation.save(self._path)
        self._log = (self._path / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from rivals.flower import serve; serve({processes})"],
            env=_environment(folder) | {FOLDER: self._folder.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder.name,
        )
        self._expect("ready")

    def _expect(self, word: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = (self._path / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"Flower's process ended before it said {word!r}: {end}")
        said: dict[str, Any] = json.loads(line)
        if said["said"] != word:
            raise RuntimeError(f"Flower's process said {said}, not {word!r}")
        return said

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._expect(word)

    def play(self) -> None:
        """Play one round."""
        self._ask("round")

    def parameters(self) -> Tensor:
        """Give the global model."""
        self._ask("model")
        return torch.from_numpy(np.load(self._path / "model.npy"))

    def processor_seconds(self) -> float:
        """Give the processor time of Flower's process and of all that it has started."""
        return measuring.tree_seconds(self._process.pid)

    def close(self) -> None:
        """End the process and what it has started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()


# ------------------------------------------------------------------------------------------- in the other processes


@functools.cache
def _held() -> tuple[Federation, Any]:
    """Give what a process holds: made once, the samples mapped and not read."""
    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    work = Work.of((folder / "work.json").read_text(encoding="utf-8"))
    federation = Federation(work, folder=folder)
    return federation, federation.module().train()


def _train(message: Any, context: Any) -> Any:
    """A client's half: load the model, take the steps, send the model back."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    federation, module = _held()
    work = federation.work
    x, y = federation.samples(int(context.node_config["partition-id"]))
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=work.lr)
    for inputs, targets in zip(x.split(work.batch), y.split(work.batch), strict=True):
        optimiser.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimiser.step()
    reply = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(reply), reply_to=message)


def serve(processes: int) -> None:
    """Run the engine: its server's half obeys what is written to this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Flower and Ray print is not an answer

    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    def answer(word: str) -> None:
        answers.write(json.dumps({"said": word}) + "\n")
        answers.flush()

    federation, module = _held()
    work = federation.work
    clients = ClientApp()
    clients.train()(_train)
    server = ServerApp()

    @server.main()
    def obey(grid: Any, context: Any) -> None:
        arrays = ArrayRecord(module.state_dict())
        strategy = FedAvg(
            fraction_train=work.cohort / len(work.sizes),
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=len(work.sizes),
        )
        while len(list(grid.get_node_ids())) < len(work.sizes):
            time.sleep(0.1)
        answer("ready")
        for line in sys.stdin:
            if line.strip() == "round":
                arrays = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1).arrays
            else:
                named = arrays.to_torch_state_dict()
                flat = torch.cat([named[name].reshape(-1) for name, _ in module.named_parameters()])
                np.save(Path(os.environ[FOLDER]) / "model.npy", flat.numpy())
            answer(line.strip())

    run_simulation(
        server_app=server,
        client_app=clients,
        num_supernodes=len(work.sizes),
        backend_config={
            "init_args": {"num_cpus": processes, "include_dashboard": False, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
