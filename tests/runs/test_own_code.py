"""A run's folder holds the user's own code: moved, with the originals gone, it resumes, exports and loads."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie import user_code
from coterie.config import from_mapping
from coterie.errors import ConfigError, CoterieError, DataError, RunFolderError
from coterie.results import Result
from coterie.results.export import export
from coterie.results.partial_summary import partial_summary
from coterie.runs import launch
from coterie.runs.own_code import own_code, stored_config
from tests.programs import load_program
from tests.small_runs import OWN, SMALL, assert_same_end, finish, stop

FILES = {
    "turned.py": "import beside\n" + OWN.replace("1 / len(own)", "beside.SHARE / len(own)"),
    "beside.py": "SHARE = 1.0\n",
    "own_things/__init__.py": "WIDTH = 5\n",
    "own_things/deep/layers.py": "from torch import nn\n\n\ndef hidden(width):\n    return nn.Linear(6, width)\n",
    "own_things/net.py": """
from torch import nn
import own_things.deep.layers, json
import own_things.deep.layers as same
from . import WIDTH
from .deep import layers

assert own_things.deep.layers is layers is same and __name__.endswith("own_things.net")

class Net(nn.Sequential):
    def __init__(self, outputs, slope=0.1):
        super().__init__(layers.hidden(WIDTH), nn.LeakyReLU(slope), nn.Linear(WIDTH, outputs))
""",
    "own_things/losses.py": """
import torch.nn.functional as F

def smooth(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
""",
    "own_things/loading.py": """
from pathlib import Path
import torch
from coterie.data import Dataset

def samples():
    numbers = [float(word) for word in Path(__file__).with_name("numbers.txt").read_text().split()]
    x = torch.tensor(numbers).view(-1, 6)
    return Dataset("mine", x, x.argmax(1) % 3, len(x), "multiclass", ("a", "b", "c"), (0.0,), (1.0,),
                   owner=torch.arange(len(x)) % 5)

def here():
    x = torch.arange(70 * 6.0).view(-1, 6).sin()
    return Dataset("mine", x, x.argmax(1) % 3, len(x), "multiclass", ("a", "b", "c"), (0.0,), (1.0,),
                   owner=torch.arange(len(x)) % 5)
""",
}
OWN_SETTINGS = {
    "model": "import:own_things.net:Net:slope=0.2",
    "loss": "import:own_things.losses:smooth",
    "data": "import:own_things.loading:here",
}


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("own_things", "beside")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of somebody's own code, on the path and the current folder."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    forget_modules()
    yield folder
    forget_modules()


def config_of_own(project: Path, **more: Any) -> Any:
    return from_mapping({**SMALL, "algorithm": "turned.py", **OWN_SETTINGS, **more})


def go_away(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the originals, which are gone."""
    monkeypatch.chdir("/")
    shutil.rmtree(project)
    forget_modules()


def test_moved_without_the_originals_it_ends_as_if_never_stopped(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of_own(project)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    before = (tmp_path / "cut" / "config.yaml").read_bytes()
    go_away(project, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "cut", tmp_path / "elsewhere" / "moved")
    assert partial_summary(Result(moved))["algorithm"] == "turned"
    finish(launch.resume(moved))
    assert_same_end(tmp_path / "whole", moved)
    assert (moved / "config.yaml").read_bytes() == before, "what the user configured is not rewritten"
    assert not any(name.split(".")[0] in ("own_things", "beside") for name in sys.modules), "the copies were loaded"
    assert not list(moved.rglob("__pycache__"))


def test_it_resumes_exports_and_loads_in_another_process(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of_own(project, algorithm="local", settings={})
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    go_away(project, monkeypatch)
    moved = shutil.move(tmp_path / "cut", tmp_path / "moved")
    source = str(Path(coterie.__file__).parents[1])

    def run(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *words], cwd="/", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "coterie", "resume", str(moved), "--quiet")
    assert_same_end(tmp_path / "whole", moved)
    run("-m", "coterie", "export", str(moved), "--client", "2", "--out", str(tmp_path / "m"))
    there = shutil.move(tmp_path / "m", tmp_path / "there")
    assert set(load_file(there / "client-2.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    names = {str(path.relative_to(there / "code")) for path in (there / "code").rglob("*.py")}
    assert names == {"own_things/__init__.py", "own_things/net.py", "own_things/deep/layers.py"}, "of the model alone"
    assert json.loads((there / "model.json").read_text())["model"] == OWN_SETTINGS["model"]
    probe = f"import sys; sys.path.insert(0, {str(there)!r}); import predict; print(predict.load().network)"
    assert "Linear" in run("-c", probe)


def test_the_folder_says_what_it_holds(project: Path, tmp_path: Path) -> None:
    launch.begin(config_of_own(project), tmp_path / "run").folder.close()
    code = tmp_path / "run" / "code"
    manifest = json.loads((code / "manifest.json").read_text())
    assert {name: each["spec"] for name, each in manifest["settings"].items()} == {
        "algorithm": str(project / "turned.py"),
        **OWN_SETTINGS,
    }
    assert {name: each["module"] for name, each in manifest["settings"].items()} == {
        "algorithm": "turned",
        "model": "own_things.net",
        "loss": "own_things.losses",
        "data": "own_things.loading",
    }
    copied = {each["file"]: each["original"] for each in manifest["modules"].values()}
    assert copied == {name: str(project / name) for name in FILES}
    for name, text in FILES.items():
        assert (code / name).read_text() == text
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["coterie"] == coterie.__version__ and about["torch"] == torch.__version__


def test_no_code_of_ones_own_is_no_folder(tmp_path: Path) -> None:
    config = from_mapping({**SMALL, "algorithm": "local", "loss": "import:torch.nn.functional:cross_entropy"})
    assert not own_code(config).files, "what is installed is not copied"
    launch.begin(from_mapping({**SMALL, "algorithm": "local"}), tmp_path / "run").folder.close()
    assert not (tmp_path / "run" / "code").exists()
    assert stored_config(tmp_path / "run").algorithm == "local"


def test_two_runs_with_code_of_one_name_do_not_meet(project: Path, tmp_path: Path) -> None:
    launch.begin(config_of_own(project), tmp_path / "one").folder.close()
    (project / "own_things" / "__init__.py").write_text("WIDTH = 7\n")
    forget_modules()
    launch.begin(config_of_own(project), tmp_path / "two").folder.close()
    sizes = {name: launch.resume(tmp_path / name).parts.engine.problem.layout.size for name in ("one", "two", "one")}
    assert sizes["two"] - sizes["one"] == 2 * (6 + 1 + 3)


@pytest.mark.parametrize("name", ["turned.py", "own_things/net.py", "own_things/deep/layers.py", "manifest.json"])
def test_a_copy_that_was_edited_is_refused_and_not_run(name: str, project: Path, tmp_path: Path) -> None:
    launch.begin(config_of_own(project), tmp_path / "run").folder.close()
    file = tmp_path / "run" / "code" / name
    file.write_text(file.read_text() + "\n# better\nraise SystemExit\n")
    with pytest.raises(RunFolderError, match=r"not .* that the run began with|not what the run began with") as caught:
        launch.resume(tmp_path / "run")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(RunFolderError, match=f"{file} is missing"):
        launch.resume(tmp_path / "run")


@pytest.mark.parametrize(
    "modules",
    [
        {"../../away": {"file": "../../away.py", "original": "x", "sha256": "x"}},
        {"away": {"file": "/etc/away.py", "original": "x", "sha256": "x"}},
        {"away": {"file": "../away.py", "original": "x", "sha256": "x"}},
        {"away": {"original": "x", "sha256": "x"}},
        {"away": 3},
        [],
    ],
)
def test_a_manifest_cannot_name_what_lies_outside(modules: Any, tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text("raise SystemExit\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "manifest.json").write_text(json.dumps({"settings": {}, "modules": modules}))
    with pytest.raises(RunFolderError, match=r"manifest\.json is damaged"):
        user_code.Copies.read(tmp_path / "code")


def test_data_that_are_gone_are_one_sentence(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = project / "own_things" / "numbers.txt"
    numbers.write_text(" ".join(str(number) for number in torch.arange(70 * 6.0).sin().tolist()))
    config = config_of_own(project, data="import:own_things.loading:samples", algorithm="local")
    stop(launch.begin(config, tmp_path / "run"), "in a round", 3)
    monkeypatch.chdir("/")
    forget_modules()
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")
    launch.resume(moved).folder.close()  # what lies beside the original is found
    text = numbers.read_text()
    numbers.unlink()
    with pytest.raises(DataError) as caught:
        launch.resume(moved)
    message = str(caught.value)
    assert message.startswith("data 'import:own_things.loading:samples' failed: FileNotFoundError: ")
    assert str(numbers) in message and "\n" not in message
    numbers.write_text(text)
    finish(launch.resume(moved))


def test_an_error_names_the_code_as_the_user_did(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "own_things" / "losses.py").write_text(
        "from pathlib import Path\n\n\n"
        "def smooth(outputs, targets):\n"
        f"    assert Path({str(project)!r}).exists()\n"
        "    return (outputs.sum(1) - targets) ** 2\n"
    )
    stop(launch.begin(config_of_own(project), tmp_path / "run"), "in a round", 2)
    go_away(project, monkeypatch)
    with pytest.raises(CoterieError, match=r"^loss 'import:own_things\.losses:smooth' fails on outputs") as caught:
        launch.resume(tmp_path / "run")
    assert "coterie_run" not in str(caught.value)


def test_what_a_module_might_import_need_not_be_there(project: Path) -> None:
    (project / "own_things" / "losses.py").write_text(
        "try:\n    import no_such_thing.at_all\nexcept ImportError:\n    pass\n"
        "def smooth(outputs, targets):\n    from . import never\n    import matplotlib.pyplot\n"
    )
    (project / "own_things" / "never.py").write_text("this is not Python\n")
    before = "matplotlib" in sys.modules
    copies = user_code.collect({"loss": OWN_SETTINGS["loss"]})
    assert {each.module for each in copies.files} == {"own_things", "own_things.losses", "own_things.never"}
    assert ("matplotlib" in sys.modules) is before, "nothing of others is imported to be looked at"


def test_source_that_cannot_be_read_is_one_sentence(project: Path) -> None:
    importlib.import_module("own_things.losses")
    (project / "own_things" / "losses.py").unlink()
    with pytest.raises(ConfigError, match=r"loss 'import:own_things\.losses:smooth' cannot be copied: .*losses\.py"):
        user_code.collect({"loss": OWN_SETTINGS["loss"]})


def test_files_of_one_stem_are_copied_apart(project: Path) -> None:
    (project / "there").mkdir()
    (project / "there" / "own_things.py").write_text(OWN)
    specs = {"model": OWN_SETTINGS["model"], "algorithm": str(project / "there" / "own_things.py")}
    copies = user_code.collect(specs)
    assert copies.settings["algorithm"] == (specs["algorithm"], "own_things_")
    assert {each.module: each.text.decode() for each in copies.files}["own_things_"] == OWN


def test_a_copy_is_loaded_where_the_original_is_loaded_already(project: Path, tmp_path: Path) -> None:
    finish(launch.begin(config_of_own(project, algorithm="local"), tmp_path / "run"))
    found = export(tmp_path / "run", tmp_path / "m", clients=1)
    before = importlib.import_module("own_things.net")
    (project / "own_things" / "net.py").write_text("raise SystemExit")
    code = load_program(found.folder / "predict.py", "exported")
    paths = list(sys.path)
    network = code.load().network
    assert sys.path == paths
    assert type(network).__module__ != "exported" and sys.modules["own_things.net"] is before
    assert network(torch.zeros(1, 6)).shape == (1, 3)
