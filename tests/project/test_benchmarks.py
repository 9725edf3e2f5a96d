"""The benchmarks' own logic: the same work for all, counts by hand, results that make the page. Nothing is timed."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
RESULTS = sorted(FOLDER.glob("results/*.json"))


@pytest.fixture(autouse=True)
def _as_the_scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(FOLDER)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]


OURS = (
    "measuring",
    "rivals",
    "side_by_side",
    "overhead",
    "scaling",
    "plots",
    "rivals_at_their_best",
    "startup",
    "study",
    "host_work",
    "families",
    "adapters",
)


def script(name: str) -> Any:
    return importlib.import_module(name)


def result_of(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a script as small as it can be, and read what it wrote."""
    target = folder / f"{name}_cpu.json"
    script(name).main(["--smallest", *arguments, "--json", str(target)])
    text = target.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert {"command", "device", "processor", "cores", "threads", "python", "versions", "rows"} <= found.keys()
    assert found["versions"].keys() >= {"coterie", "torch"} and found["rows"]
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)
    assert str(Path.home()) not in text and str(folder) not in text
    return found


# ---------------------------------------------------------------------------------------------------- scripts that run


def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result_of("side_by_side", tmp_path, "--only", "linear-10", "cnn-50")
    assert found["absent"] == {"pfl": "not asked for", "flower": "not asked for"}
    for row in found["rows"]:
        assert row["ceilings"]["copy_gb_s"] > 0 and row["ceilings"]["product_gflop_s"] > 0
        assert row["seconds"].keys() == {"ours", "loop"} and row["ratios"].keys() == {"loop"}
        times = {rival: spread["median"] for rival, spread in row["seconds"].items()}
        assert row["ratios"]["loop"]["median"] == pytest.approx(times["loop"] / times["ours"], rel=1e-2)
        assert row["samples_a_second"]["ours"] == pytest.approx(row["samples"] / times["ours"], rel=1e-2)
        assert row["roofline"]["loop"] == pytest.approx(row["floor"]["seconds"] / times["loop"], rel=1e-2)
        assert row["same_work"] and row["reached"]["ours"]["loss"] < row["start"]["loss"]
    assert "samples/s" in capsys.readouterr().out


def test_a_row_is_measured_again_and_the_others_stay(tmp_path: Path) -> None:
    result_of("side_by_side", tmp_path, "--only", "linear-50", "mlp-10")
    first = json.loads((tmp_path / "side_by_side_cpu.json").read_text())["rows"]
    found = result_of("side_by_side", tmp_path, "--only", "linear-10", "linear-50", "--add")["rows"]
    assert [row["work"] for row in found] == ["linear-10", "linear-50", "mlp-10"]  # in the table's order
    assert found[2] == first[1] and found[1] != first[0]


def test_a_rival_that_is_not_there_is_left_out_with_a_reason(tmp_path: Path) -> None:
    if importlib.util.find_spec("pfl") is not None:
        pytest.skip("pfl is installed here")
    found = result_of("side_by_side", tmp_path, "--only", "linear-10", "--with-pfl", str(tmp_path / "nowhere"))
    assert "pfl" in found["absent"]["pfl"] and found["rows"][0]["seconds"].keys() == {"ours", "loop"}


def test_rivals_at_their_best(tmp_path: Path) -> None:
    found = result_of("rivals_at_their_best", tmp_path, "--only", "mlp-10", "--without", "torch.func, compiled")
    (row,) = found["rows"]
    assert row["seconds"].keys() == {"ours", "torch.func, vmap"} and row["same_work"]
    assert 0 < row["updates_apart"]["torch.func, vmap"] < 1e-4
    times = {way: spread["median"] for way, spread in row["seconds"].items()}
    theirs = row["best"]["torch.func"]
    assert theirs["way"] == "torch.func, vmap" and theirs["seconds"] == times["torch.func, vmap"]
    assert theirs["times_ours"] == pytest.approx(times["torch.func, vmap"] / times["ours"], rel=1e-2)
    (line,) = script("rivals_at_their_best").table(found)
    assert line.startswith("| MLP, 159,010 | 10 | 2 | ") and " ms, vmap (" in line


def test_families(tmp_path: Path) -> None:
    found = result_of("families", tmp_path, "--only", "LSTM", "ViT:clients=3", "--ways", "plain", "stacked")
    again = ["--only", "ViT:clients=3", "MLP", "--ways", "loop", "stacked", "--add"]
    rows = result_of("families", tmp_path, *again)["rows"]
    assert [(row["name"], row["clients"], [*row["seconds"]]) for row in rows] == [
        ("LSTM", 2, ["plain", "stacked"]),
        ("ViT", 3, ["loop", "stacked"]),
        ("MLP", 2, ["loop", "stacked"]),
    ]
    assert rows[0] == found["rows"][0]
    seconds = {way: {"median": each} for way, each in {"plain": 1.5, "loop": 2.0, "stacked": 0.0125}.items()}
    row = {"name": "GRU", "clients": 50, "steps": 5, "batch": 10, "seconds": seconds}
    assert script("families").table({"rows": [row]}) == ["| GRU | 50 × 5 × 10 | 1,500 | 2,000 | 12.5 | 120 | 160 |"]


def test_study(tmp_path: Path) -> None:
    (old := tmp_path / "old").mkdir()
    (old / "coterie").symlink_to(ROOT / "src/coterie")
    ways = ("--ways", "in turn", "together", "--states", "warm")
    found = result_of("study", tmp_path, *ways, "--before", str(old))
    (row,) = found["rows"]
    assert (row["runs"], row["rounds"], row["data"], row["in_turn_reckoned"]) == (2, 2, "digits", [])
    times = {way: row["seconds"][way]["warm"]["median"] for way in ("in turn", "together")}
    ratio = row["times_as_fast"]["together"]["warm"]["median"]
    assert ratio == pytest.approx(times["in turn"] / times["together"], rel=1e-2)
    # Ahead of the other ways there is what took the runs in turn before.
    before = row["seconds"]["in turn, before"]["warm"]["median"]
    assert {way: states["warm"]["median"] for way, states in row["times_as_fast_as_before"].items()} == pytest.approx(
        {way: before / seconds for way, seconds in times.items()}, rel=1e-2
    )
    # The same runs by either way: of a handful of test samples a client none is answered otherwise.
    assert row["scores_apart"] < 1e-6
    for run, part in ((row["one_run"], 0.1), (row["run_with_all_clients"], 1.0)):
        assert run["rounds"] == 3 and 0 < run["share"]["median"] < 1 and run["participation"] == part
        whole = run["rounds_seconds"]["median"] + run["overhead_seconds"]["median"]
        assert run["seconds"]["median"] == pytest.approx(whole, rel=1e-2)
    (line,) = script("study").table(found)
    assert line.startswith("| digits, warm | ") and line.count(" times as fast (") == 1


def test_modules_that_were_not_compiled_are_once_for_all_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study, asked = script("study"), list[Any]()
    monkeypatch.setattr(study, "commanded", lambda words, environment, folder: asked.append(words))
    for name in ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "as before")
    there, gone = tmp_path / "there.pyc", str(tmp_path / "gone.pyc")
    there.touch()
    monkeypatch.setattr(study.importlib.util, "cache_from_source", lambda path: str(there))
    study.compile_modules("cpu", tmp_path)
    assert not asked and os.environ["PYTHONPYCACHEPREFIX"] == "as before"
    monkeypatch.setattr(study.importlib.util, "cache_from_source", lambda path: gone)
    study.compile_modules("cuda", tmp_path)
    assert len(asked) == 1 and asked[0][asked[0].index("--device") + 1] == "cuda"
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(tmp_path / "modules") and not os.environ["PYTHONDONTWRITEBYTECODE"]


def test_host_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import host_work;"
        f"host_work.main(['--rounds', '2', '--seeds', '1', '--json', {str(tmp_path / 'found.json')!r}])"
    )
    # In a process of its own: it puts itself between the library's functions.
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["rows"]
    calls = {part: found["calls"] for part, found in row["parts"].items()}
    assert (row["runs"], row["rounds"], calls["training"], calls["table"]) == (6, 2, 2, 1)
    assert calls["beginning of a run"] == calls["end of a run"] == 6
    spent = sum(found["ms"] for found in row["parts"].values()) * row["runs"] * row["rounds"] / 1e3
    assert 0 < spent < row["processor"]


def test_a_brief_study_reckons_what_is_warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study, asked = script("study"), list[str]()
    commands = study.Commands(study.Study("mlp", "iid", 3), 2, "digits", "cuda", tmp_path)
    for name in ("whole", "reckoned", "warm_up"):
        monkeypatch.setattr(commands, name, lambda way, *_, name=name: asked.append(name) or study.Spent(1.0, 1.0))
    monkeypatch.setattr(study, "_scores", lambda out: {})
    for states in (["warm"], ["cold", "warm"]):
        found = study.studies(commands, ["together", "in turn"], states, 1, True, tmp_path)
        assert found["in_turn_reckoned"] == ["warm"]
    assert asked == ["warm_up", "whole", "warm_up", "reckoned", "whole", "whole", "whole", "reckoned"]


def test_the_time_of_a_study_is_reckoned_from_the_runs_of_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("study")
    commands = study.Commands(study.Study("mlp", "iid", 3), 2, "digits", "cpu", Path())
    # A command that takes 2 seconds by itself and 0.5 for each run, of which nothing is left when it is called again.
    taken = iter([study.Spent(2 + 6 * 0.5, 4 + 6 * 1.5), study.Spent(2, 4)])
    monkeypatch.setattr(commands, "_compare", lambda part, way, caches, out: next(taken))
    assert commands.reckoned("in turn", "", "").both == (2 + 30 * 0.5, 4 + 30 * 1.5)


def test_the_best_way_of_each_counts() -> None:
    seconds = {"ours": 2.0, "ours, tf32": 1.0, "pfl, 1 process": 40.0, "pfl, 4 processes": 14.0, "jax, vmap": 1.5}
    best = script("rivals_at_their_best").best({way: {"median": value} for way, value in seconds.items()})
    assert {family: (found["way"], found["times_ours"]) for family, found in best.items()} == {
        "ours": ("ours", 1.0),
        "pfl": ("pfl, 4 processes", 7.0),
        "jax": ("jax, vmap", 0.75),
    }


def test_gaps_between_unequal_clients_weigh_nothing() -> None:
    rivals = script("rivals")
    federation = rivals.Federation(rivals.Work("linear", (1, 28, 28), (7, 2, 4), 3, batch=3))
    x, y, weights = script("rivals.padded").batches(federation)
    assert x.shape == (3, 3, 3, 1, 28, 28) and y.shape == weights.shape == (3, 3, 3)
    assert weights.sum((1, 2)).tolist() == [7, 2, 4] and weights[1].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    player, loop = script("rivals.torch_func").TorchFunc(federation), script("rivals.plain").PlainLoop(federation)
    before = loop.parameters()
    for _ in range(2):
        player.play()
        loop.play()
    # The same batches in the same order: rounding alone is between them.
    assert (player.parameters() - loop.parameters()).norm() < 1e-4 * (loop.parameters() - before).norm()


def test_scaling(tmp_path: Path) -> None:
    found = result_of("scaling", tmp_path, "--only", "parameters", "idle")
    values = [(row["series"], row["value"], row["parameters"], row["clients"]) for row in found["rows"]]
    assert values == [
        ("parameters", 10, 785 * 10 + 11 * 10, 20),
        ("parameters", 40, 785 * 40 + 41 * 10, 20),
        ("idle", 20, 7850, 20),
        ("idle", 200, 7850, 200),
    ]
    assert all(row["cohort"] == 20 and row["seconds"].keys() == {"ours", "loop"} for row in found["rows"])


def test_overhead(tmp_path: Path) -> None:
    found = result_of("overhead", tmp_path, "--cases", "digits-20", "images-20", "--methods", "fedacs")
    for row in found["rows"]:
        assert row["overhead"] == pytest.approx(sum(row["shares"].values()), rel=1e-2)
        assert row["rounds"] == row["round_alone_seconds"]["repeats"] == row["round_in_run_seconds"]["repeats"] == 2
    # Five epochs over 5 samples less the tenth (rounded to none) for validation, of 3 clients; 2 models.
    assert found["rows"][0]["samples_a_round"]["trained"] in (5 * 15, 5 * 12)


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # and no longer than this test, whatever the script sets
    before = torch.get_num_threads()
    try:
        found = result_of("threads", tmp_path, "--cases", "digits-linear-10", "images-linear-50", "--threads", "2")
    finally:
        torch.set_num_threads(before)
    assert found["policy"] == "PASSIVE" and found["threads"] == 2
    assert [row["case"] for row in found["rows"]] == ["digits-linear-10", "images-linear-50"]
    assert all(row["seconds"].keys() == {"one", "all", "chosen"} for row in found["rows"])


def test_startup(tmp_path: Path) -> None:
    found = result_of("startup", tmp_path, "--only", "rum")
    nothing, torch_alone, mistake = found["rows"]
    assert (nothing["times_nothing"], torch_alone["times_torch"]) == (1, 1)
    assert mistake["command"] == "coterie rum" and mistake["seconds"]["repeats"] == 1
    times = [row["processor_seconds"]["median"] for row in (nothing, mistake)]
    assert mistake["times_nothing"] == pytest.approx(times[1] / times[0], rel=1e-2)


# ------------------------------------------------------------------------------------------------------- the same work


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn_pfllib"])
def test_ours_and_the_loop_reach_the_same_model_where_the_order_of_samples_does_not_matter(model: str) -> None:
    rivals = script("rivals")
    work = rivals.Work(model, (1, 28, 28), (6, 2, 4, 3), 3, batch=6)  # one step a client, weighted by samples
    federation = rivals.Federation(work)
    ours, loop = script("rivals.ours").Ours(federation), script("rivals.plain").PlainLoop(federation)
    torch.testing.assert_close(ours.parameters(), loop.parameters(), rtol=0, atol=0)
    before = ours.parameters()
    for _ in range(2):
        ours.play()
        loop.play()
    assert len({tuple(federation.cohort(number)) for number in range(1, 9)}) > 1
    moved = (loop.parameters() - before).norm()
    assert moved > 0
    # Two float32 ways through a few hundred products each: a thousandth of the movement is far above their rounding.
    assert (ours.parameters() - loop.parameters()).norm() < 1e-3 * moved


def test_shapes_are_those_that_are_named() -> None:
    module, rivals = script("side_by_side"), script("rivals")
    counts = {
        name: sum(p.numel() for p in rivals.build(work.model, work.shape, 10).parameters())
        for name, work in module.GPU.items()
    }
    assert counts == {"pfl": 1_626_442, "pfllib": 582_026, "mlp": 784 * 200 + 200 + 200 * 10 + 10}
    sizes = module.GPU["pfllib"].sizes
    assert (len(sizes), sum(sizes), min(sizes), max(sizes)) == (20, 52_000, 393, 6_525)
    pfl = module.GPU["pfl"]
    assert (len(pfl.sizes), set(pfl.sizes), pfl.cohort, pfl.batch, pfl.steps) == (1000, {50}, 50, 10, 250)
    assert {work.steps for name, work in module.CPU.items() if name[:3] in ("lin", "mlp")} == {1000}


def test_work_travels_as_text() -> None:
    rivals = script("rivals")
    work = rivals.Work("mlp", (1, 28, 28), (6, 2), 1, 4)
    assert rivals.Work.of(work.plain()) == work


def test_the_floor_of_a_linear_model_by_hand() -> None:
    rivals = script("rivals")
    work = rivals.Work("linear", (1, 28, 28), (100,) * 5, 5, 10)  # 50 steps of 10 samples
    floor = rivals.floor(work, {"copy_gb_s": 1.0, "product_gflop_s": 20.0})
    # A product forward and one for the gradient of the weights; the inputs need none. Two operations a product's term.
    assert floor["operations"] == 500 * 2 * (2 * 784 * 10)
    assert floor["bytes"] == 50 * 2 * 4 * 7850 + 500 * 4 * 784
    assert floor["seconds"] == floor["bytes"] / 1e9
    assert floor["seconds_by_operations"] == floor["operations"] / 20e9 < floor["seconds"]


def test_losses_apart_are_seen() -> None:
    apart = script("rivals").same_work
    assert apart([{"loss": 1.0}, {"loss": 1.0}], start=2.0) == 0
    assert apart([{"loss": 1.0}, {"loss": 1.5}], start=2.0) == pytest.approx(0.5)
    assert apart([{"loss": 2.5}], start=2.0) == float("inf")


# -------------------------------------------------------------------------------------------------------------- clocks


def test_spread_gives_median_and_quartiles() -> None:
    spread = script("measuring").spread
    assert spread([5, 1, 4, 2, 3]) == {"median": 3, "lower": 2, "upper": 4, "least": 1, "repeats": 5}
    assert spread([7]) == {"median": 7, "lower": 7, "upper": 7, "least": 7, "repeats": 1}


def test_processor_time_of_a_process_and_its_children() -> None:
    seconds = script("measuring").tree_seconds
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child has used its 0.3 s, and waits
        assert 0.29 <= seconds(process.pid) < 5
        process.communicate(b"\n")
    assert seconds(process.pid) == 0


def test_functions_are_timed_in_turn() -> None:
    order: list[str] = []
    work = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = script("measuring").interleaved(work, repeats=2, warm=1)
    assert order == ["a", "b"] * 3 and [times[name]["repeats"] for name in "ab"] == [2, 2]


def test_what_others_take_is_what_is_busy_and_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    others = script("measuring").Others()
    # Seconds that all cores were busy, that this process used, and that there were: others took 5 - 2 of 10, then none.
    moments = iter([(1.0, 1.0, 10.0), (6.0, 3.0, 20.0), (6.0, 3.0, 20.0), (8.0, 5.5, 30.0)])
    monkeypatch.setattr(others, "_now", lambda: next(moments))
    assert others.share is None
    with others:
        pass
    assert others.share == pytest.approx(0.3)
    with others:
        pass
    assert others.share == pytest.approx(3 / 20)


def test_a_clock_leaves_out_what_another_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = script("overhead")
    ticks = itertools.count()
    monkeypatch.setattr(overhead, "now", lambda: overhead.Spent(float(next(ticks)), 0.0))
    clocks = overhead.Clocks()
    inner = clocks._clocked(lambda: None, "records")

    def both() -> None:
        inner()
        inner()

    clocks._clocked(both, "checkpoints")()
    # The outer call reads the clock at 0 and 5, the inner ones at 1, 2 and 3, 4: one second each.
    found = {label: [spent.wall for spent in calls] for label, calls in clocks.calls.items() if calls}
    assert found == {"records": [1.0, 1.0], "checkpoints": [5.0 - 2.0]}


def test_clocks_come_off_again() -> None:
    overhead = script("overhead")
    before = [getattr(owner, name) for owner, name, _ in overhead.Clocks.PLACES]
    with pytest.raises(RuntimeError), overhead.Clocks().running():
        assert [getattr(owner, name) for owner, name, _ in overhead.Clocks.PLACES] != before
        raise RuntimeError
    assert [getattr(owner, name) for owner, name, _ in overhead.Clocks.PLACES] == before


# ------------------------------------------------------------------------------------------------- results and the page


def test_pictures_are_valid_and_always_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    results.mkdir()
    result_of("side_by_side", results, "--only", "linear-10")
    result_of("scaling", results, "--only", "samples")
    result_of("overhead", results, "--cases", "digits-20", "--methods", "fedavg")
    plots, pictures = script("plots"), []
    for name in ("first", "second"):
        plots.main(["--results", str(results), "--out", str(tmp_path / name)])
        pictures.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert pictures[0].keys() == {"side_by_side_cpu.svg", "scaling_cpu.svg", "overhead_cpu.svg"}
    assert pictures[0] == pictures[1]
    for text in pictures[0].values():
        assert ElementTree.fromstring(text).tag.endswith("svg")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_kept_result_says_where_it_comes_from(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["command"].startswith("benchmarks/") and found["rows"]
    versions = found.get("versions", found)
    assert re.match(r"\d+\.\d+", versions["torch"])


def test_the_page_shows_how_quickly_the_command_line_answers() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for row in script("startup").table(json.loads((FOLDER / "results/startup.json").read_text(encoding="utf-8"))):
        assert row in page, f"in docs/performance.md, write this row:\n{row}"


@pytest.mark.parametrize("name", ["rivals_at_their_best", "study", "threads"])
def test_the_page_shows_rivals_and_studies(name: str) -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    kept = sorted(FOLDER.glob(f"results/{name.partition('_')[0]}_*.json"))
    assert kept
    for path in kept:
        for row in script(name).table(json.loads(path.read_text(encoding="utf-8"))):
            assert row in page, f"in docs/performance.md, write this row:\n{row}"


def test_the_page_on_choosing_shows_what_was_measured() -> None:
    page = (ROOT / "docs/choose_a_method.md").read_text(encoding="utf-8")
    rows = json.loads((FOLDER / "results/choice.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 12
    for each in rows:
        scores = [each[name]["test"] for name in ("choice", "grid, last round", "grid, best round", "alone")]
        cells = [f"{each['test_fraction']:g}", str(each["seed"]), *(f"{100 * score:.1f}" for score in scores)]
        row = f"| {' | '.join(cells)} | {each['share']:.2f} |"
        assert row in page, f"in docs/choose_a_method.md, write this row:\n{row}"
    sentences = []
    for which, name in (("the grid's last round", "grid, last round"), ("its best round", "grid, best round")):
        ahead = [100 * (each["choice"]["test"] - each[name]["test"]) for each in rows]
        behind, most, before = (
            sum(points < -0.5 for points in ahead),
            -min(ahead),
            sum(points > 0.5 for points in ahead),
        )
        counted = f"behind {which}: {behind} (by up to {most:.1f} points), ahead of it: {before}."
        sentences.append(f"ore than half a point {counted}")
    shares = [each["share"] for each in rows]
    longer = sum(share > 0.2 for share in shares)
    sentences.append(f"More than a fifth of the grid's time: {longer} (up to {max(shares):.2f} of it).")
    for sentence in sentences:
        assert sentence in page, f"in docs/choose_a_method.md, write this sentence:\n{sentence}"


def test_the_page_of_models_shows_what_was_measured() -> None:
    page = (ROOT / "docs/add_your_model.md").read_text(encoding="utf-8")
    kept = sorted(FOLDER.glob("results/families_*.json"))
    assert kept
    for path in kept:
        for row in script("families").table(json.loads(path.read_text(encoding="utf-8"))):
            assert row in page, f"in docs/add_your_model.md, write this row:\n{row}"


def test_the_page_shows_the_kept_results() -> None:
    plots = script("plots")
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    shown = 0
    for kind in plots.KINDS:
        for path in FOLDER.glob(f"results/{kind}_*.json"):
            picture = f"performance/{path.stem}.svg"
            assert f"]({picture})" in page and (ROOT / "docs" / picture).exists(), picture
            for row in plots.table(kind, json.loads(path.read_text(encoding="utf-8"))):
                assert row in page, f"in docs/performance.md, write this row:\n{row}"
            shown += 1
    assert shown
