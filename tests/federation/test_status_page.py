"""How a federation is doing: read from its folder, shown on a page, and told to Prometheus."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from coterie.errors import ConfigError
from coterie.federation import agreement, prometheus
from coterie.federation.agreement import Member
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.status import FederationStatus, LastSeen, MemberStatus, RunStatus, StatusReader
from coterie.federation.status_server import StatusServer
from coterie.results import Result
from coterie.runs.storage import RunFolder
from tests.federation.grid import Local, make_agreement, make_federation
from tests.results.report.conftest import browser  # noqa: F401  (a fixture)

KEYS = ["ecdsa-a AAAA", "ecdsa-b BBBB", "ecdsa-c CCCC"]
ROUNDS = 2
EVIL = '</script><img src=x onerror="document.title=1">'


def project(folder: Path) -> Local:
    members = tuple(Member(name=f"silo-{place}", key=key) for place, key in enumerate(KEYS))
    local = make_federation(folder, members=members)
    local.grid.keys = {100 - place: key for place, key in enumerate(KEYS)}
    (folder / "federation.yaml").write_text(yaml.safe_dump(local.agreement.model_dump(mode="json")))
    return local


def nodes() -> dict[str, LastSeen]:
    return {KEYS[0] + " comment": LastSeen("online", 1_700_000_000.5), KEYS[1]: LastSeen("offline", 1_600_000_000.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that is finished, in which a member sent garbage; nothing more happens in it."""
    home = tmp_path_factory.mktemp("project")
    local = project(home)
    # To the hello, which has no round yet, it answers well.
    local.grid.faults = {98: lambda message, reply: b"garbage" if local.grid.exchanges > 1 else reply}
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=ROUNDS), home / "runs" / "fedavg-1")
    return home


def test_what_is_read_is_what_the_run_recorded(folder: Path) -> None:
    found = StatusReader(folder, nodes).read()
    assert (found.name, found.server_answers) == ("test", True)
    assert found.members == (
        MemberStatus("silo-0", "online", 1_700_000_000.5),
        MemberStatus("silo-1", "offline", 1_600_000_000.0),
        MemberStatus("silo-2", "not let in", None),
    )
    (run,) = found.runs
    metrics = Result(folder / "runs" / "fedavg-1").metrics
    wire = metrics[metrics["model"] == "federation"]
    assert (run.name, run.algorithm, run.rounds, run.planned, run.finished) == ("fedavg-1", "fedavg", 2, 2, True)
    assert run.bytes_down == int(wire[wire["metric"] == "wire_down"]["value"].sum()) > 0
    assert run.bytes_up == int(wire[wire["metric"] == "wire_up"]["value"].sum()) > 0
    assert run.replies == 2 and run.seconds is not None and run.seconds > 0
    test = metrics.query("split == 'test' and model == 'global' and metric == 'accuracy' and round == 2")["value"]
    assert run.scores["global accuracy"] == pytest.approx(test.mean(), rel=1e-12)
    assert run.event_counts["garbage"] >= ROUNDS and any("silo-2 garbage" in line for line in run.events)


def test_scores_that_are_no_numbers_are_not_shown(tmp_path: Path) -> None:
    """JSON has no word for them: a browser would read nothing of the page any more."""
    folder = tmp_path / "runs" / "fedavg-1"
    (tmp_path / agreement.FILE).write_text(yaml.safe_dump(make_agreement().model_dump(mode="json")))
    with RunFolder.create(folder, make_agreement().experiment("fedavg", {}).plain()) as made:
        for metric, value in (("accuracy", math.nan), ("loss", math.inf), ("macro_f1", 0.5)):
            made.metrics.append(1, "global", "test", metric, [value], [0])
        made.flush()
    found = StatusReader(tmp_path, nodes).read()
    assert found.runs[0].scores == {"global macro_f1": 0.5}
    json.dumps(asdict(found), allow_nan=False)


def test_a_file_that_goes_away_meanwhile_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StatusReader(folder, nodes)
    first = reader.read()
    (folder / "runs" / "fedavg-1" / "metrics.gone").symlink_to("nowhere")  # as a draft between glob and stat
    try:
        assert reader.read() == first
        assert StatusReader(folder, nodes).read().runs == ()
    finally:
        (folder / "runs" / "fedavg-1" / "metrics.gone").unlink()


def test_a_server_that_does_not_answer_hides_nothing_else(folder: Path) -> None:
    def away() -> dict[str, LastSeen]:
        raise ConfigError("it does not answer")

    found = StatusReader(folder, away).read()
    assert not found.server_answers and {each.status for each in found.members} == {"unknown"}
    assert len(found.runs) == 1


def test_files_that_did_not_change_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StatusReader(folder, nodes)
    first = reader.read()
    monkeypatch.setattr("coterie.federation.status._read_run", lambda *given: pytest.fail("it was read again"))
    assert reader.read() == first
    monkeypatch.undo()
    with (folder / "runs" / "fedavg-1" / "events.jsonl").open("a") as file:
        file.write('{"round": 2, "what": "returned", "client": 0, "reason": ""}\n')
    assert reader.read().runs[0].events[0] == "round 2: silo-0 returned"


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read the format by its grammar: help and type before the samples of a name, which stand together."""
    out: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    known, current = set(), ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in known
            known.add(current)
        elif line.startswith("# TYPE "):
            assert re.fullmatch(rf"# TYPE {current} (gauge|counter)", line)
        else:
            found = re.fullmatch(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)', line)
            assert found and found[1] == current, line
            labels = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', found[2] or "")
            key = (found[1], tuple(sorted(labels)))
            assert key not in out
            out[key] = float(found[3])
    return out


def test_prometheus_reads_what_is_there(folder: Path) -> None:
    status = StatusReader(folder, nodes).read()
    found = parsed(prometheus.text_of(status))
    run = (("algorithm", "fedavg"), ("run", "fedavg-1"))
    assert found["coterie_server_up", (("federation", "test"),)] == 1
    assert found["coterie_member_online", (("member", "silo-0"),)] == 1
    assert found["coterie_member_online", (("member", "silo-1"),)] == 0
    assert found["coterie_member_last_seen_timestamp_seconds", (("member", "silo-0"),)] == 1_700_000_000.5
    assert ("coterie_member_last_seen_timestamp_seconds", (("member", "silo-2"),)) not in found
    assert found["coterie_run_rounds", run] == found["coterie_run_rounds_planned", run] == ROUNDS
    assert found["coterie_run_bytes_total", (run[0], ("direction", "up"), run[1])] == status.runs[0].bytes_up
    assert found["coterie_run_events_total", (*run, ("what", "garbage"))] >= ROUNDS


def test_names_are_written_so_that_they_can_be_read_back() -> None:
    strange = RunStatus('a"b\\c\nd', "fedavg", "FedAvg", 1, 2, False, epsilon=float("inf"))
    text = prometheus.text_of(FederationStatus("x", True, (), (strange,)))
    assert 'run="a\\"b\\\\c\\nd"' in text and parsed(text)
    assert "coterie_run_epsilon" in text and "+Inf" in text


@pytest.fixture
def page(folder: Path) -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1", 0, StatusReader(folder, nodes).read)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: StatusServer, method: str, path: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_what_the_server_answers(page: StatusServer) -> None:
    status, headers, body = ask(page, "GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4") and parsed(body.decode())
    status, headers, body = ask(page, "GET", "/status.json")
    assert status == 200 and json.loads(body)["name"] == "test"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(page, "HEAD", "/")[0] == 200 and ask(page, "HEAD", "/")[2] == b""
    assert ask(page, "GET", "/../federation.yaml")[0] == ask(page, "GET", "/runs/fedavg-1/config.yaml")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(page: StatusServer, method: str) -> None:
    assert ask(page, method, "/status.json")[0] == 501


def test_a_name_that_points_here_is_no_way_in(page: StatusServer) -> None:
    """DNS rebinding: a browser sends the name of the page that it was lured to."""
    assert ask(page, "GET", "/status.json", "evil.example:80")[0] == 403
    for good in ("localhost:9095", "127.0.0.1", "[::1]:9095"):
        assert ask(page, "GET", "/status.json", good)[0] == 200


def test_the_page_follows_the_run(tmp_path: Path, browser: Chrome) -> None:  # noqa: F811
    local = project(tmp_path)
    server = StatusServer("127.0.0.1", 0, StatusReader(tmp_path, nodes).read)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def shown(script: str) -> str:
        return str(browser.execute_script(f"return {script}"))

    def wait(script: str) -> None:
        WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda _: browser.execute_script(f"return {script}"))

    try:
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(f"http://127.0.0.1:{server.server_address[1]}/")
        wait("document.documentElement.dataset.ready === 'true'")
        assert shown("document.getElementById('no-runs').hidden") == "False"
        assert shown("document.querySelector('#members tr td:nth-child(2)').textContent") == "online"
        serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1), tmp_path / "runs" / "first")
        with (tmp_path / "runs" / "first" / "events.jsonl").open("a") as file:
            file.write(json.dumps({"round": 1, "what": "error", "client": 1, "reason": EVIL}) + "\n")
        wait("document.querySelector('#run-first .facts')?.textContent.includes('finished')")  # nobody reloaded it
        wait("document.querySelector('#run-first .events li')?.textContent.includes('onerror')")
        assert "round 1 of 1" in shown("document.querySelector('#run-first .facts').textContent")
        assert shown("document.images.length") == "0" and shown("document.title") == "test · federation"
        server.shutdown()
        server.server_close()
        wait("document.getElementById('server').textContent.startsWith('no news')")
        # Nothing is refused by the page's own policy; that the server is gone may be said.
        told = [each["message"] for each in browser.get_log("browser") if "status.json" not in each["message"]]
        assert [line for line in told if "favicon" not in line] == []
    finally:
        server.shutdown()
        thread.join(timeout=10)
        time.sleep(0)
