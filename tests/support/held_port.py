"""A port of loopback for servers that are started again at the same place."""

from __future__ import annotations

import socket


class HeldPort:
    """Nobody else gets this port until close(): it is bound, and not listened on. Who connects is refused until a server
    listens there, which may do so as often as it likes (with SO_REUSEADDR, as agents have it). A port that was only seen to
    be free is another process's a moment later."""

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.number = int(self._held.getsockname()[1])
        self.endpoint = f"127.0.0.1:{self.number}"

    def close(self) -> None:
        self._held.close()
