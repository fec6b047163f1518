"""``deltasync bench control``: what a pause costs an engine that generates.

A small decoder (attention with a cache of keys and values) behind the control service answers completions over HTTP to
many streams, whose clients are a process of their own. Meanwhile a trainer publishes versions, of which each is taken
by pause, update and resume over HTTP. Wants torch.

  pause_p50_ms, pause_p95_ms  from the pause's question to the resume's answer, what drains and the update included
  requests_failed             that did not end with all tokens
  tokens_lost                 computed, and not received by the client
  stale_tokens                computed with other weights than those that the service says are live, or, but with
                              --kv keep, over keys and values of other weights
  over_kept_tokens            computed over keys and values of other weights
  misnamed_tokens             that an answer's list of versions gives to another version, or to none
  requests_across             that more than one version computed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import Receiver, RolloutControl, RolloutEngine, VersionSpans, WeightManager
from .errors import VersionConflict

VOCABULARY, PROMPT = 256, 8


def make_decoder(width: int, layers: int) -> Any:
    import torch

    def layer() -> torch.nn.ModuleDict:
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        return torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()})

    made = torch.nn.Module()
    made.embed = torch.nn.Embedding(VOCABULARY, width)
    made.layers = torch.nn.ModuleList(layer() for _ in range(layers))
    made.register_buffer("stamp", torch.zeros(1))  # the version's number, which comes with its weights
    return made.requires_grad_(False)


@dataclass
class Request:
    prompt: list[int]
    want: int
    out: asyncio.Queue[int | str]
    loop: asyncio.AbstractEventLoop
    #: Whose keys and values are there.
    done: int = 0
    tokens: list[int] = field(default_factory=list)
    spans: VersionSpans = field(default_factory=VersionSpans)
    #: Of the weights that computed each token, which the weights say themselves.
    stamps: list[int] = field(default_factory=list)

    def misnamed(self) -> int:
        named = [version for version, first, end in self.spans.list for _ in range(first, end)]
        return sum(name != str(stamp) for name, stamp in itertools.zip_longest(named, self.stamps))

    def put(self, what: int | str) -> None:
        self.loop.call_soon_threadsafe(self.out.put_nowait, what)


class Decoder(RolloutEngine):
    """One thread computes a token a pass for each request. Keys and values that were dropped are computed again."""

    can_hold = True

    def __init__(self, model: Any, slots: int, length: int, keeps_kv: bool = False) -> None:
        import torch

        self.model, self.keeps_kv = model, keeps_kv
        self.control: RolloutControl | None = None
        width = model.embed.weight.shape[1]
        self.cache = torch.zeros(2, len(model.layers), slots, length, width)
        self.stamps = torch.zeros(slots, length)  # of the weights that made them
        self.changed = threading.Condition()
        self.callers: set[int] = set()
        self.slots: list[Request | None] = [None] * slots
        self.waiting: list[Request] = []
        self.admits, self.held, self.ends = True, False, False
        self.computed = self.stale = self.over_kept = self.misnamed = self.across = 0
        self.thread = threading.Thread(target=self._run, name="decoder")
        self.thread.start()

    def close(self) -> None:
        with self.changed:
            self.ends = True
            self.changed.notify_all()
        self.thread.join()

    @contextlib.contextmanager
    def _between_passes(self) -> Iterator[None]:
        self.callers.add(threading.get_ident())
        with self.changed:
            self.callers.discard(threading.get_ident())
            yield

    def submit(self, request: Request) -> None:
        with self._between_passes():
            self.waiting.append(request)
            self.changed.notify_all()

    def wait_computed(self, tokens: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.computed >= tokens, 120):
                raise TimeoutError(f"the clients have {self.computed} tokens after two minutes")

    def _running(self) -> list[int]:
        return [slot for slot, request in enumerate(self.slots) if request is not None]

    def _take(self) -> None:
        for slot, request in enumerate(self.slots):
            if request is None and self.admits and self.waiting:
                self.slots[slot] = self.waiting.pop(0)

    def _end(self, slot: int, reason: str) -> None:
        request = self.slots[slot]
        assert request is not None
        self.slots[slot] = None
        self.misnamed += request.misnamed()
        self.across += len(request.spans.list) > 1
        request.put(reason)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.ends or (not self.held and (self._running() or (self.admits and self.waiting)))
                )
                if self.ends:
                    return
                self._take()
                self._pass(self._running())
                self.changed.notify_all()
            while self.callers:  # or a lock that is taken again at once would keep hooks out
                time.sleep(1e-4)

    def _pass(self, slots: list[int]) -> None:
        import torch

        requests = [self.slots[slot] for slot in slots]
        tokens = [(request.prompt + request.tokens)[request.done] for request in requests if request is not None]
        places = torch.tensor([request.done for request in requests if request is not None])
        rows = torch.tensor(slots)
        x = self.model.embed(torch.tensor(tokens))
        width = x.shape[1]
        self.stamps[rows, places] = stamp = self.model.stamp.item()
        there = torch.arange(self.stamps.shape[1]) <= places[:, None]
        for number, layer in enumerate(self.model.layers):
            query, key, value = layer["qkv"](x).split(width, dim=1)
            self.cache[0, number, rows, places], self.cache[1, number, rows, places] = key, value
            scores = (self.cache[0, number, rows] @ query[:, :, None])[:, :, 0] / width**0.5
            weights = scores.masked_fill(~there, -torch.inf).softmax(dim=1)
            x = x + layer["out"]((weights[:, None, :] @ self.cache[1, number, rows])[:, 0])
            x = x + layer["down"](layer["up"](x).relu())
        chosen = (x @ self.model.embed.weight.T).argmax(dim=1).tolist()
        mixed = ((self.stamps[rows] != stamp) & there).any(dim=1).tolist()
        assert self.control is not None
        live = self.control.admit().version
        for slot, request, token, is_mixed in zip(slots, requests, chosen, mixed, strict=True):
            assert request is not None
            request.done += 1
            if request.done < len(request.prompt) + len(request.tokens):
                continue  # only its keys and values were wanted
            request.tokens.append(token)
            request.spans.computed(live)
            request.stamps.append(int(stamp))
            self.computed += 1
            self.over_kept += is_mixed
            self.stale += stamp != live.number or (is_mixed and not self.keeps_kv)
            request.put(token)
            if len(request.tokens) == request.want:
                self._end(slot, "length")

    # What the service does.

    def stop_admission(self) -> None:
        with self._between_passes():
            self.admits = False

    def resume_admission(self) -> None:
        with self._between_passes():
            self.admits = True
            self.changed.notify_all()

    def abort(self, ids: list[str]) -> int:
        with self._between_passes():
            running = self._running()
            for slot in running:
                self._end(slot, "abort")
            self.changed.notify_all()
            return len(running)

    def wait_idle(self, timeout: float) -> None:
        with self._between_passes():
            if not self.changed.wait_for(lambda: not self._running(), timeout):
                raise TimeoutError(f"{len(self._running())} requests still run")

    def hold(self, timeout: float) -> None:
        with self._between_passes():
            self.held = True

    def release_hold(self) -> None:
        with self._between_passes():
            self.held = False
            self.changed.notify_all()

    def reset_caches(self, timeout: float) -> None:
        with self._between_passes():
            for request in self.slots:
                if request is not None:
                    request.done = 0


async def _complete(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: Decoder) -> None:
    """One connection: completions, each a line a token, and a line with its end."""
    assert engine.control is not None
    while head := await _head(reader):
        body = json.loads(await reader.readexactly(int(head["content-length"])))
        try:
            admitted = engine.control.admit(head)
        except VersionConflict as conflict:
            told = str(conflict).encode()
            writer.write(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told))
            continue
        named = "".join(f"{name}: {value}\r\n" for name, value in admitted.headers.items())
        writer.write(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{named}\r\n".encode())
        request = Request(body["prompt"], body["max_tokens"], asyncio.Queue(), asyncio.get_running_loop())
        engine.submit(request)
        said: int | str = 0
        while not isinstance(said, str):
            said = await request.out.get()
            ends = isinstance(said, str)
            line = (
                json.dumps({"end": said, "versions": request.spans.list} if ends else {"token": said}).encode() + b"\n"
            )
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    writer.close()


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """Headers of a question or an answer, after its first line; none: it is over."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
    except asyncio.IncompleteReadError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.lower(): value.strip() for name, _, value in pairs} | {"": ""}


class Completions:
    """Serves them on a thread of its own."""

    def __init__(self, engine: Decoder) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="completions")
        self.thread.start()
        serving = asyncio.start_server(lambda r, w: _complete(r, w, engine), "127.0.0.1", 0)
        self.server = asyncio.run_coroutine_threadsafe(serving, self.loop).result()
        self.port = self.server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


async def _stream(number: int, port: int, tokens: int, ends: asyncio.Event, sums: dict[str, int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [(number * 7 + place) % VOCABULARY for place in range(PROMPT)]
    body = json.dumps({"prompt": prompt, "max_tokens": tokens}).encode()
    while not ends.is_set():
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await _head(reader)
        said: dict[str, Any] = {}
        while size := int((await reader.readline()).strip() or b"0", 16):
            said = json.loads(await reader.readexactly(size))
            await reader.readexactly(2)
            sums["received"] += "token" in said
        await reader.readexactly(2)
        sums["requests"] += 1
        sums["failed"] += said.get("end") != "length" or said["versions"][-1][2] != tokens
    writer.close()


async def _clients(port: int, streams: int, tokens: int) -> dict[str, int]:
    ends = asyncio.Event()
    sums = {"requests": 0, "failed": 0, "received": 0}
    asked = asyncio.gather(*(_stream(number, port, tokens, ends, sums) for number in range(streams)))
    await asyncio.to_thread(sys.stdin.read)  # until it is closed
    ends.set()
    await asked
    return sums


def _post(endpoint: str, target: str, body: Any = None) -> None:
    connection = http.client.HTTPConnection(endpoint, timeout=120)
    connection.request("POST", target, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"POST {target}: {answer.status} {said}")


def measure(
    streams: int,
    cycles: int,
    mode: str,
    width: int,
    tokens: int,
    between: float,
    kv: str = "recompute",
    decoder: type[Decoder] = Decoder,
) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    trained, served = make_decoder(width, 2), make_decoder(width, 2)
    trained.stamp.fill_(1)
    pauses: list[float] = []
    with (
        WeightManager(trained, name=f"bench-control-{os.getpid()}") as manager,
        Receiver(manager.endpoint, module=served) as receiver,
    ):
        manager.offload()
        receiver.update()
        engine = decoder(served, streams, PROMPT + tokens, kv == "keep")
        completions = Completions(engine)
        try:
            with RolloutControl(engine, receiver, dialects=["vllm"]) as control:
                engine.control = control
                argv = [sys.executable, "-m", "deltasync.bench", "control-clients"]
                argv += map(str, (completions.port, streams, tokens))
                with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
                    engine.wait_computed(10 * streams)
                    for cycle in range(cycles):
                        time.sleep(between)
                        for name, parameter in trained.named_parameters():
                            if name.endswith("out.weight"):
                                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
                        trained.stamp.fill_(cycle + 2)
                        manager.offload()
                        manager.wait_ready()
                        began = time.perf_counter()
                        _post(control.endpoint, f"/pause?mode={mode}&clear_cache={str(kv != 'keep').lower()}")
                        _post(control.endpoint, "/update_weights", {"weight_dir": None})
                        _post(control.endpoint, "/resume")
                        pauses.append((time.perf_counter() - began) * 1e3)
                    said, _ = clients.communicate()
        finally:
            engine.close()
            completions.close()
    sums = json.loads(said)
    ordered = sorted(pauses)
    return {
        "case": "control",
        "mode": mode,
        "kv": kv,
        "streams": streams,
        "cycles": cycles,
        "bytes": sum(tensor.nbytes for tensor in trained.state_dict().values()),
        "pause_p50_ms": statistics.median(ordered),
        "pause_p95_ms": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "requests": sums["requests"],
        "requests_failed": sums["failed"],
        "tokens": engine.computed,
        "tokens_lost": engine.computed - sums["received"],
        "stale_tokens": engine.stale,
        "over_kept_tokens": engine.over_kept,
        "misnamed_tokens": engine.misnamed,
        "requests_across": engine.across,
    }


def main(argv: list[str]) -> int:
    if argv[:1] == ["control-clients"]:
        port, streams, tokens = map(int, argv[1:])
        print(json.dumps(asyncio.run(_clients(port, streams, tokens))))
        return 0
    parser = argparse.ArgumentParser(
        prog="deltasync bench control", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="completions at a time")
    parser.add_argument("--cycles", type=int, default=20, help="of pause, update and resume")
    parser.add_argument("--mode", choices=["keep", "wait", "abort"], default="keep", help="what becomes of requests")
    parser.add_argument("--kv", choices=["recompute", "keep"], default="recompute", help="of requests that are kept")
    parser.add_argument("--width", type=int, default=256, help="of the decoder")
    parser.add_argument("--tokens", type=int, default=32, help="of each completion")
    parser.add_argument("--between", type=float, default=0.5, help="seconds between two cycles")
    parser.add_argument("--json", action="store_true", help="one object")
    args = parser.parse_args(argv[1:])
    result = measure(args.streams, args.cycles, args.mode, args.width, args.tokens, args.between, args.kv)
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"control, {args.streams} streams, mode {args.mode}: a pause with its update takes "
        f"{result['pause_p50_ms']:.1f} ms (p95 {result['pause_p95_ms']:.1f}); of {result['requests']} requests "
        f"{result['requests_failed']} failed, of {result['tokens']} tokens {result['tokens_lost']} were lost and "
        f"{result['stale_tokens']} stale; {result['requests_across']} requests were computed by several versions, "
        f"{result['misnamed_tokens']} tokens misnamed"
    )
    return 0
