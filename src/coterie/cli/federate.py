"""Commands of a federation between machines."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
import yaml

from coterie import signals
from coterie.algorithms import registry
from coterie.cli import agreeing, watching
from coterie.cli.console import err, out
from coterie.cli.shared_options import EXPERIMENT, Folder, Method, Track, with_fields
from coterie.errors import ConfigError, RunFolderError, UnknownName
from coterie.federation.plan import Plan, of_experiment

if TYPE_CHECKING:
    from coterie.federation.flower.control import Control
    from coterie.federation.monitor import RunMonitor

app = typer.Typer(help="Run a method between machines, over Flower.", no_args_is_help=True)
app.command()(agreeing.describe)
app.command()(agreeing.agree)
app.command()(watching.watch)

Project = Annotated[Path, typer.Argument(metavar="DIR", help="The project folder that `init` wrote.")]
NodeFolder = Annotated[Path, typer.Argument(metavar="NODE", help="The node's folder, DIR/nodes/NAME.")]
_PLAN = Plan.model_fields
_POLL = 0.5
_ASK_FLOWER, _LOST = 15.0, 60.0  # seconds between questions, and without an answer until the server is given up


def _plan_option(name: str) -> Any:
    words = str(_PLAN[name].description)
    return typer.Option(help=f"{words[0].upper()}{words[1:]}.")


def _say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("flwr is not installed: install Coterie with its extra, coterie[federation]")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    nodes: Annotated[int, typer.Option(min=1, help="How many members.")] = 3,
    host: Annotated[str, typer.Option(help="Name or address by which nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65534, help="Port for nodes; the next one is Flower's own.")] = 9092,
) -> None:
    """Write a project folder: configuration, certificates and keys for a try-out, and example data."""
    _need_flower()
    from coterie.federation import project

    members = [f"silo-{number}" for number in range(nodes)]
    project.init(folder, members, host, port)
    out.print(f"wrote {folder}; next, each in a terminal of its own:", highlight=False)
    out.print(f"  coterie federate server {folder}", highlight=False)
    for name in members:
        out.print(f"  coterie federate node {folder / 'nodes' / name}", highlight=False)
    out.print(f"  coterie federate run {folder} fedavg --rounds 3", highlight=False)


@app.command()
def server(folder: Project) -> None:
    """Run the server: Flower's SuperLink for this machine alone, and the gate that nodes reach."""
    _need_flower()
    from coterie.federation import agreement, project
    from coterie.federation.flower.gate_server import GateServer
    from coterie.federation.flower.superlink import superlink
    from coterie.runs.storage.atomic_files import remove_drafts
    from coterie.runs.storage.lock import lock_folder

    config, agreed = project.read_server(folder), agreement.read(folder / agreement.FILE)
    keys = {member.name: member.key for member in agreed.members if member.key is not None}
    own, place = (folder / "server").absolute(), (config.host, config.port)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock_folder(own))  # two would take each other's files for their own
        remove_drafts(own, own / "plans")
        link = stack.enter_context(superlink(own, config.superlink_port, keys, _say))
        limit = agreed.limit + 2**20  # what Flower adds to a message
        gate = GateServer(own, place, config.superlink_port, list(keys.values()), limit, _say)
        gate.run(
            ready=lambda: _say(f"ready: nodes reach the server at {config.host}:{config.port}"),
            is_over=lambda: link.failure is not None,
        )
        if link.failure is not None:
            raise link.failure


@app.command()
def node(folder: NodeFolder) -> None:
    """Run a node; one whose data or roster disagree with federation.yaml does not start."""
    _need_flower()
    from coterie.federation import project
    from coterie.federation.flower.node_runner import NodePlace, run_node
    from coterie.federation.node_state import tidy
    from coterie.federation.returned_memory import kept_while_training
    from coterie.runs.storage.lock import lock_folder

    folder = folder.absolute()
    opened, config = project.open_node(folder), project.read_node(folder)
    _say(f"{config.member} is client {opened.client} of {opened.agreement.name}")
    place = NodePlace(folder, config.server, folder / config.ca, folder / config.key)
    with contextlib.ExitStack() as stack:
        stack.callback(os.umask, os.umask(0o077))  # states, models and errors.log are nobody else's on this machine
        stack.callback(os.close, lock_folder(folder))  # two processes would write the same state
        tidy(folder)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        stack.enter_context(_terminated_as_interrupt())
        _say("running")
        opened.while_computing = kept_while_training
        run_node(place, opened.handle, _say)


@app.command()
def renew(
    folder: Project,
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long the new certificate is to hold.")] = 365,
    new_key: Annotated[bool, typer.Option("--new-key", help="Give the server a new private key too.")] = False,
    authority: Annotated[
        bool, typer.Option("--authority", help="Renew the authority's own certificate first; its key stays.")
    ] = False,
) -> None:
    """Renew the server's certificate with the federation's own authority; what it replaces stays beside it."""
    _need_flower()
    from coterie.federation.flower import renewal

    for line in renewal.renew(folder, days, new_key, authority):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
@with_fields("participation", "eval_every", "settings")
def run(
    folder: Project,
    what: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A method's name, or a .yaml file of an experiment, of which the method, its settings, rounds and "
            "participation are taken; options override it.",
        ),
    ],
    fields: dict[str, Any],
    rounds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            help="How many rounds are played.",
            show_default=f"{_PLAN['rounds'].default}, or what the file says",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    deadline: Annotated[float, _plan_option("deadline")] = _PLAN["deadline"].default,
    minimum: Annotated[int, _plan_option("minimum")] = _PLAN["minimum"].default,
    wait: Annotated[float, _plan_option("wait")] = _PLAN["wait"].default,
    max_update: Annotated[float, _plan_option("max_update")] = _PLAN["max_update"].default,
    max_samples: Annotated[int, _plan_option("max_samples")] = _PLAN["max_samples"].default,
    out_: Annotated[Folder, typer.Option("--out", help="Folder for the run; one that was stopped goes on.")] = None,
    track: Track = None,
) -> None:
    """Run a method over the nodes that are there; a run that was stopped goes on from its last round."""
    fields |= {} if rounds is None else {"rounds": rounds}
    if what.endswith((".yaml", ".yml")):
        fields = of_experiment(Path(what), fields)
    else:
        fields |= {"algorithm": what}
    algorithm = str(fields["algorithm"])
    _check_method(algorithm, folder)
    _need_flower()
    from coterie import options
    from coterie.federation import agreement
    from coterie.tracking import make_all

    values = {
        **fields,
        "deadline": deadline,
        "minimum": minimum,
        "wait": wait,
        "max_update": max_update,
        "max_samples": max_samples,
        "track": [_placed(each) for each in track or ()],
    }
    plan = options.make(Plan, values, "plan")
    plan.experiment(agreement.read(folder / agreement.FILE))
    path = (out_ or _new_run(folder, algorithm)).absolute()
    if (path / "summary.json").exists():
        raise RunFolderError(f"{path} is finished: choose another --out")
    make_all(plan.track, new=None if (path / "config.yaml").exists() else path)  # what is wrong is said here
    _submit(folder.absolute(), plan, path)
    out.print(f"run: {path}", markup=False, highlight=False)


@app.command()
def status(folder: Project) -> None:
    """Show whose nodes are there, and every run with its last round and latest events."""
    _need_flower()
    from rich.table import Table

    from coterie.federation import agreement
    from coterie.federation.flower.expiry import warnings_of
    from coterie.runs.storage import MetricsLog, events, read_config, read_summary
    from coterie.runs.storage.run_files import read_client_names

    files = (folder / "server" / name for name in ("server.crt", "ca.crt"))
    for warning in warnings_of({str(path): path for path in files if path.exists()}):
        out.print(warning, markup=False, highlight=False, soft_wrap=True)
    members, control = agreement.read(folder / agreement.FILE).members, _control(folder)
    try:
        found = control.statuses()
        table = Table("member", "status")
        for member in members:
            here = [word for key, word in found.items() if agreement.same_key(key, member.key or "")]
            table.add_row(member.name, here[0] if here else "not let in")
        out.print(table)
    except ConfigError:
        out.print("the server is not running")
    for path in sorted(each.parent for each in (folder / "runs").glob("*/config.yaml")):
        metrics = MetricsLog(path).read()
        done = int(metrics["round"].max()) if len(metrics) else 0
        word = "finished" if read_summary(path) else "not finished"
        config = read_config(path)
        out.print(
            f"{path}: {registry.title(config['algorithm'])}, round {done} of {config['rounds']}, {word}",
            highlight=False,
            soft_wrap=True,
        )
        names = read_client_names(path)
        for event in events.read(path)[-5:]:
            out.print(f"  {event.told(names)}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def models(folder: NodeFolder) -> None:
    """Show a node's own models with their metrics."""
    from rich.table import Column, Table

    from coterie.federation import project

    table = Table(Column("model", overflow="fold"), "method", "kind", "round", "test")
    spent: Any = {}
    for path, facts in project.read_models(folder):
        spent, measured = facts.get("privacy") or spent, facts["metrics"]
        assert isinstance(measured, dict)
        test = measured.get(facts["kind"], {}).get("test", {})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in test.items() if value is not None)
        method = registry.title(str(facts["algorithm"]))
        table.add_row(str(path), method, str(facts["kind"]), str(facts["round"]), shown)
    out.print(table)
    if spent:
        last, together = ("unbounded" if each is None else f"{each:.4g}" for each in spent.values())
        out.print(f"privacy loss ε of the last run: {last}; of all runs: {together}", highlight=False)


@app.command()
@with_fields("settings")
def wire(algorithm: Method, fields: dict[str, Any]) -> None:
    """Show what crosses the wire when a method runs, as observed by playing it."""
    registry.check(algorithm)
    from coterie.federation.schema_table import LETTERS, lines, markdown

    text = markdown(lines(algorithm, fields["settings"]))
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    out.print("\n" + "; ".join(f"{letter}: {words}" for letter, words in LETTERS.items()), soft_wrap=True)


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with signals.handled(stop, signal.SIGTERM):
        yield


def _check_method(name: str, folder: Path) -> None:
    """Refuse a method that is not known; only for one that is not the library's, federation.yaml is looked at."""
    try:
        registry.check(name)
    except UnknownName:
        if not (folder / "federation.yaml").exists():  # a mistake is said before anything slow is imported
            raise
        from coterie.federation import agreement

        agreement.read(folder / agreement.FILE).methods()  # of which some may be the members' own
        registry.check(name)


def _placed(track: str) -> str:
    """Make a tracker's folder absolute: it is the server that writes there."""
    name, colon, option = track.partition(":")
    here = name.strip() == "tensorboard" and option.strip()
    return f"{name}:{Path(option.strip()).expanduser().absolute()}" if colon and here else track


def _new_run(folder: Path, algorithm: str) -> Path:
    names = (folder / "runs" / f"{algorithm}-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def _submit(folder: Path, plan: Plan, path: Path) -> None:
    """Hand the plan to Flower, then print what happens until the run is over."""
    from coterie.federation.monitor import RunMonitor
    from coterie.runs.storage import read_summary
    from coterie.runs.storage.atomic_files import write_text

    watch = RunMonitor(path, plan.rounds)
    # One file for each submission: an error of a second one for the same run must not be taken for one of the first.
    plan_file = folder / "server" / "plans" / f"{path.name}-{secrets.token_hex(4)}.yaml"
    failed = plan_file.with_suffix(".error")
    write_text(plan_file, yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False))
    given = {"federation": str(folder / "federation.yaml"), "plan": str(plan_file), "out": str(path)}
    control = _control(folder)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(plan_file.unlink, missing_ok=True)
        run_id = control.submit(folder / "app", given)
        err.print(f"submitted as Flower's run {run_id}", highlight=False)
        _follow(control, run_id, watch, path, failed)
    if failed.exists():
        reason = failed.read_text(encoding="utf-8").strip()
        failed.unlink()
        raise ConfigError(f"the run failed: {reason}")
    if read_summary(path) is None:
        raise ConfigError(
            f"the run in {path} did not end: see {folder / 'server' / 'serverapp.log'}; it goes on with --out {path}"
        )


def _follow(control: Control, run_id: int, watch: RunMonitor, path: Path, failed: Path) -> None:
    """Print what happens until the run is over; Ctrl-C stops it."""
    try:
        for _ in _waiting(control, run_id, (path / "summary.json", failed)):
            for line in watch.new_lines():
                err.print(line, markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        control.stop(run_id)
        err.print(f"stopped; the run goes on with --out {path}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except ConfigError as error:
        raise ConfigError(f"{error}; start the server, then the run goes on with --out {path}") from error


def _control(folder: Path) -> Control:
    from coterie.federation import project
    from coterie.federation.flower.control import Control

    return Control(folder / "server", project.read_server(folder).superlink_port)


def _waiting(control: Control, run_id: int, ends: tuple[Path, ...]) -> Iterator[None]:
    """Pause again and again while the run goes on; a last time when it is over."""
    asked = heard = time.monotonic()
    while not any(path.exists() for path in ends):
        if time.monotonic() - asked > _ASK_FLOWER:
            asked = time.monotonic()
            try:
                if control.is_over(run_id):
                    break
                heard = time.monotonic()
            except ConfigError:  # a busy machine may take its time
                if asked - heard > _LOST:
                    raise
        yield
        time.sleep(_POLL)
    yield
