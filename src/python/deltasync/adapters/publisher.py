"""A trainer's side for frameworks that name no model beforehand, only (name, tensor) pairs at each step."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._arrays import is_torch_tensor
from .._reports import OffloadReport
from ..agent import AgentProcess, read_token
from ..errors import InvalidArgument
from ..tls import Tls, TlsLike
from ..trainer import WeightManager

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class Publisher:
    """An agent from the start, so that receivers know where to connect, and a WeightManager from the first version.

    ``model`` is what :class:`WeightManager` takes. Without it the first version's pairs say what the layout is; they
    are then copied to the host once, all of them at a time (the iterator can be read only once).

    ``hf``, ``dtype``, ``files``, ``tensor_parallel``: as in :class:`WeightManager`; ``name`` and ``shm_dir`` as in
    :class:`AgentProcess`. ``timeout`` in seconds, of the start and of calls without one of their own.

    ``host``: the address that the agent listens on, and that receivers are told. Beyond loopback the agent wants a
    token; one is made (:attr:`token`) unless there is a ``token_file``, or ``tls`` (a :class:`~deltasync.Tls`, or a
    mapping) with a CA, whose certificates stand for it. ``port`` 0: a free one.

    Not thread-safe.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        dtype: Any = None,
        hf: str | os.PathLike[str] | None = None,
        files: Mapping[str, bytes] | None = None,
        tensor_parallel: int = 1,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token_file: str | os.PathLike[str] | None = None,
        tls: TlsLike = None,
        shm_dir: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.timeout = timeout
        self._model = model
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "hf": hf,
            "files": files,
            "tensor_parallel": tensor_parallel,
        }
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.token = ""
        if token_file is not None:
            self.token = read_token(token_file)
        elif host not in _LOOPBACK and not Tls.of(tls).ca:
            self._directory = tempfile.TemporaryDirectory(prefix="deltasync-token-")
            self.token = secrets.token_hex(32)
            token_file = Path(self._directory.name) / "token"
            token_file.write_text(self.token)
            token_file.chmod(0o600)
        self.manager: WeightManager | None = None
        self.agent = AgentProcess(
            name,
            listen=f"{host}:{port}",
            token_file=token_file,
            tls=tls,
            shm_dir=shm_dir,
            timeout=timeout,
        )

    @property
    def endpoint(self) -> str:
        """HOST:PORT for receivers."""
        return self.agent.endpoint

    @property
    def next_number(self) -> int:
        """The version that the next :meth:`offload` makes."""
        last = self.manager.version if self.manager is not None else None
        return last.number + 1 if last is not None else 1

    def offload(
        self, tensors: Any = None, *, version: int | None = None, label: str = "", timeout: float | None = None
    ) -> OffloadReport:
        """Publishes version :attr:`next_number`, or the one given; as :meth:`WeightManager.offload`, with its
        errors."""
        if self.manager is None:
            source = self._model
            if source is None:
                if tensors is None:
                    raise InvalidArgument("offload: neither a model nor tensors were given")
                source = tensors = on_host(tensors)
            self.manager = WeightManager(source, agent=self.agent.socket, timeout=self.timeout, **self._options)
        return self.manager.offload(tensors, version or self.next_number, label=label, timeout=timeout)

    def wait_ready(self, *, timeout: float | None = None) -> None:
        """Until the agent serves the last version."""
        if self.manager is None:
            raise InvalidArgument("wait_ready: nothing has been offloaded")
        self.manager.wait_ready(timeout=timeout)

    def close(self) -> None:
        """Ends the agent: receivers keep what they have."""
        if self.manager is not None:
            self.manager.close()
        self.agent.stop()
        if self._directory is not None:
            self._directory.cleanup()


def on_host(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Copies of the pairs' tensors on the host, which stay as they are when the iterator goes on.

    InvalidArgument: a name comes twice."""
    copies: dict[str, Any] = {}
    for name, tensor in pairs.items() if isinstance(pairs, Mapping) else pairs:
        if name in copies:
            raise InvalidArgument(f"{name}: comes twice in one version")
        copies[name] = tensor.detach().to("cpu", copy=True) if is_torch_tensor(tensor) else tensor.copy()
    return copies
