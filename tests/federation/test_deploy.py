"""What runs a federation: the image, the compose file, systemd's units, the proxy; each checked by its own program."""

from __future__ import annotations

import contextlib
import http.client
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.federation.flower import certificates, processes
from tests.debian import find_programs

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SILOS = ("silo-0", "silo-1", "silo-2")


def test_the_image_is_built_of_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    extras = re.search(r"'\.\[(.*?)\]'", text)
    assert extras is not None
    known = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", known, re.M) for extra in extras[1].split(","))
    assert "USER coterie" in text and text.index("USER coterie") < text.index("ENTRYPOINT")


def test_the_compose_file_gives_each_silo_its_own_folder_alone() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"setup", "server", "page", *SILOS}
    for name in SILOS:
        (volume,) = services[name]["volumes"]
        assert volume.endswith(f"/demo/nodes/{name}:/node") and "ports" not in services[name]
    # Compose takes a path from where its file lies, and the commands before it are for the folder above.
    made = re.search(r"mkdir -p (\S+)$", (DEPLOY / "compose.yaml").read_text(), re.M)
    mounted = re.match(r"\$\{PROJECT:-(.*?)\}:/project$", services["setup"]["volumes"][0])
    assert made and mounted and (DEPLOY / mounted[1]).resolve() == ROOT / made[1]
    assert services["server"]["ports"] == ["127.0.0.1:9095:9095"]  # nothing is open to other machines
    for service in services.values():
        assert service["cap_drop"] == ["ALL"] and service["user"].startswith("${UID")


def test_docker_understands_the_compose_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], check=False, capture_output=True).returncode:
        pytest.skip("there is no docker compose; its commands are run as processes")
    done = subprocess.run(
        [docker, "compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    for unit in (DEPLOY / "systemd").iterdir():
        text = unit.read_text()
        command = re.search(r"^ExecStart=(\S+/coterie) (.*)$", text, re.M)
        assert command is not None
        assert shlex.split(command[2])[:2] in (["federate", "server"], ["federate", "node"], ["federate", "watch"])
        # The program need not be installed here, nor its user be there.
        text = text.replace(command[1], sys.executable).replace("User=coterie\n", "")
        (tmp_path / unit.name.replace("@", "@north")).write_text(text.replace("%i", "north"))
    for made in tmp_path.iterdir():
        done = subprocess.run([analyze, "verify", "--man=no", str(made)], check=False, capture_output=True, text=True)
        told = [line for line in done.stderr.splitlines() if str(tmp_path) in line or made.name in line]
        assert done.returncode == 0 and not told, done.stderr


class Behind(BaseHTTPRequestHandler):
    """Stands for the gate: says which path reached it, and how many bytes."""

    def do_POST(self) -> None:
        count = len(self.rfile.read(int(self.headers.get("content-length", 0))))
        body = f"{self.path} {count} {self.headers.get('flwr-signature')}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *more: object) -> None:
        pass


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[int, ssl.SSLContext]]:
    """Run the example's nginx, with other files and ports, before something that stands for the gate."""
    (nginx,) = find_programs({"nginx": "nginx-light"}, "these tests run the example of a proxy in nginx")
    certificates.make_authority(tmp_path)
    certificates.make_server_certificate(tmp_path, tmp_path, ["fed.example.org", "127.0.0.1"])
    inner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inner.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Behind) as gate:
        gate.socket = inner.wrap_socket(gate.socket, server_side=True)
        threading.Thread(target=gate.serve_forever, daemon=True).start()
        port = processes.free_port()
        text = (DEPLOY / "nginx.conf").read_text()
        for before, after in {
            "listen 9092 ssl": f"listen 127.0.0.1:{port} ssl",
            "https://127.0.0.1:9192": f"https://127.0.0.1:{gate.server_port}",
            "/etc/coterie/public.crt": str(tmp_path / "server.crt"),
            "/etc/coterie/public.key": str(tmp_path / "server.key"),
            "/etc/coterie/gate-ca.crt": str(tmp_path / "ca.crt"),
            "client_max_body_size 513m": "client_max_body_size 1m",
            "http {": "http { access_log off; "
            + " ".join(
                f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            ),
        }.items():
            assert before in text
            text = text.replace(before, after)
        (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid; error_log {tmp_path}/error.log;\n{text}")
        command = [nginx, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(tmp_path / "nginx.conf")]
        process = subprocess.Popen([*command, "-g", "daemon off;"])
        try:
            until = time.monotonic() + 30
            while True:
                assert process.poll() is None and time.monotonic() < until, (tmp_path / "error.log").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)
            yield port, ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        finally:
            process.terminate()
            process.wait(timeout=30)
            gate.shutdown()


def test_nginx_passes_on_the_calls_of_nodes_and_nothing_else(proxy: tuple[int, ssl.SSLContext]) -> None:
    port, context = proxy

    def ask(path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
        try:
            connection.request("POST", path, body=body, headers={"flwr-signature": "signed"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    assert ask("/v1/fleet/pull-messages", b"x" * 1000) == (200, b"/v1/fleet/pull-messages 1000 signed")
    assert ask("/v1/control/start-run")[0] == ask("/")[0] == 403
    assert ask("/v1/fleet/../control/start-run")[0] == 403
    assert ask("/v1/fleet/push-object", b"x" * (2**20 + 1))[0] == 413


# --- as processes -------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_commands_of_the_compose_file_run_a_federation(tmp_path: Path) -> None:
    """Word by word, but for where the containers' folders and the server's name are on this machine."""
    from tests.federation.running import Federation, free_pair, wait_until

    began = time.monotonic()
    federation, port, page = Federation(tmp_path / "project" / "demo"), free_pair(), processes.free_port()
    services = COMPOSE["services"]

    def here(words: list[str], silo: str = "") -> list[str]:
        named = {"/node": str(federation.folder / "nodes" / silo), "0.0.0.0": "127.0.0.1", "9095": str(page)}
        return [named.get(word, word.replace("/project/", f"{tmp_path}/project/")) for word in words]

    (script,) = services["setup"]["command"]
    guard, _, init = script.partition(" || coterie ")
    assert guard == "test -e /project/demo/federation.yaml"
    federation.folder.parent.mkdir()
    words = here(shlex.split(init.replace("--host server", f"--host 127.0.0.1 --port {port}")))
    federation.start("setup", *words)
    federation.end("setup")
    try:
        process = federation.start("server", *here(services["server"]["command"]))
        wait_until(lambda: "ready" in federation.said("server"), "the server is ready", process)
        federation.start("page", *here(services["page"]["command"]))
        for silo in SILOS:
            federation.start(silo, *here(services[silo]["command"], silo))
        federation.wait_for_nodes(3)
        run = re.search(r"exec server coterie (federate run .*)$", (DEPLOY / "compose.yaml").read_text(), re.M)
        assert run is not None
        federation.start("run", *here(shlex.split(run[1])), "--minimum", "3", "--wait", "600")
        federation.end("run")
        seconds = time.monotonic() - began
        connection = http.client.HTTPConnection("127.0.0.1", page, timeout=60)
        connection.request("GET", "/metrics")
        told = connection.getresponse().read().decode()
        connection.close()
        assert 'coterie_run_finished{run="fedacs-1",algorithm="fedacs"} 1' in told
        assert all(f'coterie_member_online{{member="{silo}"}} 1' in told for silo in SILOS)
        assert re.search(r'coterie_member_last_seen_timestamp_seconds\{member="silo-0"\} \d', told)
        print(f"a server, three silos and three rounds in {seconds:.0f} s")
    finally:
        federation.close()
