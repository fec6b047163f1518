"""The nodes of a process group, and the writer of a rank whose group spans several.

The agent of each node serves what its ranks write, as a layout of its own: the node's part (deltasync/part.hpp).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import _checks, _native
from ._agreement import Agreement, common_store
from ._deadlines import left
from ._group import Group
from ._native import Batch, Layout, Sidecar, Version, Writer
from .errors import InvalidArgument

#: Tensor, row, column, rows, columns.
Rectangle = tuple[int, int, int, int, int]

_LOOPBACK = ("127.", "localhost:", "[::1]:")
_ANY = ("0.0.0.0", "[::]", "*")


def this_node() -> str:
    """The same for processes that can have one agent: of one host's memory and network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"


class Nodes:
    """Which ranks of the group are on this rank's node. Nodes are in order of their first ranks."""

    def __init__(self, group: Group, timeout: float) -> None:
        self._group = group
        said = group.gather(this_node, timeout) if group.size > 1 else ["this"]
        firsts = list(dict.fromkeys(said))
        self.count = len(firsts)
        #: By rank.
        self.of = [firsts.index(node) for node in said]
        self.mine = self.of[group.rank]
        #: By node.
        self.first_ranks = [self.of.index(node) for node in range(self.count)]
        self.ranks = [rank for rank, node in enumerate(self.of) if node == self.mine]
        self.rank, self.size = self.ranks.index(group.rank), len(self.ranks)  # among those of this node
        names = [node.split()[0] for node in firsts]
        self.names = names if len(set(names)) == len(names) else [f"{name}-{i}" for i, name in enumerate(names)]

    def global_ranks(self) -> frozenset[int]:
        """Of this node, as torch.distributed numbers all processes."""
        return frozenset(self._group.global_rank(rank) for rank, node in enumerate(self.of) if node == self.mine)

    def from_firsts(self, make: Callable[[], Any], timeout: float) -> list[Any]:
        """What the first rank of each node makes (JSON), on all ranks, by node; or an error on all."""
        if self.count == 1:
            return [self._group.from_leader(make, timeout)]
        made = self._group.gather(lambda: make() if self.rank == 0 else None, timeout)
        return [made[rank] for rank in self.first_ranks]

    def writer(
        self,
        whole: tuple[Layout, Sidecar],
        endpoints: Sequence[str],
        attach: Callable[[Layout, Sidecar, float], Writer],
        timeout: float,
    ) -> NodesWriter:
        """`endpoints`: of the agents of all nodes. All ranks call it."""
        name = self._group.from_leader(lambda: secrets.token_hex(8), timeout)
        of_all = Agreement(common_store(), self._group.rank, self._group.size, f"trainer {name}")
        of_node = Agreement(common_store(), self.rank, self.size, f"trainer {name}/{self.mine}", self.ranks)
        return NodesWriter(self, of_all, of_node, whole, endpoints, attach)


def advertised(advertise: str | None, listen: str | None, nodes: int) -> str | None:
    """HOST:PORT for receivers, of an agent that listens there (None: of one that runs already)."""
    if advertise is None:
        if listen is None:
            if nodes == 1:
                return None
            raise InvalidArgument(
                f"WeightManager: agent= on {nodes} nodes without advertise=",
                "say where receivers reach the agent of this rank's node: advertise=HOST:PORT",
            )
        if nodes > 1 and str(listen).startswith(_LOOPBACK):
            raise InvalidArgument(
                f"listen='{listen}': the ranks are on {nodes} nodes, and an agent there is reached from its own only",
                'give listen="0.0.0.0:7070" and token_file=FILE',
            )
        host, _, port = str(listen).rpartition(":")
        return f"{own_address() if host in _ANY else host}:{port}"
    host, port = _host_and_port(_checks.text("advertise", advertise))
    if not port and listen is not None:
        port = str(listen).rpartition(":")[2]
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(
            f"advertise={advertise!r:.80} is not HOST:PORT",
            "beside agent= the port is needed, too" if not port else None,
        )
    return f"{host}:{port}"


def _host_and_port(text: str) -> tuple[str, str]:
    if text.count(":") > 1 and not text.startswith("["):
        return f"[{text}]", ""
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and not text.endswith("]") else (text, "")


def own_address() -> str:
    """Of this host, on its way to the group's master; or its name."""
    master = os.environ.get("MASTER_ADDR")
    try:
        for family, *_, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM) if master else ():
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                host = str(probe.getsockname()[0])
            if not host.startswith("127.") and host != "::1":
                return f"[{host}]" if ":" in host else host
    except OSError:
        pass
    return socket.gethostname()


class NodesWriter:
    """As a Writer, of the whole layout, for a rank of a group on several nodes. It attaches with the node's part when
    the ranks have said what they write (plan()). A node that holds nothing has no part, and its ranks none in it.

    Each call is begin_call(), plan() if the parts are to be agreed on, begin(), write_batch(), commit(); or fail() at
    any time, which all ranks then do.
    """

    def __init__(
        self,
        nodes: Nodes,
        agreement: Agreement,
        of_node: Agreement,
        whole: tuple[Layout, Sidecar],
        endpoints: Sequence[str],
        attach: Callable[[Layout, Sidecar, float], Writer],
    ) -> None:
        """`of_node`: the agreement of this node's ranks. `endpoints`: of all nodes. `attach`: with this layout and
        sidecar, within so many seconds."""
        self._nodes, self._agreement, self._of_node = nodes, agreement, of_node
        self._whole, self._attach = whole, attach
        self._all_endpoints = list(endpoints)
        #: Of the nodes that hold a part.
        self.endpoints = list(endpoints)
        #: The whole one; behind plan() with cuts where nodes end.
        self.layout = whole[0]
        self.epoch = 0
        self._held: bytes | None = None  # by all nodes, as _pack() has it
        self._other_parts = True  # than in the epoch that there is
        self._part: tuple[Layout, Sidecar] | None = None
        self._writer: Writer | None = None
        self._places: dict[Rectangle, tuple[int, int, int]] = {}
        self._begun: Version | None = None
        self._newest: Version | None = None

    def begin_call(self, with_plan: bool) -> None:
        self._begun = None
        # Within a node, who has begun a version that another never begins would wait for it until the deadline.
        before = ("parts", "left", "attached") if with_plan else ("ready",)
        self._agreement.begin((*before, "begun", "written"))
        self._of_node.begin(("parts",) if with_plan else ())

    def require_same(self, about: str) -> None:
        """VersionConflict if another rank's call is about another version."""
        self._agreement.require_same(about)
        self._of_node.go_on_to(self._agreement.call)

    def plan(self, mine: list[Rectangle], end: float) -> None:
        """What this rank writes in each version. CoverageError, on all ranks: the nodes do not hold each element, or
        two ranks of a node hold one."""
        what = "to say which parts they write"
        # The parts of thousands of ranks would be too much for the one that merges them.
        of_node = self._of_node.agree(what, end, _pack([mine]), self._join)
        held = self._agreement.agree(what, end, of_node if self._nodes.rank == 0 else b"", self._merge)
        if held != self._held:
            self._writer, self._held = None, None
            self._other_parts = True
            self._use(_unpack(held), mine)
            self._held = held
        elif self._part is not None:
            self._set_places(mine)
        # An agent has one layout for all its writers: all leave the one before.
        self._agreement.agree("to leave their agents", end)
        epoch = self.epoch
        if self._part is not None:
            if self._writer is None:
                self._writer = self._attach(*self._part, left(end))
            plan = Batch()
            for rectangle in mine:
                plan.add(*self.place(*rectangle), *rectangle[3:], 0)
            self._writer.register_plan(plan, left(end))
            # Receivers look at a new epoch's members.
            if self._writer.newest_epoch > epoch or self._other_parts:
                epoch = max(epoch + 1, self._writer.fresh_epoch())
        latest = self._agreement.agree("to attach", end, str(epoch).encode(), lambda said: max(said, key=int))
        self.epoch, self._other_parts = int(latest), False

    def _join(self, said: list[bytes]) -> bytes:
        """What the ranks of this node hold together."""
        return _pack([_native.joined(self._whole[0], [part for parts in said for part in _unpack(parts)[0]])])

    def _merge(self, said: list[bytes]) -> bytes:
        """What all nodes hold, of what their first ranks say."""
        held = [_unpack(said[rank])[0] for rank in self._nodes.first_ranks]
        _native.check_nodes(self._whole[0], list(zip(self._nodes.names, held, strict=True)))
        return _pack(held)

    def _use(self, held: list[list[Rectangle]], mine: list[Rectangle]) -> None:
        layout, sidecar = self._whole
        self.layout = _native.layout_with_cuts(layout, [rectangle for node in held for rectangle in node])
        with_part = [node for node, rectangles in enumerate(held) if rectangles]
        self.endpoints = [self._all_endpoints[node] for node in with_part]
        self._part, self._places = None, {}
        if self._nodes.mine in with_part:
            members = [(self._nodes.names[node], self._all_endpoints[node]) for node in with_part]
            own = with_part.index(self._nodes.mine)
            self._part = _native.part_of(self.layout, sidecar, held[self._nodes.mine], members, own)
            self._set_places(mine)

    def _set_places(self, mine: list[Rectangle]) -> None:
        assert self._part is not None
        there = _native.in_part(self._part[1], self._part[0], mine)
        self._places = {rectangle: place[:3] for rectangle, place in zip(mine, there, strict=True)}

    def place(self, tensor: int, row: int, col: int, rows: int, cols: int) -> tuple[int, int, int]:
        """Tensor, row and column in the node's part of a rectangle of the whole layout. OutOfRange."""
        rectangle = (tensor, row, col, rows, cols)
        if rectangle not in self._places:
            if self._part is None:
                name = self._whole[0][tensor].name
                raise InvalidArgument(f"{name}: this node said that it has nothing to write, and has this tensor now")
            self._places[rectangle] = _native.in_part(self._part[1], self._part[0], [rectangle])[0][:3]
        return self._places[rectangle]

    def begin(self, version: Version, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._begun = version
        if self._agreement.next_step == "ready":
            self._agreement.agree(f"to begin {version}", end)
        if self._writer is not None:
            self._writer.begin(version, left(end))
        self._agreement.agree(f"to begin {version}", end)

    def write_batch(self, batch: Batch, wait: bool = True, timeout: float = 60.0) -> None:
        if self._writer is not None:
            self._writer.write_batch(batch, wait, timeout)

    def commit(self, timeout: float) -> Any:
        """Once this node has sealed its part, and all others theirs."""
        assert self._begun is not None
        end = time.monotonic() + timeout
        if self._writer is not None:
            report: Any = self._writer.commit(timeout)
        else:
            none = dict.fromkeys(("guard_s", "copy_s", "seal_s", "total_s"), 0.0)
            report = SimpleNamespace(version=self._begun, nbytes=0, tensors=0, **none)
        self._agreement.agree(f"to write {self._begun}", end)
        self._newest = self._begun
        return report

    def abort(self) -> None:
        """What this rank writes. The others hear of it by fail()."""
        if self._writer is not None:
            self._writer.abort()

    def fail(self, error: BaseException) -> None:
        """All ranks fail in this call, unless all have agreed already."""
        self._of_node.fail(error)
        if self._agreement.fail(error):
            self._newest = self._begun

    def wait_ready(self, version: Version, timeout: float) -> None:
        """Until this node's agent serves it."""
        if self._writer is not None:
            self._writer.wait_ready(version, timeout)

    @property
    def newest_epoch(self) -> int:
        return self._newest.epoch if self._newest is not None else 0

    @property
    def newest_number(self) -> int:
        return self._newest.number if self._newest is not None else 0


def _pack(lists: list[list[Rectangle]]) -> bytes:
    """Column by column, which compresses well."""
    counts = np.array([len(lists), *map(len, lists)], np.int64)
    columns = np.array([rectangle for rectangles in lists for rectangle in rectangles], np.int64).reshape(-1, 5).T
    return zlib.compress(counts.tobytes() + columns.tobytes(), 1)


def _unpack(packed: bytes) -> list[list[Rectangle]]:
    numbers = np.frombuffer(zlib.decompress(packed), np.int64)
    count = int(numbers[0])
    counts = numbers[1 : 1 + count].tolist()
    rectangles: list[Rectangle] = list(zip(*numbers[1 + count :].reshape(5, -1).tolist(), strict=True))
    lists, at = [], 0
    for length in counts:
        lists.append(rectangles[at : at + length])
        at += length
    return lists
