"""A method of the user's own that gives the wrong thing: one sentence that names the method, where, and what."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie import api
from coterie.errors import AlgorithmError, Diverged
from tests.small_runs import SMALL

PARTS = {
    "START": '{"w": state["w"]}',
    "STEP": '{"w": work["w"] - 0.1 * batch.grad(work["w"])}',
    "FINISH": '{"w": work["w"]}, {"w": work["w"]}',
    "INIT": '{"w": start.row}, {"w": start.rows()}',
    "ASK": '"train", Message(shared={"w": server["w"]})',
    "ROUND": '{"w": replies["w"].mean(0)}, {}',
    "PERSONAL": '{"w": state["w"]}',
    "GLOBAL": '{"w": server["w"]}',
    "PREDICT": 'net.outputs(rows["w"], x)',
}
SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.algorithms import Ask, Fold, Message, Minibatches, Task
from coterie.algorithms.local_training import LocalTraining

@dataclass(frozen=True)
class Training(Task):
    data: Minibatches
    def start(self, context, state, message): return START
    def folds(self): return (Fold(self.data, self.step),)
    def step(self, work, batch): return STEP
    def finish(self, context, work): return FINISH

class Mine(LocalTraining):
    """Mine."""
    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"
    citation: ClassVar[str] = "none"
    has_global: ClassVar[bool] = True
    def init(self, start): return INIT
    def tasks(self): return {"train": Training(self.minibatches)}
    def round(self, server, cohort):
        replies = yield Ask(ASK)
        return ROUND
    def personal(self, context, state, message): return PERSONAL
    def global_model(self, server): return GLOBAL
    def predict(self, net, rows, x): return PREDICT
'''
ROWS = "must have a row for each of"  # parameters: 6 × 5 + 5, and 5 × 3 + 3
MISTAKES = [
    (
        "START",
        '{"w": state["v"]}',
        "task 'train' failed: KeyError: 'v' (mine.py, line 13) (the message has 'w'; the state has 'w')",
    ),
    ("START", '{"w": state["w"][0]}', f"task 'train': what start gives: 'w' {ROWS}"),
    ("START", 'state["w"]', "task 'train': what start gives must be a dict of tensors by name, but is a Tensor"),
    ("START", '{"w": state["w"][:, 1:]}', "task 'train' failed: RuntimeError: "),
    ("STEP", '{"v": work["w"]}', "task 'train': what step gives must have the names 'w', but has 'v'"),
    ("STEP", '{"w": work["w"][:, 1:]}', "task 'train': what step gives: 'w' must have the shape ("),
    ("STEP", '{"w": work["w"].double()}', "task 'train': what step gives: 'w' must have the shape ("),
    ("STEP", "None", "task 'train': what step gives must be a dict of tensors by name, but is a NoneType"),
    ("FINISH", '{"w": work["w"]}', "task 'train': finish must give a pair, what changes in the state and the reply"),
    ("FINISH", '{"v": work["w"]}, {}', "task 'train': finish changes 'v' of shape (53,) for each client, but the "),
    ("FINISH", '{"w": work["w"][:, :3]}, {}', "task 'train': finish changes 'w' of shape (3,) for each client"),
    ("FINISH", '{}, {"w": work["w"].mean(0)}', f"task 'train': the reply that finish gives: 'w' {ROWS}"),
    ("INIT", '{"w": start.row}', "init: it must give a pair, the server's state and the clients', but gives a dict"),
    (
        "INIT",
        '{}, {"w": start.row}',
        f"init: the clients' state: 'w' {ROWS} 5 client(s), shape (5, ...), but has (53,)",
    ),
    ("INIT", '{"w": 3}, {}', "init: the server's state must hold tensors, but 'w' is a int"),
    (
        "INIT",
        "start.nothing",
        "init failed: AttributeError: 'Start' object has no attribute 'nothing' (mine.py, line 24)",
    ),
    ("ASK", '"trane"', "task 'trane': the method asked for the task 'trane', but has train"),
    ("ASK", '"train", Message(each={"w": server["w"]})', f"task 'train': the message: 'w' {ROWS} 3 client(s)"),
    ("ASK", '"train", Message(shared={"w": 3})', "task 'train': what the message shares must hold tensors, but 'w' is"),
    ("ASK", '"train", None', "task 'train': it must be sent a Message, but is sent a NoneType"),
    (
        "ROUND",
        '{"w": replies["w"]}, {}',
        "round: the server's state: 'w' must have the shape (53,) of torch.float32, but",
    ),
    ("ROUND", '{"w": replies["v"].mean(0)}, {}', "round: there is no 'v' among the replies' tensors, which are 'w'"),
    ("ROUND", '{"v": replies["w"].mean(0)}, {}', "round: the server's state must have the names 'w', but has 'v'"),
    ("ROUND", 'replies["w"].mean(0)', "round: it must give a pair, the server's state and what to record"),
    ("ROUND", '{"w": replies["w"].mean(0)}, {"x": 3}', "round: what to record must hold tensors, but 'x' is a int"),
    ("ROUND", '{"w": replies["w"].mean(0)}, None', "round: what to record must be a dict of tensors by name, but is"),
    ("PERSONAL", 'state["w"]', "personal: what it gives must be a dict of tensors by name, but is a Tensor"),
    ("PERSONAL", '{"v": state["w"]}', "predict of the personal model failed: KeyError: 'w' (mine.py, line 31)"),
    ("PERSONAL", '{"w": state["w"][0]}', f"personal: what it gives: 'w' {ROWS} 5 client(s)"),
    ("GLOBAL", 'server["w"]', "global_model: what it gives must be a dict of tensors by name, but is a Tensor"),
    ("GLOBAL", '{"v": server["w"]}', "predict of the global model failed: KeyError: 'w' (mine.py, line 31)"),
    ("GLOBAL", '{"w": server["w"][:3]}', "predict of the global model failed: RuntimeError: "),
    ("PREDICT", PARTS["PREDICT"] + "[..., :2]", "predict of the personal model: it must give outputs of shape ("),
    ("PREDICT", PARTS["PREDICT"] + ".mean(1)", "predict of the personal model: it must give outputs of shape ("),
    ("PREDICT", "None", "predict of the personal model: it must give a tensor of outputs, but gives a NoneType"),
]


def run(folder: Path, engine: str, **changed: str) -> None:
    text = SOURCE
    for part, code in {**PARTS, **changed}.items():
        text = text.replace(part, code)
    (folder / "mine.py").write_text(text)
    settings = {**SMALL, "rounds": 2, "engine": engine}
    api.run(str(folder / "mine.py"), out=folder / "run", progress=False, **settings)


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize(("part", "code", "sentence"), MISTAKES, ids=[f"{part}-{code}" for part, code, _ in MISTAKES])
def test_a_mistake_is_one_sentence(engine: str, part: str, code: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AlgorithmError) as refused:
        run(tmp_path, engine, **{part: code})
    assert str(refused.value).startswith(f"Mine, {sentence}") and "\n" not in str(refused.value)


def test_without_a_mistake_it_runs(tmp_path: Path) -> None:
    run(tmp_path, "batched")
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_loss_that_is_nan_never_ends_as_a_finished_run(tmp_path: Path) -> None:
    # All models stay finite: what they give does not.
    with pytest.raises(Diverged, match=r"round 1: the validation loss of the personal model of 5 clients is no longer"):
        run(tmp_path, "batched", PREDICT=PARTS["PREDICT"] + " * float('nan')")
    assert not (tmp_path / "run" / "summary.json").exists()
