"""Agents and relays on the nodes of a Ray cluster::

    fleet = deltasync.ray.Fleet(trainer=trainer_group, rollout=rollout_group)  # placement groups, or ids of nodes

    @ray.remote
    class Trainer:
        def __init__(self, fleet):
            self.manager = deltasync.WeightManager(model, **fleet.trainer_options())

    @ray.remote
    class Engine:
        def __init__(self, fleet):
            self.receiver = deltasync.Receiver(module=model, **fleet.receiver_options())

A fleet goes to actors as an argument. Weights never go through Ray. Importing this module needs Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import _checks
from ._deadlines import left, seconds
from ._relay_tree import nodes_to_ask, sources
from ._supervisor import NodeOptions, Supervisor
from .agent import read_token
from .errors import ConnectionFailed, DeadlinePassed, Error, InvalidArgument, NotFound
from .tls import Tls, TlsLike

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as missing:
    if missing.name != "ray":
        raise
    raise ModuleNotFoundError("deltasync.ray needs Ray: pip install ray", name="ray") from None

__all__ = ["Fleet", "NodeStatus", "nodes_of"]

_END_S = 30.0


@dataclass(frozen=True)
class NodeStatus:
    """A node of a fleet.

    ``node``: its id in Ray. ``role``: "trainer" or "relay".
    ``endpoint``: HOST:PORT of its agent.
    ``parents``: the nodes that its relay pulls from, in order of preference.
    ``agent_pid``, ``relay_pid``: of their processes; None: there is none.
    ``restarts``: of agent and relay, by the actor that is there now. ``actor_restarts``: of that actor.
    ``error``: what does not go well: the actor does not answer, the agent does not start again, the relay always ends,
    the agent is cut off: no newer version comes to it. Empty: nothing.
    """

    node: str
    role: str
    endpoint: str
    parents: list[str]
    agent_pid: int | None
    relay_pid: int | None
    restarts: int
    actor_restarts: int
    error: str


def nodes_of(group: PlacementGroup, bundles: Iterable[int] | None = None, *, timeout: float = 60.0) -> list[str]:
    """The ids of the nodes that a placement group's bundles are on (all of them, or those of these indices), each once,
    in order. Waits until the group is there: DeadlinePassed. InvalidArgument: there is no such bundle."""
    if not group.wait(seconds("nodes_of", timeout)):
        raise DeadlinePassed(f"the placement group {group.id.hex()} has no nodes after {timeout:g} s")
    by_bundle: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    wanted = sorted(by_bundle) if bundles is None else list(bundles)
    if unknown := [index for index in wanted if index not in by_bundle]:
        raise InvalidArgument(f"bundle {unknown[0]!r}: the placement group has those from 0 to {len(by_bundle) - 1}")
    return list(dict.fromkeys(by_bundle[index] for index in wanted))


class Fleet:
    """An agent on each trainer node, and an agent with a relay on each rollout node, which are started again when they
    die. They end with :meth:`close`, or with the process that made the fleet.

    ``trainer`` and ``rollout``: a placement group (the nodes of its bundles; :func:`nodes_of` takes some of them), or
    ids of nodes. A node of both has the trainer's agent only, which its engines ask. ``children``: so many relays at
    most pull from one, and from the trainer; more make a tree. A relay whose parent is away goes on with one above,
    with another that pulls from the trainer, or with the trainer.

    ``name``: of the fleet. Fleets of several jobs on the same nodes need different ones; what an earlier fleet of this
    name has left on a node is taken away. ``port``: where all agents listen, on their nodes' addresses in Ray; 0: free
    ones. ``token_file``: a file here; by default a token is made. It goes to the nodes through Ray. ``tls``: files that
    all nodes have at the same paths; agents, relays and receivers use them. ``shm_dir``: for the segments, two halves
    of the model on each node (a trainer node's part of it). ``agent_args``, ``relay_args``: further options of
    ``deltasync-agent`` and ``deltasync relay``.

    On each node runs an actor that needs no CPU. If one is killed, Ray starts it again, and it goes on with the segment
    that is there: trainer, relays and receivers notice a pause. A fleet can be given to actors and tasks.
    Thread-safe, but one thread calls :meth:`add` and :meth:`close`.

    Errors: InvalidArgument (no such node, or it is not alive), AlreadyExists (a fleet of this name or another program
    has the place), DeadlinePassed, ConnectionFailed (a node went away), and those of :class:`deltasync.AgentProcess`.
    """

    def __init__(
        self,
        trainer: PlacementGroup | Sequence[str],
        rollout: PlacementGroup | Sequence[str] = (),
        *,
        children: int = 8,
        name: str = "fleet",
        port: int = 0,
        token_file: str | os.PathLike[str] | None = None,
        tls: TlsLike = None,
        shm_dir: str = "/dev/shm",
        agent_args: Iterable[str] = (),
        relay_args: Iterable[str] = (),
        timeout: float = 120.0,
    ) -> None:
        end = time.monotonic() + seconds("Fleet", timeout)
        self._children = _checks.whole("children", children, 1)
        if not re.fullmatch(r"[\w-]{1,40}", _checks.text("name", name), re.ASCII):
            raise InvalidArgument(f"name={name!r:.80}", "give up to 40 letters, digits, - and _")
        port = _checks.whole("port", port, 0, 65535)
        trainers = _nodes("trainer", trainer, end)
        if not trainers:
            raise InvalidArgument("trainer=: a fleet needs a trainer node")
        self._options = NodeOptions(
            name=name,
            fleet=secrets.token_hex(8),
            host="",
            port=port,
            token=secrets.token_hex(32) if token_file is None else read_token(token_file),
            tls=Tls.of(tls),
            shm_dir=shm_dir,
            agent_args=tuple(agent_args),
            relay_args=tuple(relay_args),
        )
        #: By node, where that has its versions from; the trainer's have [].
        self._parents: dict[str, list[str]] = {}
        #: By node: endpoint, socket.
        self._places: dict[str, dict[str, str]] = {}
        self._actors: dict[str, Any] = {}
        self._owner_pid = os.getpid()
        atexit.register(self.close)  # before Ray's own
        try:
            self._grow(sources(trainers, _nodes("rollout", rollout, end), self._children), end)
        except BaseException:
            self.close()
            raise

    def add(self, rollout: PlacementGroup | Sequence[str], *, timeout: float = 120.0) -> None:
        """An agent and a relay on further nodes; those that the fleet has already are passed over. Actors that were
        given the fleet before do not know them. Errors as of the constructor; the fleet is then as it was."""
        end = time.monotonic() + seconds("add", timeout)
        trainers = self._trainers()
        relays = [*self._parents, *_nodes("rollout", rollout, end)]
        self._grow(sources(trainers, relays, self._children), end)

    def trainer_options(self, node: str | None = None) -> dict[str, Any]:
        """What :class:`deltasync.WeightManager` on a trainer node needs: ``agent`` and ``advertise``; with several
        trainer nodes ``process_group=`` beside them. ``node``: by default that of the calling actor. NotFound: the
        fleet has no agent for trainers there."""
        node = _own_node() if node is None else node
        if self._parents.get(node) != []:
            trainers = ", ".join(self._trainers())
            raise NotFound(f"{node}: is no trainer node of this fleet, which has {trainers}", "pin the actor to one")
        place = self._places[node]
        return {"agent": place["socket"], "advertise": place["endpoint"]}

    def receiver_options(self, node: str | None = None) -> dict[str, Any]:
        """What :class:`deltasync.Receiver` needs: ``endpoints``, the node's own agent first and then others that have
        the whole model, ``token`` and ``tls``. On a node that is not of the fleet, the trainer's. ``node``: by default
        that of the calling actor."""
        asked = nodes_to_ask(_own_node() if node is None else node, self._parents)
        return {"endpoints": self._endpoints(asked), "token": self._options.token, "tls": self._options.tls}

    def status(self, *, timeout: float = 10.0) -> list[NodeStatus]:
        """Of each node, the trainer's first. One that does not answer in time says so in ``error``."""
        end = time.monotonic() + seconds("status", timeout)
        none: dict[str, Any] = {"agent_pid": None, "relay_pid": None, "restarts": 0, "actor_restarts": 0}
        calls = {node: actor.status.remote() for node, actor in self._actors.items()}
        nodes = []
        for node, call in calls.items():
            try:
                said = _get(node, call, end)
            except Error as error:
                said = {**none, "error": str(error)}
            above, endpoint = self._parents[node], self._places[node]["endpoint"]
            nodes.append(NodeStatus(node, "relay" if above else "trainer", endpoint, above, **said))
        return nodes

    def close(self) -> None:
        """Ends the agents and relays, and takes their segments away. Receivers keep what they have. Does nothing the
        second time, or in a process that did not make the fleet."""
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.close)
        actors, self._actors = self._actors, {}
        if not actors or not ray.is_initialized():
            return
        _end(actors)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, parents: dict[str, list[str]], end: float) -> None:
        """Starts what runs on nodes that are not there yet."""
        actors = {}
        try:
            for node, host in _hosts([node for node in parents if node not in self._actors]).items():
                pinned = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(Supervisor).options(
                    num_cpus=0, max_restarts=-1, max_concurrency=4, scheduling_strategy=pinned
                )
                actors[node] = actor.remote(replace(self._options, host=host))
            started = {node: actor.start.remote(left(end)) for node, actor in actors.items()}
            places = self._places | {node: _get(node, call, end) for node, call in started.items()}
            followed = {}
            for node, actor in actors.items():
                if parents[node]:
                    followed[node] = actor.follow.remote([places[parent]["endpoint"] for parent in parents[node]])
            for node, call in followed.items():
                _get(node, call, end)
        except BaseException:
            _end(actors)
            raise
        self._parents, self._places, self._actors = parents, places, self._actors | actors

    def _trainers(self) -> list[str]:
        return [node for node, above in self._parents.items() if not above]

    def _endpoints(self, nodes: Iterable[str]) -> list[str]:
        return [self._places[node]["endpoint"] for node in nodes]


def _end(actors: dict[str, Any]) -> None:
    end = time.monotonic() + _END_S
    calls = {node: actor.stop.remote() for node, actor in actors.items()}
    for node, call in calls.items():
        with contextlib.suppress(Exception):  # whatever it is, the others end
            _get(node, call, end)
        with contextlib.suppress(Exception):
            ray.kill(actors[node])


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _nodes(argument: str, given: Any, end: float) -> list[str]:
    if isinstance(given, PlacementGroup):
        return nodes_of(given, timeout=left(end))
    if isinstance(given, str) or not all(isinstance(node, str) for node in given):
        raise InvalidArgument(f"{argument}={given!r:.80} is neither a placement group nor a list of nodes' ids")
    return list(dict.fromkeys(given))


def _hosts(nodes: Iterable[str]) -> dict[str, str]:
    """The addresses of nodes, as the others see them. InvalidArgument."""
    alive = {node["NodeID"]: str(node["NodeManagerAddress"]).strip("[]") for node in ray.nodes() if node["Alive"]}
    hosts = {}
    for node in nodes:
        if node not in alive:
            raise InvalidArgument(f"{node}: no node of this id is alive in the cluster", "ray.nodes() has their NodeID")
        hosts[node] = f"[{alive[node]}]" if ":" in alive[node] else alive[node]
    return hosts


def _get(node: str, call: Any, end: float) -> Any:
    """What a node's actor answers. Its own errors, DeadlinePassed, ConnectionFailed."""
    try:
        return ray.get(call, timeout=left(end))
    except ray.exceptions.GetTimeoutError:
        raise DeadlinePassed(f"node {node}: its actor does not answer") from None
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Error) else error from None
    except ray.exceptions.RayError as error:  # also one of an actor that cannot start again, as its node is away
        raise ConnectionFailed(f"node {node}: its actor ended: {error}") from None
