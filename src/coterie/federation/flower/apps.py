"""Flower's grid as a transport, and the two apps that a submitted run names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.federation.flower._internals import NODE_AWAY, hasten_objects, limit_objects
from coterie.federation.flower.bells import of_messages, of_replies
from coterie.federation.flower.certificates import to_openssh
from coterie.federation.flower.messages import content_of, empty, take_block
from coterie.federation.returned_memory import return_free_memory, return_large_blocks, share_free_memory
from coterie.federation.transport import Failure, Transport

Settings = Mapping[str, str | int | float | bool]

_ACTION = "query"
_POLL, _LONGEST_POLL = 0.05, 2.0  # seconds between polls at least, and at most where no bell rings
_BUSY = 2.0  # times what the last poll took, at least: each costs the SuperLink some work
_RESTARTS = 5.0  # seconds between checks for nodes that were restarted
_GRACE = 5.0  # seconds that a node that was late before gets beyond twice what the others took


class FlowerGrid:
    """A Flower grid as a transport.

    Parameters
    ----------
    grid
        Flower's grid.
    server
        The server's folder, in which bells hang.
    """

    def __init__(self, grid: Grid, server: Path) -> None:
        self._grid = grid
        self._sent, self._replied = of_messages(server), of_replies(server)
        self._late: set[str] = set()  # messages whose replies nobody waits for any more
        hasten_objects()
        share_free_memory()
        return_large_blocks()

    def nodes(self) -> dict[int, str]:
        return {int(node.node_id): to_openssh(node.public_key) for node in self._grid.get_nodes()}

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        began = looked = time.monotonic()
        active = self._activations()
        waiting: dict[str, int] = {}
        for node in messages:
            waiting |= self._push(node, messages[node], deadline)
        self._sent.ring()  # once: a node that asks while its own is on its way waits for the parts of it
        return_free_memory()
        replies: dict[int, bytes | Failure] = {}
        until = began + deadline

        def fetch(identifiers: list[str], seconds: float) -> None:
            for reply in self._pull(identifiers, seconds):
                # By the message that it answers: an error's sender is not the node.
                answered = reply.metadata.reply_to_message_id
                node = waiting.get(answered, -1)
                if node >= 0:
                    replies[node] = _failure(reply) if reply.has_error() else take_block(reply)
                    same = [each for each, other in waiting.items() if other == node]
                    self._late |= {each for each in same if each != answered}
                    for each in same:
                        del waiting[each]

        while waiting and time.monotonic() < until:
            heard, polled = self._replied.last(), time.monotonic()
            # Who was late before is not asked while others are waited for: of a reply whose parts never come, a member
            # would have the server wait for them.
            first = [identifier for identifier, node in waiting.items() if node in patience]
            fetch(first or list(waiting), until - polled)
            if waiting and time.monotonic() - looked > _RESTARTS:
                looked, before, active = time.monotonic(), active, self._activations()
                for node in set(waiting.values()) & active.keys():
                    if active[node] != before.setdefault(node, active[node]):
                        # It was killed and is back. What it had received is lost, so it gets that again.
                        waiting |= self._push(node, messages[node], deadline)
                        self._sent.ring()
            if waiting and patience and not patience & set(waiting.values()):
                until = min(until, began + 2 * (time.monotonic() - began) + _GRACE)
                patience = frozenset()  # what is left gets no further reprieve
                continue  # its reply may be there
            if waiting:
                pause = min(max(_POLL, _BUSY * (time.monotonic() - polled)), _LONGEST_POLL)
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
                self._replied.wait(heard, min(_LONGEST_POLL - pause, until - time.monotonic()))
        if waiting:  # what came while the parts of another were waited for
            fetch(list(waiting), 0.0)
        # Fetched, so that the SuperLink does not hold them to the end of the run.
        for reply in self._pull(list(self._late), 0.0) if self._late else ():
            self._late.discard(reply.metadata.reply_to_message_id)
            empty(reply)
        self._late |= waiting.keys()
        return_free_memory()
        return replies

    def _pull(self, identifiers: list[str], seconds: float) -> Iterable[Message]:
        """Fetch the replies that are there, with so many seconds for the parts of each that are still on their way."""
        limit_objects(max(seconds, 0.0))
        return self._grid.pull_messages(identifiers)

    def _push(self, node: int, block: bytes, deadline: float) -> dict[str, int]:
        # One at a time: a request that holds all of them may be too large where each alone is not.
        message = Message(content_of(block), dst_node_id=node, message_type=_ACTION, ttl=deadline + 60)
        sent = dict.fromkeys(self._grid.push_messages([message]), node)
        empty(message)
        return sent

    def _activations(self) -> dict[int, str]:
        return {int(node.node_id): str(node.last_activated_at) for node in self._grid.get_nodes()}


def server_app(serve: Callable[[Transport, Settings], None]) -> ServerApp:
    """Make a ServerApp that calls a function with a transport and the run's settings."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = dict(context.run_config)
        serve(FlowerGrid(grid, Path(str(settings["federation"])).parent / "server"), settings)

    return app


def client_app(reason: str) -> ClientApp:
    """Make a ClientApp that refuses: Coterie's nodes answer by :mod:`coterie.federation.flower.executor` instead."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        raise RuntimeError(reason)

    return app


def _failure(message: Message) -> Failure:
    reason = " ".join(str(message.error.reason or "").split())
    return Failure(f"Flower's error {message.error.code}: {reason[:300]}", gone=message.error.code in NODE_AWAY)
