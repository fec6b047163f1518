"""An engine that generates, behind the control service: a trainer, a receiver, and a client of HTTP. Its forward passes
read all weights, which have to be those of one version in each of them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import deltasync
import torch

TOKENS = 40


def model(fill: float) -> torch.nn.Module:
    made = torch.nn.Linear(256, 128)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(fill)
    return made


@dataclass
class Request:
    """The value of the weights at each of its tokens."""

    tokens: list[float] = field(default_factory=list)
    ended: str = ""


class Engine(deltasync.RolloutEngine):
    """Makes a token a pass for each request, on one thread."""

    can_hold = True

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.changed = threading.Condition()
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.admits, self.held, self.ends = True, False, False
        self.torn: list[str] = []
        self.resets = 0
        self.asleep: set[str] = set()
        #: Scripted faults, by hook: what it raises once, and what it waits for.
        self.broken: dict[str, Exception] = {}
        self.slow: dict[str, threading.Event] = {}
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        with self.changed:
            self.ends = True
            self.changed.notify_all()
        self.thread.join()

    def submit(self, name: str) -> Request:
        request = Request()
        with self.changed:
            (self.running if self.admits else self.waiting)[name] = request
            self.changed.notify_all()
        return request

    def finish(self, request: Request) -> Request:
        with self.changed:
            assert self.changed.wait_for(lambda: request.ended, 60)
        return request

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ends or (self.running and not self.held))
                if self.ends:
                    return
                values = torch.cat([parameter.flatten() for parameter in self.module.parameters()])
                if not bool((values == values[0]).all()):
                    self.torn.append("weights of several versions")
                if self.asleep:
                    self.torn.append(f"computed while {self.asleep} slept")
                for name, request in list(self.running.items()):
                    request.tokens.append(values[0].item())
                    if len(request.tokens) == TOKENS:
                        request.ended = "length"
                        del self.running[name]
                self.changed.notify_all()
            time.sleep(0.001)

    # What the service does.

    def _may_break(self, hook: str) -> None:
        if event := self.slow.pop(hook, None):
            assert event.wait(60)
        if error := self.broken.pop(hook, None):
            raise error

    def stop_admission(self) -> None:
        self._may_break("stop_admission")
        with self.changed:
            self.admits = False

    def resume_admission(self) -> None:
        self._may_break("resume_admission")
        with self.changed:
            self.admits = True
            self.running |= self.waiting
            self.waiting.clear()
            self.changed.notify_all()

    def abort(self, ids: list[str]) -> int:
        self._may_break("abort")
        with self.changed:
            names = [name for name in (ids or list(self.running)) if name in self.running]
            for name in names:
                self.running.pop(name).ended = "abort"
            self.changed.notify_all()
            return len(names)

    def wait_idle(self, timeout: float) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: not self.running, timeout):
                raise TimeoutError(f"{len(self.running)} requests still run")

    def hold(self, timeout: float) -> None:
        self._may_break("hold")
        with self.changed:
            self.held = True

    def release_hold(self) -> None:
        self._may_break("release_hold")
        with self.changed:
            self.held = False
            self.changed.notify_all()

    def reset_caches(self, timeout: float) -> None:
        self._may_break("reset_caches")
        self.resets += 1

    def release_memory(self, memory: str) -> None:
        self._may_break("release_memory")
        with self.changed:
            self.asleep.add(memory)
            if memory == "weights":
                with torch.no_grad():
                    for parameter in self.module.parameters():
                        parameter.fill_(float("nan"))

    def restore_memory(self, memory: str) -> None:
        self._may_break("restore_memory")
        with self.changed:
            self.asleep.discard(memory)


class Client:
    def __init__(self, endpoint: str, token: str = "", timeout: float = 60) -> None:
        self.endpoint, self.token, self.timeout = endpoint, token, timeout

    def send(self, method: str, target: str, body: Any = None, **more: str) -> tuple[int, Any, dict[str, str]]:
        """`more`: headers, with _ for -."""
        connection = http.client.HTTPConnection(self.endpoint, timeout=self.timeout)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        connection.request(method, target, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json and text.strip() else text, dict(answer.headers)

    def post(self, target: str, body: Any = None, status: int = 200) -> Any:
        got, answer, _ = self.send("POST", target, body)
        assert got == status, answer
        return answer

    def get(self, target: str, status: int = 200) -> Any:
        got, answer, _ = self.send("GET", target)
        assert got == status, answer
        return answer


class Fleet:
    """A trainer, an engine with its receiver, the service, and a client of it."""

    def __init__(self, name: str, **options: Any) -> None:
        self.trained, self.served = model(1.0), model(0.0)
        self.manager = deltasync.WeightManager(self.trained, name=name)
        self.manager.offload()
        self.receiver = deltasync.Receiver(self.manager.endpoint, module=self.served, shadow=True)
        self.receiver.update()
        self.engine = Engine(self.served)
        self.control = deltasync.RolloutControl(self.engine, self.receiver, **options)
        self.client = Client(self.control.endpoint, options.get("token", ""))

    def train(self, value: float, label: str = "") -> None:
        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.fill_(value)
        self.manager.offload(label=label)
        self.manager.wait_ready()

    def value(self) -> float:
        return self.served.weight[0, 0].item()

    def close(self) -> None:
        self.control.close()
        self.engine.close()
        self.receiver.close()
        self.manager.close()
