"""Absurd values in every field of configuration: each is taken, or refused with one sentence, soon and cheaply."""

from __future__ import annotations

import copy
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from coterie import options
from coterie.algorithms import registry as algorithms
from coterie.config import ExperimentConfig, from_mapping
from coterie.data.partitions import scheme
from coterie.errors import ConfigError, CoterieError
from coterie.federation import agreement, project
from coterie.federation.agreement import Agreement, Member, Promise, Schema
from coterie.federation.node import HELLO
from coterie.federation.plan import Plan
from coterie.federation.wire import pack, unpack
from coterie.models import registry as models
from coterie.randomness import stream
from coterie.runs.builder import assemble
from coterie.simulation import attacks
from coterie.yaml_file import read_yaml

BASE = {"algorithm": "fedavg", "data": "digits", "clients": 4, "model": "mlp:hidden=8", "rounds": 1, "threads": 1}
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63), 10**18, 10**30, 10**4000, 5e-324, 1e308, -1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
TEXTS = [
    "",
    " ",
    "x" * 100_000,
    "é\u202e\0",
    "nan",
    "1e9999",
    "-1",
    "auto",
    "import:",
    "import:os:system",
    "a:b=c,",
    ":",
    "=",
]
OTHERS: list[Any] = [
    None,
    True,
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    ["a", "a"],
    [None],
    [0],
    [-1],
    [float("nan")],
    [2**62] * 2,
]
WRITTEN = ["0", "-1", "1", "2147483648", "9223372036854775808", "1000000000000", "99999999", "1e308", "5e-324", "nan"]
WRITTEN += ["inf", "", " ", "é", "x" * 3000, "true", "none", "auto", "[]", "1+1", "1-1", "0.5"]


class _TooSlow(BaseException):
    """A value was worked on for longer than a mistake should take."""


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    """End what takes long, and let nothing take more than some gigabytes of address space beyond what there is."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    room, before = pages * resource.getpagesize() + 3 * 2**30, resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (room if pages else before[0], before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def takes_or_refuses(what: Callable[[], object], value: object) -> None:
    signal.alarm(60)  # on a machine that does other work as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            what()
    except CoterieError as error:
        assert "\n" not in str(error) and 10 < len(str(error)) < 3000, str(error)[:300]
    except (Exception, _TooSlow) as error:
        raise AssertionError(f"{value!r:.200}: {type(error).__name__} {str(error)[:200]}") from error
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("field", list(ExperimentConfig.model_fields))
def test_fields_of_a_run(field: str) -> None:
    for value in (*NUMBERS, *TEXTS, *OTHERS):
        takes_or_refuses(lambda value=value: assemble(from_mapping({**BASE, field: value})), value)  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        "a: 2026-13-45",
        "a: " + "1" * 5000,
        "a: " + "[" * 5000,
        "? [a]\n: b",
        "a: !!timestamp x",
        "a: !!int x",
        "a: !!binary é",
        "a: *x",
        "a: &x [*x]\n? *x\n: b",
        "a: !!python/object:os.system x",
        "\0",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_files_that_are_no_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"x.yaml' is not valid YAML: ") as told:
        read_yaml(tmp_path / "x.yaml")
    assert "\n" not in str(told.value)


def test_a_name_that_no_file_can_have() -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match="cannot be read: "):
            read_yaml(Path(name))


def written(kind: str) -> list[dict[str, Any]]:
    """Give configurations with an absurd value in each parameter of what is written after a colon."""
    if kind == "model":
        names = [(each.name, key) for each in models.describe() for key in each.options]
        return [{"model": f"{name}:{key}={value}"} for name, key in names for value in WRITTEN]
    if kind == "partition":
        known = [(each.name, each.model_fields) for each in scheme.Scheme.__subclasses__()]
        return [{"partition": f"{name}:{key}={value}"} for name, keys in known for key in keys for value in WRITTEN]
    if kind == "attack":
        keys = [(each.name, key) for each in attacks.describe() for key in each.options]
        more = [{"attack": f"{name}:0.5,{key}={value}"} for name, key in keys for value in WRITTEN]
        return [*more, *({"attack": f"{name}:{value}"} for name in attacks.names() for value in WRITTEN)]
    if kind == "privacy":
        return [{"privacy": f"clip=1,noise=1,{key}={value}"} for key in ("delta", "seed") for value in WRITTEN] + [
            {"privacy": f"clip={value},noise={other}"} for value in WRITTEN for other in ("1", value)
        ]
    fields = [(name, key) for name in algorithms.names() for key in algorithms.get(name).model_fields]
    return [{"algorithm": name, "settings": {key: value}} for name, key in fields for value in WRITTEN]


@pytest.mark.parametrize(
    ("kind", "most"), [("model", 20), ("partition", 40), ("attack", 20), ("privacy", 20), ("algorithm", 40)]
)
def test_parameters_after_a_colon(kind: str, most: int) -> None:
    """Some thousand of them are drawn and read; of those that can be, some are put together too."""
    good: list[tuple[dict[str, Any], ExperimentConfig]] = []
    all_of_them = written(kind)
    for number in stream(1, f"test: values of {kind}").permutation(len(all_of_them))[:1500]:
        given = all_of_them[number]
        takes_or_refuses(lambda given=given: good.append((given, from_mapping({**BASE, **given}))), given)  # type: ignore[misc]
    assert good
    for place in stream(1, f"test: extremes of {kind}").permutation(len(good))[:most]:
        given, config = good[place]
        takes_or_refuses(lambda config=config: assemble(config), given)  # type: ignore[misc]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")
    folder = tmp_path_factory.mktemp("extremes") / "p"
    project.init(folder, ["a", "b"])
    return folder / "nodes" / "a"


def opened(folder: Path, name: str, path: tuple[Any, ...], value: object) -> None:
    """Open a node with a value in one of its files, and say hello to it."""
    before = (folder / name).read_bytes()
    try:
        values = read_yaml(folder / name)
        place: Any = copy.deepcopy(values)
        whole = place
        for step in path[:-1]:
            place = place.setdefault(step, {"clip": 1.0, "noise": 1.0}) if isinstance(place, dict) else place[step]
        place[path[-1]] = value
        (folder / name).write_text(yaml.safe_dump(whole, allow_unicode=True), encoding="utf-8")
        found = project.open_node(folder)
        header = {"kind": HELLO, "run": "abc", "federation": found.agreement.digest, "algorithm": "fedavg"}
        reply = unpack(found.handle(pack({**header, "settings": {}, "round": 0, "token": "hello-1"}, {})), 2**30)
        assert "unexpected" not in str(reply.header.get("error")), reply.header["error"]
    finally:
        (folder / name).write_bytes(before)


AGREED: list[tuple[Any, ...]] = [(field,) for field in Agreement.model_fields]
AGREED += [("data", field) for field in Schema.model_fields] + [("members", 0, field) for field in Member.model_fields]
AGREED += [("privacy", field) for field in Promise.model_fields]


@pytest.mark.parametrize("path", AGREED, ids=lambda path: ".".join(map(str, path)))
def test_fields_of_a_federation(node: Path, path: tuple[Any, ...]) -> None:
    for value in (*NUMBERS[:8], *NUMBERS[9:], *TEXTS, *OTHERS, "mlp:hidden=99999999999", [2**40]):
        takes_or_refuses(lambda value=value: opened(node, agreement.FILE, path, value), value)  # type: ignore[misc]


@pytest.mark.parametrize("field", list(project.NodeConfig.model_fields))
def test_fields_of_a_node(node: Path, field: str) -> None:
    for value in (*NUMBERS[:8], *NUMBERS[9:], *TEXTS, *OTHERS, "..", "/"):
        takes_or_refuses(lambda value=value: opened(node, "node.yaml", (field,), value), value)  # type: ignore[misc]


def test_fields_of_a_server_and_of_a_plan(node: Path) -> None:
    agreed = agreement.read(node / agreement.FILE)
    for value in (*NUMBERS, *TEXTS, *OTHERS):
        for field in project.ServerConfig.model_fields:
            takes_or_refuses(
                lambda field=field, value=value: options.make(project.ServerConfig, {field: value}, "server.yaml"),  # type: ignore[misc]
                (field, value),
            )
        for field in Plan.model_fields:
            given = {"algorithm": "fedavg", field: value}
            takes_or_refuses(
                lambda given=given: options.make(Plan, given, "plan").experiment(agreed),  # type: ignore[misc]
                given,
            )
