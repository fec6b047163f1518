"""Ray actors find each other's agents by name::

    @ray.remote
    class Trainer:
        def __init__(self):
            self.publisher = Publisher(model, host=node_address())  # beyond loopback it makes a token
            publish_endpoint("policy", self.publisher.endpoint, token=self.publisher.token)

    @ray.remote
    class Rollout:
        def __init__(self):
            found = find_endpoint("policy", 60)
            self.receiver = deltasync.Receiver(found.address, token=found.token, module=model, background=True)

Names are kept by one small named actor of the cluster, in the namespace ``deltasync``, whichever namespace the callers
are in. Weights never go through Ray.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from typing import Any, NamedTuple

import ray

from ..errors import ConnectionFailed, DeadlinePassed, InvalidArgument, NotFound

NAMESPACE = "deltasync"
_DIRECTORY = "deltasync-endpoints"
#: For Ray's own part of a call, on top of what the callee may wait.
_CALL_S = 10.0
_PAUSE_S = 0.1


class Endpoint(NamedTuple):
    """Where an agent is."""

    #: HOST:PORT.
    address: str
    #: The agent's token, or "".
    token: str


def publish_endpoint(name: str, endpoint: str, *, token: str = "", timeout: float = 60.0) -> None:
    """Makes an agent known in the cluster. A name that is there already then means this one: a trainer that was started
    again. Returns when everybody finds it; DeadlinePassed after ``timeout`` seconds; InvalidArgument for an address
    that other nodes of this cluster cannot reach."""
    _check_reachable(endpoint)
    end = time.monotonic() + timeout
    _ask(name, end, lambda directory: directory.put.remote(name, endpoint, token))


def find_endpoint(name: str, deadline: float = 60.0) -> Endpoint:
    """The agent of a name; waits up to ``deadline`` seconds for it to be published, then NotFound."""
    end = time.monotonic() + deadline
    found = _ask(name, end, lambda directory: directory.get.remote(name, max(0.0, end - time.monotonic())))
    if found is None:
        raise NotFound(f"nobody has published the endpoint '{name}' in {deadline:.1f} s: publish_endpoint() does")
    return Endpoint(*found)


def withdraw_endpoint(name: str, *, timeout: float = 60.0) -> None:
    """Takes a name back. One that is not there is no error."""
    _ask(name, time.monotonic() + timeout, lambda directory: directory.remove.remote(name))


def node_address() -> str:
    """This node's address as the cluster's other nodes see it: the host for an agent to listen on."""
    return str(ray.util.get_node_ip_address()).strip("[]")


def _check_reachable(endpoint: str) -> None:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return  # a name, which the nodes look up
    nodes = sum(bool(node.get("Alive")) for node in ray.nodes())
    if address.is_unspecified or (address.is_loopback and nodes > 1):
        raise InvalidArgument(
            f"endpoint='{endpoint}': other nodes cannot reach an agent there",
            "have it listen on this node's address: Publisher(host=node_address()), or "
            "WeightManager(listen=f'{node_address()}:0', token_file=...)",
        )


class _Directory:
    """Runs as an asyncio actor: one that waits for a name keeps nobody else waiting."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}
        self._changed = asyncio.Condition()

    async def put(self, name: str, address: str, token: str) -> None:
        async with self._changed:
            self._known[name] = (address, token)
            self._changed.notify_all()

    async def get(self, name: str, timeout: float) -> tuple[str, str] | None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: name in self._known), timeout)
            except (TimeoutError, asyncio.TimeoutError):
                return None
            return self._known.get(name)

    async def remove(self, name: str) -> None:
        async with self._changed:
            self._known.pop(name, None)


def _directory() -> Any:
    return (
        ray.remote(_Directory)
        .options(
            name=_DIRECTORY,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=-1,
        )
        .remote()
    )


def _ask(name: str, end: float, call: Any) -> Any:
    """Asks the directory, within the deadline. If it died it is asked again, but knows no name."""
    while True:
        try:
            return ray.get(call(_directory()), timeout=max(0.0, end - time.monotonic()) + _CALL_S)
        except ray.exceptions.GetTimeoutError:
            raise DeadlinePassed(f"endpoint '{name}': Ray's directory actor does not answer") from None
        except ray.exceptions.RayActorError as error:
            if time.monotonic() >= end:
                raise ConnectionFailed(f"endpoint '{name}': Ray's directory actor ended: {error}") from None
            time.sleep(_PAUSE_S)
