"""The calls that only the server's own machine can make: whose nodes are let in, and which runs there are."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from coterie.errors import ConfigError
from coterie.federation.flower import processes
from coterie.federation.flower.certificates import open_ssh

_RUNS = 1000  # the newest to look at; those that were left are among them


class Control:
    """A SuperLink, called from its own machine.

    A call that fails is a :class:`~coterie.errors.ConfigError`.

    Parameters
    ----------
    folder
        The server's folder, with its certificates.
    port
        The SuperLink's port.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._address, self._ca = f"127.0.0.1:{port}", processes.inside(folder) / "ca.crt"

    def enrol(self, keys: Mapping[str, str]) -> None:
        """Let in the nodes with some keys, and no others.

        Parameters
        ----------
        keys
            Public keys in OpenSSH's form, by the members' names.

        Raises
        ------
        ConfigError
            If a key was let in once and taken out since: a SuperLink does not take it again.
        """
        wanted = {_pem(name, key): name for name, key in keys.items()}
        with self._connected() as client:
            # It remembers those of an earlier start, and members may have left or changed their keys since.
            nodes = {node.public_key: node for node in client.ListNodes(ListNodesRequest()).nodes_info}
            for key, node in nodes.items():
                is_out = node.status == NodeStatus.UNREGISTERED
                if is_out and key in wanted:
                    raise ConfigError(
                        f"the key of {wanted[key]!r} was taken out of the roster before: give the member a new one, "
                        "or remove superlink.db in the server's folder"
                    )
                if not is_out and key not in wanted:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
            for key in wanted.keys() - nodes.keys():
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=wanted[key]))

    def statuses(self) -> dict[str, str]:
        """Say how the nodes are that are let in.

        Returns
        -------
        dict of str to str
            ``registered`` for one that never came, ``online`` or ``offline``, by public key in OpenSSH's form.
        """
        with self._connected() as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        return {open_ssh(node.public_key): node.status for node in nodes if node.status != NodeStatus.UNREGISTERED}

    def submit(self, app: Path, settings: Mapping[str, str]) -> int:
        """Submit a run.

        Parameters
        ----------
        app
            The app's folder.
        settings
            What stands over the settings in it.

        Returns
        -------
        int
            Flower's number of the run.
        """
        built = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(built).hexdigest(), built, {}))
        with self._connected() as client:
            request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings)))
            return int(client.StartRun(request).run_id)

    def is_over(self, run: int) -> bool:
        """Say whether a run is over, however it ended.

        Parameters
        ----------
        run
            Flower's number of it.

        Returns
        -------
        bool
            Whether it is.
        """
        with self._connected() as client:
            found = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        return all(each.status.status == Status.FINISHED for each in found.values())

    def clear(self) -> None:
        """Stop the runs that an earlier server left: their processes are gone, but nodes would wait for them."""
        with self._connected() as client:
            for run, found in client.ListRuns(ListRunsRequest(limit=_RUNS)).run_dict.items():
                if found.status.status != Status.FINISHED:
                    client.StopRun(StopRunRequest(run_id=run))

    def stop(self, run: int) -> None:
        """Stop a run.

        Parameters
        ----------
        run
            Flower's number of it.
        """
        with self._connected() as client:
            client.StopRun(StopRunRequest(run_id=run))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[ControlHttpClient]:
        processes.avoid_proxies()
        interceptors = (RuntimeVersionHttpInterceptor("flwr CLI"),)
        client = ControlHttpClient.from_server_address(self._address, False, self._ca.read_bytes(), interceptors)
        try:
            yield client
        except httpx.HTTPStatusError as error:
            said = " ".join(error.response.text.split())[:300]
            raise ConfigError(f"the SuperLink at {self._address} refused a call: {said}") from error
        except httpx.HTTPError as error:
            raise ConfigError(f"the SuperLink at {self._address} does not answer: is the server running?") from error
        finally:
            client.close()


def _pem(name: str, key: str) -> bytes:
    how = "make one with ssh-keygen -t ecdsa -b 384"
    try:
        loaded = serialization.load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the key of {name!r} is not a public key of OpenSSH's: {how}") from error
    if not isinstance(loaded, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(loaded):
        raise ConfigError(f"the key of {name!r} is not one of a NIST curve, as Flower wants it: {how}")
    return public_key_to_bytes(loaded)
