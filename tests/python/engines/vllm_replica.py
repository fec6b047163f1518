"""A replica of vLLM for tests: its ranks as processes, and its HTTP routes over them."""

import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

HERE = pathlib.Path(__file__).parent
DEADLINE_S = 170


def needs_vllm():
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm is not installed here: tools/test_engines.sh vllm")


def write_dist_info(directory):
    """What installing the package leaves: its entry points, for importlib.metadata."""
    import tomllib

    project = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())["project"]
    info = directory / "deltasync-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deltasync\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


class RankFailed(Exception):
    """What a rank answered instead of a value."""


class RankProcess:
    def __init__(self, command, environment, log):
        self.log = log
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def answer(self):
        line = self.lines.get(timeout=DEADLINE_S)
        assert line is not None, self.log.read_text()[-4000:]
        answer = json.loads(line)
        if "error" in answer:
            raise RankFailed(answer["error"])
        return answer["value"]

    def send(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def do(self, name, *args):
        self.send(do=name, args=list(args))
        return self.answer()


class Replica:
    """`ranks` processes; `rpc` is vLLM's collective_rpc: to all ranks at once, the first error is raised."""

    def __init__(self, directory, model, ranks, stages=1):
        write_dist_info(directory)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = os.pathsep.join(
            filter(None, [str(directory), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")])
        )
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.ranks = [
            RankProcess(
                [sys.executable, str(HERE / "vllm_rank.py"), model, str(ranks), str(rank), str(port), str(stages)],
                environment,
                directory / f"rank{rank}.log",
            )
            for rank in range(ranks)
        ]
        for rank in self.ranks:
            assert rank.answer() == "ready"

    def close(self):
        for rank in self.ranks:
            rank.process.stdin.close()
        for rank in self.ranks:
            try:
                rank.process.wait(20)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def rpc(self, method, *args):
        """The errors of all ranks, joined, if there is one."""
        for rank in self.ranks:
            rank.send(worker=method, args=list(args))
        return self._answers()

    def do(self, name, *args):
        """What each rank answers."""
        for rank in self.ranks:
            rank.send(do=name, args=list(args))
        return self._answers()

    def _answers(self):
        values, errors = [], []
        for number, rank in enumerate(self.ranks):
            try:
                values.append(rank.answer())
            except RankFailed as error:
                errors.append(f"[{number}] {error}")
        if errors:
            raise RankFailed(" | ".join(errors))
        return values

    def http(self):
        """A client of vLLM's real routes; the engine client behind them calls the ranks."""
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from vllm.entrypoints.rl.online.api_router import router

        replica = self
        label = ["default"]

        class EngineClient:
            async def init_weight_transfer_engine(self, request):
                replica.rpc("init_weight_transfer_engine", request.init_info)

            async def start_weight_update(self):
                replica.rpc("start_weight_update")

            async def start_draft_weight_update(self):
                replica.rpc("start_draft_weight_update")

            async def update_weights(self, request):
                replica.rpc("update_weights", request.update_info)

            async def finish_weight_update(self, weight_version=None):
                # As AsyncLLM does it.
                replica.rpc("finish_weight_update")
                if weight_version is not None:
                    label[0] = weight_version

            async def get_weight_version(self):
                return label[0]

        app = FastAPI()
        app.include_router(router)
        app.state.engine_client = EngineClient()
        app.state.args = SimpleNamespace()
        return TestClient(app, raise_server_exceptions=False)


def together(*calls):
    """Runs them at once, and returns their results."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(call) for call in calls]]
