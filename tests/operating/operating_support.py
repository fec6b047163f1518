"""What the checks of docs/operating share: its files, and a small fleet of real processes that Prometheus scrapes."""

import json
import os
import pathlib
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "tools"), str(ROOT / "tests" / "support")]
from cli_support import BIN, CLI, DEADLINE_S, Agent, Child, bf16_words, pack_u16, write_model  # noqa: E402
from held_port import HeldPort  # noqa: E402
from openssl_certificates import Certificates  # noqa: E402

AGENT = BIN / "deltasync-agent"
PAGES = ROOT / "docs" / "operating"
KUBERNETES = PAGES / "kubernetes"


def documents(path):
    """Every YAML document of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def needs(*programs):
    """Skips a test, and says why, where a program is not installed."""
    missing = [program for program in programs if not shutil.which(program)]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


def until(what, wanted):
    """Asks again until `wanted(answer)`; the last answer is in the failure."""
    end = time.monotonic() + DEADLINE_S
    while True:
        answer = what()
        if wanted(answer):
            return answer
        if time.monotonic() > end:
            raise AssertionError(answer)
        time.sleep(0.1)


def own_port(owner):
    """A port that nobody else gets until the owner's end."""
    held = HeldPort()
    owner.addCleanup(held.close)
    return held.number


class Cleanups:
    """Gives a class's cleanups to helpers that ask a test for them."""

    def __init__(self, test_class):
        self.addCleanup = test_class.addClassCleanup


def metric_names(text):
    """Of a page: every name that a query may use."""
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


class Fleet:
    """A trainer's agent with TLS, a rollout node's agent with a relay, and a follower of it, until the tests' end."""

    VERSIONS = 2000

    def __init__(self, owner, elements=65536, interval_ms=250):
        self.owner = owner
        self.elements = elements
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-operating-"))
        owner.addCleanup(shutil.rmtree, self.tmp, ignore_errors=True)
        self.certificates = Certificates(self.tmp)
        self.token = self.tmp / "token"
        self.token.write_text("a token that is long enough")
        self.token.chmod(0o600)
        knows = "--token-file", self.token
        self.trainer = Agent(owner, AGENT, self.tmp / "trainer", *self.certificates.server_options(), *knows)
        self.node = Agent(owner, AGENT, self.tmp / "node", *knows)
        self.relay, self.relay_http = self._with_pages("relay", "--from", self.trainer.endpoint, "--agent",
                                                       self.node.socket, "--tls-ca", self.certificates.ca, *knows)
        self.follower, self.follower_http = self._with_pages("pull", "--from", self.node.endpoint, "--out",
                                                             self.tmp / "out", "--follow", *knows)
        self.models = [self._model(0), self._model(1)]
        self.publisher = Child(owner, [CLI, "publish", "--agent", self.trainer.socket, "--interval-ms", interval_ms,
                                       "--model", *self.models * (self.VERSIONS // 2)])
        until(lambda: (self.tmp / "out" / "current").exists(), bool)

    def _model(self, number):
        words = bf16_words(65536, 7)
        words[::100] = [word + number for word in words[::100]]
        data = pack_u16(words) * (self.elements // len(words))
        return write_model(self.tmp / f"step_{number}", {"weight": ("BF16", [self.elements // 256, 256], data)})

    def _with_pages(self, command, *options):
        child = Child(self.owner, [CLI, "--log-level", "info", command, "--http", "127.0.0.1:0", *options])
        while line := child.log_line():
            if "http_ready port=" in line:
                return child, "127.0.0.1:" + line.split("http_ready port=")[1].split()[0]
        raise AssertionError(f"{command} ended")

    def pages(self):
        """Address of each process's pages by its name, and whether they are HTTPS."""
        return {"trainer": (self.trainer.http, True), "node": (self.node.http, False),
                "relay": (self.relay_http, False), "follower": (self.follower_http, False)}

    def metrics(self, name):
        """The page /metrics of one of them."""
        http, https = self.pages()[name]
        context = ssl.create_default_context(cafile=self.certificates.ca) if https else None
        with urllib.request.urlopen(f"http{'s' if https else ''}://{http}/metrics", timeout=DEADLINE_S,
                                    context=context) as answer:
            return answer.read().decode()


class Prometheus:
    """A real one with the configuration of docs/operating/prometheus.yaml, which scrapes a fleet each second."""

    def __init__(self, owner, fleet, pods=("relay", "follower", "trainer")):
        directory = fleet.tmp / "prometheus"
        directory.mkdir()
        shutil.copy(PAGES / "alerts.yaml", directory)
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(self._configuration(fleet, directory, pods)))
        subprocess.run(["promtool", "check", "config", directory / "prometheus.yaml"], check=True, capture_output=True)
        self.address = f"127.0.0.1:{own_port(owner)}"
        self.process = Child(owner, ["prometheus", f"--config.file={directory}/prometheus.yaml",
                                     f"--storage.tsdb.path={directory}/data", f"--web.listen-address={self.address}",
                                     "--log.level=error"])
        until(self._ready, bool)

    def _configuration(self, fleet, directory, in_pods):
        """The documented one with the fleet's addresses; of pods, what Kubernetes would say comes from a file."""
        config = yaml.safe_load((PAGES / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        jobs = {job["job_name"]: job for job in config["scrape_configs"]}
        for job in jobs.values():
            if "tls_config" in job:
                job["tls_config"]["ca_file"] = str(fleet.certificates.ca)
        pages = fleet.pages()
        jobs["deltasync"]["static_configs"][0]["targets"] = [pages["trainer"][0]]
        jobs["deltasync-nodes"]["static_configs"][0]["targets"] = [pages["node"][0], pages["relay"][0]]
        pods = jobs["deltasync-pods"]
        assert pods.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        pods["tls_config"]["server_name"] = "localhost"
        pods["file_sd_configs"] = [{"files": [str(directory / "pods.json")]}]
        found = {"relay": self._pod("node-0", "relay", "deltasync-relay", pages["relay"][0]),
                 "follower": self._pod("rollout-0", "receiver", "deltasync-http", pages["follower"][0]),
                 "trainer": self._pod("trainer-0", "agent", "deltasync-https", pages["trainer"][0])}
        (directory / "pods.json").write_text(json.dumps(
            [*(found[name] for name in in_pods), self._pod("trainer-0", "agent", "deltasync", "127.0.0.1:9")]))
        return config

    @staticmethod
    def _pod(pod, container, port, address):
        meta = "__meta_kubernetes_"
        return {"targets": [address], "labels": {f"{meta}namespace": "rl", f"{meta}pod_name": pod,
                                                 f"{meta}pod_container_name": container,
                                                 f"{meta}pod_container_port_name": port}}

    def _ready(self):
        try:
            return urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=DEADLINE_S).status == 200
        except OSError:
            return False

    def ask(self, path, **parameters):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        """The instant vector, as (labels, value)."""
        return [(item["metric"], float(item["value"][1])) for item in self.ask("query", query=expression)["result"]]


assert os.environ.get("DELTASYNC_BIN"), "set DELTASYNC_BIN to the directory of deltasync and deltasync-agent"
