"""What Coterie relies on in Flower beyond Flower's public face, name by name: run this first with a new Flower.

Each failure names the part that changed. ``coterie.federation.flower._internals``, or one of the modules beside it that
are named alike, is where to mend it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

import flwr
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.federation.flower import processes

SOURCES = sorted(Path(processes.__file__).parent.glob("_*internals.py"))
FLOWER = Path(flwr.__file__).parent
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")

Check = Callable[[Any, str], None]


def parameters(*names: str, keywords: tuple[str, ...] = ()) -> Check:
    """Check that a function can be called with so many arguments by position, of these names, and with keywords."""

    def check(found: Any, name: str) -> None:
        known = inspect.signature(found).parameters
        assert tuple(known)[: len(names)] == names, f"{name} takes {tuple(known)}, but is called with {names}"
        for keyword in keywords:
            assert keyword in known, f"{name} takes {tuple(known)}, but is called with {keyword}="
        needed = {each for each, value in known.items() if value.default is value.empty} - {*names, *keywords}
        assert not needed, f"{name} now needs {sorted(needed)} too"

    return check


def fields(*paths: str) -> Check:
    """Check that a protobuf message has fields, nested ones with dots; of a map, those of its values."""

    def check(found: Any, name: str) -> None:
        for path in paths:
            descriptor = found.DESCRIPTOR
            for part in path.split("."):
                there = [] if descriptor is None else list(descriptor.fields_by_name)
                assert part in there, f"{name} has no field {path!r}: at {part!r} there are {there}"
                descriptor = descriptor.fields_by_name[part].message_type
                if descriptor is not None and descriptor.GetOptions().map_entry:
                    descriptor = descriptor.fields_by_name["value"].message_type

    return check


def constants(**values: object) -> Check:
    """Check the values of a class of constants."""

    def check(found: Any, name: str) -> None:
        for constant, value in values.items():
            there = getattr(found, constant, None)
            assert there == value, f"{name}.{constant} is {there!r}, but Coterie expects {value!r}"

    return check


def client(**responses: Check) -> Check:
    """Check an HTTP client: how it is made, that it closes, its calls, and the fields of what they give."""

    def check(found: Any, name: str) -> None:
        parameters("server_address", "insecure", "root_certificates", "interceptors")(
            found.from_server_address, f"{name}.from_server_address"
        )
        assert callable(getattr(found, "close", None)), f"{name} has no close()"
        for call, response in responses.items():
            assert hasattr(found, call), f"{name} has no call {call}"
            parameters("self", "request")(getattr(found, call), f"{name}.{call}")
            given = inspect.signature(getattr(found, call), eval_str=True).return_annotation
            response(given, f"the answer of {name}.{call}")

    return check


def range_of(least: float, most: float) -> Check:
    def check(found: Any, name: str) -> None:
        assert least <= found <= most, f"{name} is {found}, but Coterie expects {least} to {most}"

    return check


def a_header(found: Any, name: str) -> None:
    assert found == found.lower(), f"{name} is {found!r}, but the gate is given names in lower case"


def said(found: Any, name: str) -> None:
    """Check that an error of Flower's can be read from what a call was answered with."""
    assert found.from_json("no") is None, f"{name} reads anything"
    code = find("flwr.supercore.error.ApiErrorCode").FLEET_NODE_ACTIVATION_FAILED
    text = json.dumps(found(code, "inside").to_json("Failed to activate."))
    assert found.from_json(text).message == "Failed to activate.", f"{name} does not read {text}"
    assert found.from_json(text).public_details is None, f"{name} has details of {text}"


def names_in(*names: str) -> Check:
    """Check that a function finds names in its module, in whose place others are put."""

    def check(found: Any, name: str) -> None:
        for each in names:
            assert each in found.__globals__, f"the module of {name} has no {each}"
            assert re.search(rf"\b{each}\b", inspect.getsource(inspect.getmodule(found))), f"{name} uses no {each}"

    return check


def a_layer(found: Any, name: str) -> None:
    """Check that something is one of the layers around a SuperLink's calls, each of which stands there once."""
    layers = [layer.cls for layer in find("flwr.superlink.main.create_app").__globals__["_get_middleware"]()]
    assert layers.count(found) == 1, f"{name} is not one of a SuperLink's layers, which are {layers}"


def anything(found: Any, name: str) -> None:
    """Names that are only for types."""


def defaults(*names: str) -> Check:
    """Check that a function has these parameters by keyword alone, with defaults."""

    def check(found: Any, name: str) -> None:
        known = found.__kwdefaults__ or {}
        assert {*names} <= known.keys(), f"{name} has defaults for {sorted(known)}, but Coterie sets those of {names}"

    return check


NOTHING = fields()
CONTRACT: dict[str, Check] = {
    "flwr.app.message.make_message": parameters("metadata", "content"),
    "flwr.app.message.remove_content_from_message": parameters("message"),
    "flwr.cli.build.build_fab_from_disk": parameters("app"),
    "flwr.common.constant.ErrorCode": constants(
        CLIENT_APP_RAISED_EXCEPTION=2, MESSAGE_UNAVAILABLE=3, REPLY_MESSAGE_UNAVAILABLE=4, NODE_UNAVAILABLE=5
    ),
    "flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL": range_of(20, 60),
    "flwr.common.constant.HEARTBEAT_PATIENCE": range_of(1, 10),
    "flwr.common.constant.SYSTEM_TIME_TOLERANCE": range_of(1, 60),
    "flwr.common.constant.Status": constants(FINISHED="finished"),
    "flwr.common.constant.SubStatus": constants(COMPLETED="completed", FAILED="failed"),
    "flwr.common.constant.TIMESTAMP_HEADER": a_header,
    "flwr.common.constant.TIMESTAMP_TOLERANCE": range_of(30, 3600),
    "flwr.common.serde.fab_to_proto": parameters("fab"),
    "flwr.common.serde.message_to_proto": parameters("message"),
    "flwr.common.serde.user_config_to_proto": parameters("user_config"),
    "flwr.common.serde_utils.metadata_from_proto": parameters("metadata_proto"),
    "flwr.proto.control_pb2.ListNodesRequest": NOTHING,
    "flwr.proto.control_pb2.ListRunsRequest": fields("run_id", "limit"),
    "flwr.proto.control_pb2.RegisterNodeRequest": fields("public_key", "name"),
    "flwr.proto.control_pb2.StartRunRequest": fields("fab.hash_str", "fab.content", "override_config"),
    "flwr.proto.control_pb2.StopRunRequest": fields("run_id"),
    "flwr.proto.control_pb2.UnregisterNodeRequest": fields("node_id"),
    "flwr.proto.fleet_pb2.ActivateNodeRequest": fields("public_key", "heartbeat_interval"),
    "flwr.proto.fleet_pb2.DeactivateNodeRequest": fields("node_id"),
    "flwr.proto.fleet_pb2.PullMessagesRequest": fields("node.node_id"),
    "flwr.proto.fleet_pb2.PushMessagesRequest": fields("node.node_id", "messages_list", "message_object_trees"),
    "flwr.proto.heartbeat_pb2.SendNodeHeartbeatRequest": fields("node.node_id", "heartbeat_interval"),
    "flwr.proto.message_pb2.ConfirmMessageReceivedRequest": fields("node.node_id", "run_id", "message_object_id"),
    "flwr.proto.message_pb2.ObjectTree": fields("object_id", "children"),
    "flwr.proto.message_pb2.PullObjectRequest": fields("node.node_id", "run_id", "object_id"),
    "flwr.proto.message_pb2.PushObjectRequest": fields(
        "node.node_id", "run_id", "session_id", "object_id", "object_content"
    ),
    "flwr.proto.node_pb2.Node": fields("node_id"),
    "flwr.proto.node_pb2.NodeInfo": fields("status", "online_until", "heartbeat_interval"),
    "flwr.proto.runtime_pb2.AcquireTaskRequest": fields("supported_task_types"),
    "flwr.proto.runtime_pb2.PushTaskOutputRequest": fields("sub_status", "details"),
    "flwr.proto.runtime_pb2.SendTaskHeartbeatRequest": NOTHING,
    "flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER": a_header,
    "flwr.supercore.constant.FLEET_HTTP_SIGNATURE_HEADER": a_header,
    "flwr.supercore.constant.NodeStatus": constants(
        UNREGISTERED="unregistered", REGISTERED="registered", ONLINE="online"
    ),
    "flwr.supercore.constant.TaskType": constants(CLIENT_APP="flwr-clientapp", SERVER_APP="flwr-serverapp"),
    "flwr.supercore.control.ControlHttpClient": client(
        ListNodes=fields("nodes_info.node_id", "nodes_info.public_key", "nodes_info.status"),
        ListRuns=fields("run_dict.status.status"),
        RegisterNode=NOTHING,
        StartRun=fields("run_id"),
        StopRun=NOTHING,
        UnregisterNode=NOTHING,
    ),
    "flwr.supercore.error.FlowerError": said,
    "flwr.supercore.fab.Fab": parameters("hash_str", "content", "verifications"),
    "flwr.supercore.inflatable.inflatable_object.get_all_nested_objects": parameters("obj"),
    "flwr.supercore.inflatable.inflatable_object.get_object_tree": parameters("obj"),
    "flwr.supercore.inflatable.inflatable_object.iterate_object_tree": parameters("tree"),
    "flwr.supercore.inflatable.inflatable_object.no_object_id_recompute": parameters(),
    "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents": parameters(
        "object_id", "object_contents"
    ),
    "flwr.supercore.inflatable.inflatable_utils.pull_objects": defaults(
        "initial_backoff", "backoff_cap", "max_time", "max_tries_per_object"
    ),
    "flwr.supercore.interceptors.RuntimeTokenHttpInterceptor": parameters("token"),
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor": parameters("component_name"),
    "flwr.supercore.interceptors.SuperExecAuthHttpInterceptor": parameters(
        keywords=("master_secret", "protected_methods")
    ),
    "flwr.supercore.primitives.asymmetric.bytes_to_public_key": parameters("public_key_bytes"),
    "flwr.supercore.primitives.asymmetric.public_key_to_bytes": parameters("public_key"),
    "flwr.supercore.primitives.asymmetric.sign_message": parameters("private_key", "message"),
    "flwr.supercore.primitives.asymmetric.uses_nist_ec_curve": parameters("public_key"),
    "flwr.supercore.primitives.asymmetric.verify_signature": parameters("public_key", "message", "signature"),
    "flwr.supercore.protobuf.client.ProtobufCall": anything,
    "flwr.supercore.protobuf.client.ProtobufRequestContext": parameters("rpc_method", "message", "request"),
    "flwr.supercore.runtime.RuntimeHttpClient": client(
        AcquireTask=fields("token", "task.run_id"), PushTaskOutput=NOTHING, SendTaskHeartbeat=NOTHING
    ),
    "flwr.superlink.cli.flower_superlink": names_in("uvicorn"),
    "flwr.superlink.main.create_app": names_in("_get_middleware"),
    "flwr.superlink.routers.control.middlewares.ControlAuthenticationMiddleware": a_layer,
    "flwr.superlink.routers.control.middlewares.ControlLicenseMiddleware": a_layer,
    "flwr.superlink.routers.control.middlewares.ControlSensitiveResponseMiddleware": a_layer,
    "flwr.superlink.routers.fleet.node_auth.NodeAuthMiddleware": a_layer,
    "flwr.superlink.routers.fleet.node_auth.authenticate_node": names_in("bytes_to_public_key", "verify_signature"),
    "flwr.supernode.fleet_http_client.FleetHttpClient": client(
        ActivateNode=fields("node_id"),
        ConfirmMessageReceived=NOTHING,
        DeactivateNode=NOTHING,
        PullMessages=fields("messages_list.metadata.message_id", "message_object_trees.object_id"),
        PullObject=fields("object_found", "object_available", "object_content"),
        PushMessages=fields("objects_to_push", "session_id"),
        PushObject=fields("stored"),
        SendNodeHeartbeat=fields("success"),
    ),
}
"""For each private name what Coterie relies on."""


def used() -> list[str]:
    """List the private names that are imported, without importing anything."""
    trees = [ast.parse(source.read_text()) for source in SOURCES]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module not in PUBLIC}
    return sorted(name for name in found if name.startswith("flwr."))


def find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if hasattr(found, attribute) else importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"Flower {flwr.__version__} has no {name}, which Coterie imports ({error})")


def test_every_private_name_has_a_contract() -> None:
    assert used() == sorted(CONTRACT), f"differ: {sorted({*used()} ^ CONTRACT.keys())}"


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_a_private_name_is_what_coterie_relies_on(name: str) -> None:
    CONTRACT[name](find(name), name)


SUB_STATUS, RUNTIME = "flwr.common.constant.SubStatus", "flwr.supercore.runtime.RuntimeHttpClient"


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (parameters("a", "c"), lambda a, b: None),
        (parameters("a"), lambda a, b: None),
        (parameters("a", keywords=("c",)), lambda a, b=1: None),
        (constants(FAILED="no"), SUB_STATUS),
        (constants(LOST="lost"), SUB_STATUS),
        (fields("node"), "flwr.proto.node_pb2.Node"),
        (fields("fab.name"), "flwr.proto.control_pb2.StartRunRequest"),
        (client(Fly=NOTHING), RUNTIME),
        (client(AcquireTask=fields("key")), RUNTIME),
        (range_of(20, 30), 10),
        (defaults("speed"), "flwr.supercore.inflatable.inflatable_utils.pull_objects"),
        (names_in("speed"), "flwr.superlink.main.create_app"),
        (a_layer, int),
    ],
)
def test_the_checks_themselves_can_fail_and_name_the_part(check: Check, found: Any) -> None:
    with pytest.raises(AssertionError, match=r"the part"):
        check(find(found) if isinstance(found, str) else found, "the part")


def test_a_name_that_flower_no_longer_has_is_said_to_be_missing() -> None:
    for name in ("flwr.nowhere.Thing", "flwr.common.constant.Thing"):
        with pytest.raises(pytest.fail.Exception, match=rf"has no {name}, which Coterie imports"):
            find(name)


def test_nodes_that_a_grid_lists_say_when_they_were_activated() -> None:
    fields("node_id", "public_key", "last_activated_at")(
        find("flwr.proto.node_pb2.NodeInfo"), "what Grid.get_nodes gives"
    )


def test_a_superlink_stores_keys_in_the_form_that_is_expected() -> None:
    from coterie.federation.flower._internals import is_usable_key, stored_key
    from coterie.federation.flower.certificates import to_openssh

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    assert to_openssh(stored_key(key)) == key.public_bytes(*form).decode()
    assert is_usable_key(key)
    assert not is_usable_key(ec.generate_private_key(ec.SECP256K1()).public_key())


def paths_of(found: Any) -> dict[str, str]:
    """Give the HTTP path of each call of a client."""
    made, paths = found("http://nowhere"), {}
    for name, _ in inspect.getmembers(found, inspect.isfunction):
        if name[0].isupper():
            made._unary_unary = made._unary_stream = lambda *, name=name, path, **more: paths.update({name: path})
            getattr(made, name)(None)
    made.close()
    assert paths, f"no call of {found.__name__} goes through _unary_unary"
    return paths


def test_the_gate_lets_through_the_calls_of_nodes_and_no_others() -> None:
    from coterie.federation.flower import _internals, key_claims
    from coterie.federation.flower.gate import _NODES

    for name, path in paths_of(find("flwr.supernode.fleet_http_client.FleetHttpClient")).items():
        assert path != key_claims.PATH, f"FleetHttpClient.{name} calls {path}, where the gate takes claims"
        assert _NODES.fullmatch(path), f"FleetHttpClient.{name} calls {path}, which the gate does not let through"
    known = paths_of(find("flwr.supernode.fleet_http_client.FleetHttpClient"))
    assert (known["PullMessages"], known["SendNodeHeartbeat"]) == (_internals.PULL_PATH, _internals.HEARTBEAT_PATH)
    for other in ("flwr.supercore.control.ControlHttpClient", "flwr.supercore.runtime.RuntimeHttpClient"):
        for name, path in paths_of(find(other)).items():
            assert not _NODES.fullmatch(path), f"{other}.{name} calls {path}, which the gate lets through"


def test_the_process_of_a_run_makes_no_call_that_the_superlinks_door_is_closed_to() -> None:
    """Of its calls those are open that its program and its grid make; each wants a token, or the secret."""
    from coterie.federation.flower._internals import RUN_PATHS

    known = paths_of(find("flwr.supercore.runtime.RuntimeHttpClient"))
    sources = [FLOWER / "superlink/grid/http_grid.py", FLOWER / "superlink/runtime/run_serverapp.py"]
    sources += [FLOWER / "supercore/task_process/__init__.py", *(FLOWER / "supercore/task_process").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in {*sources} if path.exists())
    called = {path for name, path in known.items() if re.search(rf"\b\w*client\.{name}\b", text)}
    assert {known["PushMessages"], known["PullMessages"], known["GetNodes"]} <= called
    assert called <= RUN_PATHS, f"closed to the process of a run: {sorted(called - RUN_PATHS)}"
    assert {*known.values()} >= RUN_PATHS, f"no call of Flower's: {sorted(RUN_PATHS - {*known.values()})}"


def test_a_client_keeps_its_connections() -> None:
    from coterie.federation.flower import _internals

    _internals.keep_connections(37.0)
    try:
        first = find("flwr.supercore.runtime.RuntimeHttpClient")("http://nowhere")
        try:
            assert first._client._transport._pool._keepalive_expiry == 37.0
        finally:
            first.close()
    finally:
        _internals.keep_connections(5.0)  # which is httpx's own


def test_flowers_programs_say_why_they_end_themselves(tmp_path: Path) -> None:
    from coterie.federation.flower._internals import reason_of_exit

    code = "from flwr.supercore.exit import flwr_exit; flwr_exit(9999, 'No link.\\nwrong name', emit_telemetry=False)"
    env = {**os.environ, **processes.environment(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1
    assert reason_of_exit(done.stdout + done.stderr) == "No link. wrong name"


def test_flower_knows_the_options_and_variables_that_it_is_given(tmp_path: Path) -> None:
    """Only that Flower names them somewhere: what they do, the tests between processes show."""
    text = "".join(path.read_text(encoding="utf-8") for path in FLOWER.rglob("*.py"))
    commands = [
        processes.superlink(1, tmp_path),
        processes.serverapp("", tmp_path, tmp_path),
    ]
    given = {word for command in commands for word in command if word.startswith("--")}
    given |= {name for name in processes.environment(tmp_path) if name.startswith("FLWR_")}
    unknown = sorted(word for word in given if f'"{word}"' not in text)
    assert len(given) > 10 and not unknown, f"Flower {flwr.__version__} does not know {unknown}"
