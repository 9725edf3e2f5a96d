"""pfl-research in several processes that share a cohort, as its guide advises for one GPU.

Each process plays its part of every cohort; the sums are reduced between them with gloo, because NCCL refuses several
ranks on one GPU. They are started here as ``torchrun`` would, each with its share of the threads, and play a round each
time they are asked to.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from torch import Tensor

from rivals import Federation, Work

FOLDER = "COTERIE_BENCHMARK_FOLDER"
PFL = "COTERIE_BENCHMARK_PFL"


class PflProcesses:
    """Federated averaging by pfl, shared among processes."""

    def __init__(self, federation: Federation, folder: Path | None, count: int, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        federation.save(self._path)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._logs = [(self._path / f"log{rank}").open("wb") for rank in range(count)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from rivals.pfl_processes import serve; serve()"],
                env=self._environment(federation, folder, count, threads, rank, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs[rank],
                text=True,
                cwd=self._folder.name,
            )
            for rank in range(count)
        ]
        try:
            self._expect("ready")
        except RuntimeError:
            self.close()
            raise

    def _environment(
        self, federation: Federation, folder: Path | None, count: int, threads: int, rank: int, port: int
    ) -> dict[str, str]:
        # LOCAL_RANK chooses the GPU in pfl: all have the first.
        launched = {"TORCHELASTIC_RUN_ID": "benchmark", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(count)}
        share = str(max(1, threads // count))
        ours = {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "PFL_PYTORCH_DEVICE": str(federation.device),
            "OMP_NUM_THREADS": share,
            FOLDER: self._folder.name,
            PFL: "" if folder is None else str(folder.absolute()),
        }
        return os.environ | launched | ranks | ours

    def _expect(self, word: str) -> None:
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line or json.loads(line)["said"] != word:
                end = (self._path / f"log{rank}").read_text(encoding="utf-8", errors="replace")[-1500:]
                raise RuntimeError(f"process {rank} of pfl said {line!r} and not {word!r}: {end}")

    def _ask(self, word: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        self._expect(word)

    def play(self) -> None:
        """Play one round."""
        self._ask("round")

    def parameters(self) -> Tensor:
        """Give the global model, as the first process has it."""
        self._ask("model")
        return torch.from_numpy(np.load(self._path / "model.npy"))

    def processor_seconds(self) -> float:
        """Give the processor time of all processes."""
        return sum(measuring.tree_seconds(process.pid) for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()
        self._folder.cleanup()


# ------------------------------------------------------------------------------------------------ in those processes


def serve() -> None:
    """Obey what is written to this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever pfl prints is not an answer
    import torch.distributed

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    plain = torch.distributed.init_process_group

    @functools.wraps(plain)
    def gloo(*args: Any, **options: Any) -> None:
        plain(*args, **options | {"backend": "gloo"})

    torch.distributed.init_process_group = gloo
    from rivals import pfl_research

    folder = Path(os.environ[FOLDER])
    problem = pfl_research.find(Path(os.environ[PFL]) if os.environ[PFL] else None)
    if problem is not None:
        raise RuntimeError(problem)
    work = Work.of((folder / "work.json").read_text(encoding="utf-8"))
    federation = Federation(work, os.environ["PFL_PYTORCH_DEVICE"], folder)
    player = pfl_research.PflResearch(federation, int(os.environ["WORLD_SIZE"]))

    def answer(word: str) -> None:
        answers.write(json.dumps({"said": word}) + "\n")
        answers.flush()

    answer("ready")
    for line in sys.stdin:
        if line.strip() == "round":
            player.play()
            measuring.synchronise(federation.device)
        elif os.environ["RANK"] == "0":
            np.save(folder / "model.npy", player.parameters().cpu().numpy())
        answer(line.strip())
