"""A trainer and engines with a hand-written loader beside it, for the tests of engines/session.py."""

from __future__ import annotations

import deltasync
import pytest

torch = pytest.importorskip("torch")

from deltasync.engines.session import CommitReport, EngineReceiver  # noqa: E402
from engine_support import Engine, Loader, change, first_version  # noqa: E402
from held_port import HeldPort  # noqa: E402

WAIT = 30.0


class Rig:
    """A trainer and engines beside it."""

    def __init__(self, name: str) -> None:
        self.weights = first_version()
        self.manager_name = name
        self.port = HeldPort()
        self.manager = deltasync.WeightManager(self.weights, name=name, listen=self.port.endpoint)
        self.publish(1)
        self.receivers: list[EngineReceiver] = []

    def publish(self, number: int) -> None:
        if number > 1:
            change(self.weights, number)
        self.manager.offload(self.weights, number, label=f"step-{number}")
        self.manager.wait_ready()

    def reach(self, receiver: EngineReceiver, last: int) -> None:
        """Each version up to `last` is published and committed."""
        for number in range(1, last + 1):
            if number > 1:
                self.publish(number)
            update(receiver, number)

    def restart(self, seed: int) -> None:
        """The trainer ends and comes back at the same address: another epoch, other weights, numbers from 1."""
        self.manager.close()
        change(self.weights, seed, density=0.5)
        self.manager = deltasync.WeightManager(self.weights, name=self.manager_name, listen=self.port.endpoint)
        self.publish(1)

    def engine(
        self, rank: int = 0, ranks: int = 1, *, permutes: bool = True, shadow: bool = False
    ) -> tuple[Engine, Loader, EngineReceiver]:
        engine = Engine(rank, ranks, permutes=permutes)
        loader = Loader(engine)
        receiver = EngineReceiver(
            engine, loader, self.manager.endpoint, shadow=shadow, name=f"rank{rank}", timeout=WAIT
        )
        self.receivers.append(receiver)
        return engine, loader, receiver

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.manager.close()
        self.port.close()


def update(receiver: EngineReceiver, version: int | str | None, *, verify: bool = True) -> CommitReport:
    staging = receiver.prepare(version, timeout=WAIT)
    staging.wait(WAIT)
    report = receiver.commit(staging, verify=verify)
    receiver.follow()
    return report
