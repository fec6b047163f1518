"""Control routes for an engine that has none: clients written for vLLM, SGLang or FastDeploy pause it, update its
weights, let it sleep and wake it over HTTP::

    class Engine(deltasync.RolloutEngine):
        def stop_admission(self): ...
        ...

    receiver = deltasync.Receiver("trainer:7070", module=model, shadow=True)
    with deltasync.RolloutControl(Engine(), receiver, listen="0.0.0.0:8000", token_file="token") as control:
        serve()
"""

from __future__ import annotations

import json
import numbers
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from . import _checks, _native
from ._control_weights import ReceiverWeights
from ._deadlines import seconds
from ._native import Version
from .agent import read_token
from .errors import InvalidArgument
from .ranks import LeaderWeights, RankGroup
from .rollout import Receiver
from .tls import Tls, TlsLike

__all__ = ["RolloutControl", "RolloutEngine"]


class RolloutEngine:
    """What the control service does with an engine. Inherit from it.

    Methods are called on threads of the service, one at a time, but for :meth:`abort`, which may come beside any.
    ``timeout`` is what the client's call has left, in seconds. What they raise fails the client's call, whose steps
    before are undone as far as the engine can serve.

    ``can_hold``: whether :meth:`hold` is there. Without it nothing pauses with mode "keep", and an update of an engine
    that serves waits for its requests."""

    can_hold: bool = False

    def stop_admission(self) -> None:
        """Takes no new requests from now on: they wait, or are refused."""
        raise NotImplementedError("stop_admission")

    def resume_admission(self) -> None:
        """Takes requests again."""
        raise NotImplementedError("resume_admission")

    def abort(self, ids: list[str]) -> int:
        """Ends the requests of these ``ids`` (empty: all) with the tokens that they have. How many there were."""
        raise NotImplementedError("abort")

    def wait_idle(self, timeout: float) -> None:
        """Returns when no request is left; TimeoutError after ``timeout``, which is short: while the call has time, it
        is asked again. Comes after :meth:`stop_admission`."""
        raise NotImplementedError("wait_idle")

    def hold(self, timeout: float) -> None:
        """Returns when no forward pass runs, and begins none until :meth:`release_hold`; requests stay."""
        raise NotImplementedError("hold")

    def release_hold(self) -> None:
        """Goes on with the requests that were held."""
        raise NotImplementedError("release_hold")

    def reset_caches(self, timeout: float) -> None:
        """Forgets what was computed with the weights so far: prefix, multimodal and encoder caches."""
        raise NotImplementedError("reset_caches")

    def pause_transfer(self) -> None:
        """Of caches between engines."""

    def resume_transfer(self) -> None:
        """The same."""

    def release_memory(self, memory: str) -> None:
        """Gives up ``memory``: weights, kv_cache, cpu_cache or cuda_graph. What it held is lost; weights come back from
        the receiver's shadow, or are the newest version then."""
        raise NotImplementedError("release_memory")

    def restore_memory(self, memory: str) -> None:
        """Takes ``memory`` again, at the same addresses."""
        raise NotImplementedError("restore_memory")


class Admission(NamedTuple):
    """What a request is computed with.

    ``version``: the live one. Its label is what clients call it, or its number.
    ``cache_salt``: no other version has it, and all engines with this version have it: for caches that outlive a
    version.
    """

    version: Version
    cache_salt: str

    @property
    def headers(self) -> dict[str, str]:
        """For the answer. Empty if the label is not of ASCII, which headers are."""
        label = self.version.label
        return {"X-Deltasync-Version": label} if label.isascii() else {}


class RolloutControl:
    """Serves control routes until it is closed, which do to ``engine`` what clients ask for.

    ``receiver`` keeps the engine's weights, without ``background``. What it has committed is live. Without that the
    engine has to be paused, until an update gives it weights. Weights that slept are the newest version when they wake;
    with its ``shadow=True`` the version that they were.

    ``listen`` is HOST:PORT; beyond loopback a ``token`` (or ``token_file``) is needed, which clients show as
    "Authorization: Bearer …", or certificates of clients (``tls`` with ``ca``). ``dialects``: whose routes are served:
    "v1" (FastDeploy's), "vllm", "sglang". ``ranks``: the engine has several processes, and this one is rank 0; the
    others have a :class:`RankFollower`. ``model``, ``world_size`` (processes of the engine), ``pp_size`` and
    ``ep_size`` are for clients that ask, and so is ``engine_info``, which is merged into /server_info. ``timeout``: of
    a client's call, in seconds. ``graphs_use_kv_cache``: captured graphs do, so weights are not woken before it (v1).

    Errors: InvalidArgument, Unauthenticated (beyond loopback without a token), AlreadyExists (the port).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        receiver: Receiver,
        *,
        listen: str = "127.0.0.1:0",
        token: str = "",
        token_file: str | os.PathLike[str] | None = None,
        tls: TlsLike = None,
        dialects: Iterable[str] = ("v1", "vllm", "sglang"),
        model: str = "",
        ranks: RankGroup | None = None,
        world_size: int | None = None,
        pp_size: int = 1,
        ep_size: int = 1,
        engine_info: Mapping[str, Any] = MappingProxyType({}),
        timeout: float = 600.0,
        graphs_use_kv_cache: bool = False,
    ) -> None:
        if not isinstance(engine, RolloutEngine):
            raise InvalidArgument(f"RolloutControl: engine={engine!r:.80} is no RolloutEngine", "inherit from it")
        if not isinstance(receiver, Receiver):
            raise InvalidArgument(f"RolloutControl: receiver={receiver!r:.80} is no Receiver")
        if not isinstance(engine.can_hold, bool):
            raise InvalidArgument(f"RolloutControl: can_hold={engine.can_hold!r:.80} of the engine is no bool")
        if receiver._pulls.background:
            raise InvalidArgument("RolloutControl: the receiver pulls by itself", "make it without background=True")
        if isinstance(dialects, str):
            raise InvalidArgument(f"RolloutControl: dialects={dialects!r} is no list", f"give [{dialects!r}]")
        if token_file is not None:
            token = read_token(token_file)
        self._engine = engine
        self._weights = ReceiverWeights(receiver) if ranks is None else LeaderWeights(receiver, ranks)
        server = _native.ControlServer(
            engine,
            self._weights,
            _checks.text("listen", listen),
            _checks.secret("token", token),
            Tls.of(tls)._of_server(),
            [_checks.text("dialects", dialect) for dialect in dialects],
            _checks.text("model", model),
            _checks.whole("world_size", world_size if world_size is not None else ranks.ranks if ranks else 1),
            _checks.whole("pp_size", pp_size),
            _checks.whole("ep_size", ep_size),
            _json("engine_info", engine_info),
            seconds("RolloutControl", _checks.of_type("timeout", timeout, numbers.Real, "number")),
            bool(graphs_use_kv_cache),
        )
        self._server: _native.ControlServer | None = server  # which holds the engine
        # Its threads call Python, so they end before Python does.
        self._end = weakref.finalize(self, _close, server, self._weights)
        if isinstance(self._weights, LeaderWeights):
            try:
                self._weights.begin(server.check)
            except BaseException:
                self._end()
                raise

    @property
    def endpoint(self) -> str:
        """HOST:PORT; empty once it is closed."""
        server = self._server
        return server.endpoint if server is not None else ""

    def admit(self, headers: Mapping[str, str] = MappingProxyType({})) -> Admission:
        """For the engine's own routes, when the scheduler takes a request with these ``headers``: what it will be
        computed with. A request may be for a version of some number or a later one (``X-Deltasync-Min-Version``), or
        for one alone (``X-Deltasync-Exact-Version``, its number or its name).

        Errors: VersionConflict (answer 409: another version is live, or none), InvalidArgument (answer 400)."""
        server = self._server
        if server is None:
            raise InvalidArgument("admit: the control service is closed")
        asked = {str(name).lower(): str(value) for name, value in headers.items()}
        version, salt = server.admit(
            asked.get("x-deltasync-min-version", ""), asked.get("x-deltasync-exact-version", "")
        )
        return Admission(version, salt)

    def close(self) -> None:
        """Ends the service. A call that goes on is waited for; its pull is cancelled, and its wait for requests ends.
        InvalidArgument: in a hook, which it would wait for."""
        server = self._server
        if server is None:
            return
        if server.in_hook:
            raise InvalidArgument("RolloutControl.close: called by a hook, whose end it would wait for")
        self._end()
        self._server = None

    def __enter__(self) -> RolloutControl:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"RolloutControl: {name}={value!r:.80} cannot be written as JSON: {error}") from None


def _close(server: _native.ControlServer, weights: ReceiverWeights | LeaderWeights) -> None:
    """Also where a hook has dropped the last reference, and at the program's end."""

    def end() -> None:
        server.stop()
        weights.cancel()
        server.close()

    if server.in_hook:
        threading.Thread(target=end, name="control-close").start()
    else:
        end()
