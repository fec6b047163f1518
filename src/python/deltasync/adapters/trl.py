"""trl's asynchronous GRPO over deltasync::

    from deltasync.adapters.servers import VllmServer
    from deltasync.adapters.trl import WeightTransfer

    trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(VllmServer("http://localhost:8000")))

trl pauses the server, streams all weights, and resumes it. Here the stream goes to the trainer's agent while the server
still generates, from where its ranks pull what changed; it is paused for the commit only.

Needs no import of trl: the trainer calls the methods below on its main process. The protocol is that of trl 1.16
(``AsyncGRPOTrainer(weight_transfer=...)``: ``init_weight_transfer``, ``pause``, ``send_weights``, ``resume``,
``destroy``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .._deadlines import left
from .._reports import OffloadReport
from .publisher import Publisher
from .servers import Server, Servers

_log = logging.getLogger("deltasync.trl")


class WeightTransfer:
    """The ``weight_transfer`` of trl's ``AsyncGRPOTrainer``.

    ``server``: one :class:`~deltasync.adapters.servers.Server` or several (VllmServer, SglangServer, or your own object
    with its four methods). ``timeout`` in seconds: of one whole synchronisation, and of the connection at the start.
    ``early_pause``: pause when trl says so, and not only for the commit. Further options are
    :class:`~deltasync.adapters.publisher.Publisher`'s: ``model``, ``host``, ``token_file``, ``tls``, ...

    A failed :meth:`send_weights` raises. A server that was not asked to update yet goes on with the version before. One
    that was stays paused, since its weights may be of no version: the next synchronisation that succeeds ends that, or
    :meth:`resume`, if the error says that nothing has changed.
    """

    def __init__(
        self,
        server: Server | Sequence[Server],
        *,
        timeout: float = 600.0,
        early_pause: bool = False,
        **publisher: Any,
    ) -> None:
        self.server: Server = Servers(server) if isinstance(server, Sequence) else server
        self.timeout = timeout
        self.early_pause = early_pause
        self.publisher: Publisher | None = None
        #: Of the last version.
        self.report: OffloadReport | None = None
        self._options = publisher
        self._connected = False
        self._paused = False  # as far as is known
        self._unsure = False  # which weights the server has

    def init_weight_transfer(self) -> None:
        """Starts the agent. The server learns of it with the first version, when there is something to pull."""
        if self.publisher is None:
            self.publisher = Publisher(**self._options)

    def pause(self) -> None:
        if self.early_pause:
            self._pause(self.timeout)

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes the pairs as the next version, and has the server commit it. Raises what the offload raises, or
        the server's error."""
        end = time.monotonic() + self.timeout
        if self.publisher is None:
            self.init_weight_transfer()
        assert self.publisher is not None
        try:
            self.report = self.publisher.offload(iterator, timeout=left(end))
            self.publisher.wait_ready(timeout=left(end))
            if not self._connected:
                info = {"endpoints": [self.publisher.endpoint], "token": self.publisher.token}
                self.server.connect(info, left(end))
                self._connected = True
            self._pause(left(end))
        except BaseException:
            self._resume_quietly()
            raise
        self._unsure = True
        self.server.update(self.report.version.number, left(end))
        self._unsure = False

    def resume(self) -> None:
        if self._paused:
            self.server.resume(self.timeout)
            self._paused = self._unsure = False

    def destroy(self) -> None:
        """At the end of training: ends the agent."""
        self._resume_quietly()
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
        self._connected = False

    def _pause(self, timeout: float) -> None:
        # Each time: it may generate although the answer of resume() was lost. It may be paused if that of pause() is.
        self._paused = True
        self.server.pause(timeout)

    def _resume_quietly(self) -> None:
        if self._unsure:
            _log.error("the rollout server stays paused: its update failed, and its weights may be of no version")
            return
        try:
            self.resume()
        except Exception as error:
            _log.error("the rollout server stays paused: %s", error)
