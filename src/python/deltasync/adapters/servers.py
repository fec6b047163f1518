"""Rollout servers over HTTP: how each pauses, takes a version that its deltasync plug-in has pulled, and goes on.

Control only, plain JSON; weights never travel here. Every call has a deadline. vLLM has these routes with
``VLLM_SERVER_DEV_MODE=1`` only.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from .._connecting import endpoints_of
from .._deadlines import left
from ..coverage import Ignore
from ..errors import ConnectionFailed, DeadlinePassed, Error, InternalError, InvalidArgument, NotFound, from_code
from ..tls import Tls, TlsLike

_LOOK_S = 0.25
#: A server's answer after its own deadline.
ANSWER_S = 15.0
#: What vLLM's ranks have for their decision after a commit, beyond the commit's own deadline.
VLLM_GRACE_S = 30.0
#: How a vLLM server says that nothing has told it of an agent.
NOT_INITIALISED = "deltasync is not initialised"
_NO_WORD = "HTTP 200, but no word of the update: is this the rollout server's address?"


class Server(Protocol):
    """What an adapter asks of a rollout server. ``timeout`` in seconds; each method raises within it, but that
    :meth:`update` waits a moment more for the server's own word."""

    def connect(self, info: Mapping[str, Any], timeout: float) -> None:
        """Waits for the server and tells its plug-in where the agents are: ``info`` is ``{"endpoints": [...],
        "token": "..."}``."""

    def pause(self, timeout: float) -> None:
        """Returns when nothing generates."""

    def update(self, version: int, timeout: float) -> None:
        """Makes every rank commit the version. On error the version before serves on, unless the message says
        otherwise."""

    def resume(self, timeout: float) -> None:
        """Generates again."""


class AdapterServer(Protocol):
    """What :class:`deltasync.adapters.lora.AdapterSlot` asks of a rollout server. ``timeout`` in seconds; each method
    raises within it."""

    def pause(self, timeout: float) -> None:
        """Returns when nothing generates and no KV of before will be used."""

    def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Loads the LoRA adapter of the directory ``path``, in place of the one called ``name`` if there is one."""

    def loaded_adapter(self, name: str, timeout: float) -> str:
        """The directory that the adapter called ``name`` was loaded from; empty: there is none."""

    def resume(self, timeout: float) -> None:
        """Generates again."""


class StaleCache(InternalError):
    """The weights are updated, but the engine kept its prefix cache: answers may continue on the old weights' KV."""

    remedy = "flush the cache (or pause with 'retract', or 'keep' and clear_cache) before the next request"


class VllmServer:
    """``vllm serve --weight-transfer-config '{"backend": "deltasync"}'`` at ``url``. Each ``timeout`` is in seconds.

    ``pause_mode`` keep: running requests are frozen, their KV is dropped and computed again with the new weights.
    ``token_file``: the agent's token as a file on the server's host; vLLM's routes are not the place to send it.
    ``tls``: a :class:`~deltasync.Tls` or a mapping, of files on the server's host.
    ``verify``: every rank reads its live memory back before an update succeeds. ``ignore``: patterns of names that need
    not match (docs/guides/vllm.md). ``api_key``: sent as "Authorization: Bearer …"."""

    def __init__(
        self,
        url: str,
        *,
        token_file: str = "",
        tls: TlsLike = None,
        pause_mode: str = "keep",
        verify: bool = True,
        ignore: Sequence[str] = (),
        api_key: str = "",
    ) -> None:
        self.http = Http(url, api_key)
        self.token_file = token_file
        self.tls = Tls.of(tls).as_mapping()
        self.pause_mode = pause_mode
        self.verify = verify
        self.ignore = list(Ignore(ignore).patterns)
        self._init: dict[str, Any] = {}

    def connect(self, info: Mapping[str, Any], timeout: float) -> None:
        """Waits for the server, and tells it where agents are: ``info`` is ``{"endpoints": ["HOST:PORT", ...]}``."""
        end = time.monotonic() + timeout
        agent = endpoints_of(info.get("endpoints"))
        given: dict[str, Any] = {"agent": agent} | _if_any(ignore=self.ignore, tls=self.tls)
        if self.token_file:
            given["token_file"] = self.token_file
        elif info.get("token"):
            raise InvalidArgument(
                f"{self.http.url}: the agent wants a token: give the trainer a token_file, and "
                "VllmServer(token_file=...) the same one on the server's host"
            )
        self.http.wait_healthy(timeout)
        self._init = {"init_info": given}
        self.http.post("/init_weight_transfer_engine", self._init, timeout=left(end))

    def pause(self, timeout: float) -> None:
        """Returns when nothing generates."""
        self.http.post("/pause", query={"mode": self.pause_mode, "clear_cache": "true"}, timeout=timeout)

    def update(self, version: int, timeout: float) -> None:
        """Has every rank commit the version of this number, while the server is paused. Errors say what it has then."""
        end = time.monotonic() + timeout

        def start() -> None:
            try:
                self.http.post("/start_weight_update", timeout=left(end))
            except HttpStatus as error:
                if not self._init or NOT_INITIALISED not in error.body:
                    raise
                # The server was started again.
                self.http.post("/init_weight_transfer_engine", self._init, timeout=left(end))
                self.http.post("/start_weight_update", timeout=left(end))

        def update() -> None:
            info = {"version": version, "verify": self.verify, "deadline_ms": round(left(end) * 1000)}
            try:
                answer = self.http.post(
                    "/update_weights", {"update_info": info}, timeout=left(end) + VLLM_GRACE_S + ANSWER_S
                )
            except (ConnectionFailed, DeadlinePassed) as error:
                raise type(error)(
                    f"{error.message}; it may have version {version} now, under the label of before",
                    "do not resume before an update has succeeded",
                ) from None
            if not _said(answer, "message"):
                raise InternalError(f"{self.http.url}/update_weights: {_NO_WORD}")

        def finish(label: str | None = None) -> None:
            given = None if label is None else {"weight_version": label}
            self.http.post("/finish_weight_update", given, timeout=max(1.0, left(end)))

        vllm_session(
            start,
            update,
            finish,
            str(version),
        )

    def resume(self, timeout: float) -> None:
        """Generates again."""
        self.http.post("/resume", timeout=timeout)

    def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Needs ``vllm serve --enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` in its environment."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        try:
            self.http.post("/v1/load_lora_adapter", body, timeout=timeout)
        except NotFound as error:
            raise NotFound(
                f"{self.http.url}: adapter '{name}' from {path}: {error.message}; vLLM has the route with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 only, and the directory has to be on its host"
            ) from None

    def loaded_adapter(self, name: str, timeout: float) -> str:
        """The directory that the adapter was loaded from; empty: there is none."""
        return _root_of(self.http.get("/v1/models", timeout=timeout), name)


def vllm_session(
    start: Callable[[], object],
    update: Callable[[], object],
    finish: Callable[[str | None], None],
    label: str,
) -> None:
    """One update of vLLM. Raises what the calls raise; then all ranks take the next one."""
    try:
        start()
        update()
    except Exception:
        # A rank that failed has closed its session, the others have not, or the answer of start() was lost; without
        # this they refuse the next start.
        with contextlib.suppress(Exception):
            finish(None)
        raise
    finish(label)


class SglangServer:
    """``python -m sglang.launch_server`` at ``url``, with deltasync beside it. Each ``timeout`` is in seconds.

    ``pause_mode`` retract: running requests go back to the queue and compute their KV again. ``model_path`` is what the
    server was started with; it is asked for it by default. ``tls``: a :class:`~deltasync.Tls` or a mapping, of files on
    the server's host. ``ignore``: patterns of names that need not match (docs/guides/sglang.md). ``api_key``: sent as
    "Authorization: Bearer …"."""

    def __init__(
        self,
        url: str,
        *,
        pause_mode: str = "retract",
        model_path: str = "",
        tls: TlsLike = None,
        ignore: Sequence[str] = (),
        api_key: str = "",
    ) -> None:
        self.http = Http(url, api_key)
        self.pause_mode = pause_mode
        self.model_path = model_path
        self.tls = Tls.of(tls).as_mapping()
        self.ignore = list(Ignore(ignore).patterns)
        self._info: dict[str, Any] = {}

    def connect(self, info: Mapping[str, Any], timeout: float) -> None:
        """:meth:`tell`, and waits for the server. One that is paused is not healthy: it cannot generate."""
        end = time.monotonic() + timeout
        self.tell(info)
        self.http.wait_healthy(timeout)
        if not self.model_path:
            self.model_path = self.http.get("/model_info", timeout=left(end))["model_path"]

    def tell(self, info: Mapping[str, Any]) -> None:
        """What goes with each update: where agents are, ``{"endpoints": ["HOST:PORT", ...]}``, and options of the
        plug-in."""
        self._info = dict(info) | _if_any(ignore=self.ignore, tls=self.tls)
        if "endpoints" in info:  # else the server's environment names them
            self._info["endpoints"] = endpoints_of(info["endpoints"])

    def pause(self, timeout: float) -> None:
        """Returns when nothing generates."""
        self.http.post("/pause_generation", {"mode": self.pause_mode}, timeout=timeout)

    def update(self, version: int, timeout: float) -> None:
        """Has every rank commit the version of this number, while the server is paused. Errors say what it has then."""
        body = {
            "model_path": self.model_path,
            "load_format": "deltasync",
            "weight_version": str(version),
            "flush_cache": True,
            "manifest": {"deltasync": self._info | {"timeout": timeout}},
        }
        answer = self.http.post("/update_weights_from_disk", body, timeout=timeout + ANSWER_S)
        message = str(_said(answer, "message") or "")
        if _said(answer, "success") is not True:
            raise InternalError(f"{self.http.url}: version {version}: {message or _NO_WORD}")
        if is_stale_cache(message):
            raise StaleCache(f"{self.http.url}: version {version} serves: {message}")

    def resume(self, timeout: float) -> None:
        """Generates again."""
        self.http.post("/continue_generation", {}, timeout=timeout)

    def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Needs ``--enable-lora``, and ``pause_mode="abort"``: SGLang takes an adapter out of its slot, which waits for
        its requests, and a paused one never ends. One that cannot be loaded leaves the one before, loaded again."""
        if self.pause_mode != "abort":
            raise InvalidArgument(
                f"{self.http.url}: pause_mode={self.pause_mode!r}: paused requests of adapter '{name}' "
                "would keep it in its slot for ever",
                'SglangServer(pause_mode="abort")',
            )
        end = time.monotonic() + timeout
        before = self.loaded_adapter(name, left(end))
        try:
            if before:
                self.http.post("/unload_lora_adapter", {"lora_name": name}, timeout=left(end))
            self.http.post("/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout=left(end))
        except Error:
            if before and not self.loaded_adapter(name, ANSWER_S):  # it may be out although no answer came
                self.http.post("/load_lora_adapter", {"lora_name": name, "lora_path": before}, timeout=ANSWER_S)
            raise

    def loaded_adapter(self, name: str, timeout: float) -> str:
        """The directory that the adapter was loaded from; empty: there is none."""
        return _root_of(self.http.get("/v1/models", timeout=timeout), name)


def is_stale_cache(message: str) -> bool:
    """Whether a SGLang server's answer says that the weights are new and the flush was refused."""
    return "updated, stale cache" in message


class Servers:
    """Several servers as one; all are asked at a time. If some fail, the error names each, and the others have done it:
    servers that serve different versions are told apart by their label, and the next update brings all to one."""

    def __init__(self, servers: Sequence[Server]) -> None:
        if not servers:
            raise InvalidArgument("no rollout server was given")
        self._servers = list(servers)

    def connect(self, info: Mapping[str, Any], timeout: float) -> None:
        self._all(lambda server: server.connect(info, timeout))

    def pause(self, timeout: float) -> None:
        self._all(lambda server: server.pause(timeout))

    def update(self, version: int, timeout: float) -> None:
        self._all(lambda server: server.update(version, timeout))

    def resume(self, timeout: float) -> None:
        self._all(lambda server: server.resume(timeout))

    def _all(self, call: Callable[[Server], None]) -> None:
        if len(self._servers) == 1:
            call(self._servers[0])
            return
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="deltasync-servers") as threads:
            futures = [threads.submit(call, server) for server in self._servers]
            failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            first = failed[0]
            if len(failed) == 1 or not isinstance(first, Error):
                raise first
            raise from_code(first.code, "; ".join(str(error) for error in failed))


class HttpStatus(InternalError):
    """A server's answer that is no success."""

    remedy = ""

    def __init__(self, message: str = "", status: int = 0, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class Http:
    """Requests with a deadline and JSON both ways."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InvalidArgument(f"{url}: a server's URL begins with http:// or https://")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, *, timeout: float) -> Any:
        return self._call("GET", path, None, timeout)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout: float,
    ) -> Any:
        data = json.dumps(body).encode() if body is not None else b""
        return self._call("POST", path + (f"?{urllib.parse.urlencode(query)}" if query else ""), data, timeout)

    def wait_healthy(self, timeout: float) -> None:
        """Until ``/health`` answers 200."""
        end = time.monotonic() + timeout
        while True:
            try:
                self.get("/health", timeout=max(0.05, min(5.0, left(end))))
                return
            except (ConnectionFailed, DeadlinePassed, HttpStatus) as error:
                if left(end) == 0:
                    raise DeadlinePassed(f"{self.url}: not healthy after {timeout:.1f} s: {error.message}") from None
            time.sleep(min(_LOOK_S, left(end)))

    def _call(self, method: str, path: str, data: bytes | None, timeout: float) -> Any:
        if timeout <= 0:
            raise DeadlinePassed(f"{self.url}{path}: no time is left for it")
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        end = time.monotonic() + timeout
        try:
            answer: Any
            try:
                answer, code = urllib.request.urlopen(request, timeout=timeout), 200
            except urllib.error.HTTPError as error:
                answer, code = error, error.code
            with answer:
                text = _read(answer, end).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if left(end) == 0 or isinstance(reason, TimeoutError):
                raise DeadlinePassed(f"{self.url}{path}: no answer after {timeout:.1f} s") from None
            raise ConnectionFailed(f"{self.url}{path}: {reason}") from None
        if code == 404:
            raise NotFound(
                f"{self.url}{path}: HTTP 404: {text[:2000] or 'no such route'}; vLLM has routes of /pause and the "
                "like with VLLM_SERVER_DEV_MODE=1 only"
            )
        if code != 200:
            raise HttpStatus(f"{self.url}{path}: HTTP {code}: {text[:2000]}", code, text)
        try:
            return json.loads(text) if text.strip() else {}
        except json.JSONDecodeError:
            return {}


def _read(answer: Any, end: float) -> bytes:
    """All of it until then: a socket's own timeout begins again with each byte."""
    if answer.isclosed():  # it has no body
        return b""
    with socket.socket(fileno=os.dup(answer.fileno())) as own:
        timer = threading.Timer(left(end), _shut, [own])
        timer.start()
        try:
            text = bytes(answer.read())
        finally:
            timer.cancel()
            timer.join()
    if left(end) == 0:
        raise TimeoutError
    return text


def _shut(own: socket.socket) -> None:
    with contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)


def _said(answer: Any, key: str) -> Any:
    return answer.get(key) if isinstance(answer, dict) else None


def _root_of(models: Any, name: str) -> str:
    """Of what ``/v1/models`` answers."""
    return next((str(card.get("root") or "") for card in models.get("data", []) if card.get("id") == name), "")


def _if_any(**options: Any) -> dict[str, Any]:
    """Older plug-ins do not know them."""
    return {name: value for name, value in options.items() if value}
