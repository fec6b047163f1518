"""Every command line that docs/operating shows is run by the real programs, with other files and addresses."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

from operating_support import (
    AGENT,
    BIN,
    CLI,
    DEADLINE_S,
    KUBERNETES,
    PAGES,
    Certificates,
    Child,
    Cleanups,
    Fleet,
    bf16_words,
    documents,
    own_port,
    pack_u16,
    until,
    write_model,
)

AGENTS_OWN = {"--listen": "127.0.0.1:0", "--http": "127.0.0.1:0"}


def shell_lines(text):
    """Lines of a page's code blocks, those that go on as one."""
    blocks = re.findall(r"^ *```(?:sh)?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines())


def page_commands(program):
    """(page, arguments) of each command of the program in a code block of a page."""
    for page in PAGES.glob("*.md"):
        for line in shell_lines(page.read_text()):
            if line.split(" ")[0] == program:
                yield page.name, shlex.split(line)[1:]


def unit_commands():
    """What systemd runs: with the unit's own options, and with those that its comment and the page give as examples."""
    unit = (PAGES / "deltasync-agent@.service").read_text()
    command = shlex.split(re.search(r"^ExecStart=deltasync-agent (.*)$", unit, re.MULTILINE)[1])
    page = (PAGES / "installing.md").read_text()
    options = re.findall(r"DELTASYNC_AGENT_OPTIONS=(.*?)[\"']?$", unit + page.replace("' \\\n", "'\n"), re.MULTILINE)
    assert len(options) == 3, options
    for given in options:
        yield "unit", [part for argument in command
                       for part in (given.split() if argument == "$DELTASYNC_AGENT_OPTIONS" else [argument])]


def image_commands():
    text = (PAGES / "Containerfile").read_text()
    program, = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    assert program == "deltasync-agent"
    yield "Containerfile", json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])


def replace_options(arguments, values):
    """Each `--name value` and `--name=value` whose name is in `values` with that value instead."""
    out, name = [], None
    for argument in arguments:
        if name is not None:
            out.append(str(values[name]))
            name = None
        elif argument in values:
            out.append(argument)
            name = argument
        elif argument.split("=")[0] in values:
            out.append(f"{argument.split('=')[0]}={values[argument.split('=')[0]]}")
        else:
            out.append(argument)
    return out


class CommandsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.fleet = Fleet(Cleanups(cls))
        cls.cert, cls.key = cls.fleet.certificates.sign("command", "DNS:localhost,IP:127.0.0.1")

    def setUp(self):
        self.directory = tempfile.mkdtemp(dir=self.fleet.tmp)

    def tls(self):
        return {"--tls-cert": self.cert, "--tls-key": self.key, "--tls-ca": self.fleet.certificates.ca}

    def test_agents_start(self):
        commands = [*page_commands("deltasync-agent"), *unit_commands(), *image_commands()]
        self.assertGreaterEqual(len(commands), 4)
        for number, (where, arguments) in enumerate(commands):
            with self.subTest(where, arguments=arguments):
                ready = f"{self.directory}/{number}.json"
                values = {**AGENTS_OWN, **self.tls(), "--token-file": self.fleet.token,
                          "--socket": f"{self.directory}/agent.sock", "--name": f"commands-{os.getpid()}"}
                child = Child(self, [AGENT, *replace_options(arguments, values), "--shm-dir", self.directory,
                                     "--ready-file", ready])
                self.wait_for_file(ready, child)
                status, _, log = child.end(signal.SIGTERM)
                self.assertEqual(status, 0, log)

    def wait_for_file(self, path, child):
        until(lambda: os.path.exists(path) or child.process.poll() is not None, bool)

    def test_the_command_line_does_what_the_pages_say(self):
        commands = list(page_commands("deltasync"))
        self.assertTrue(commands)
        for number, (where, arguments) in enumerate(commands):
            with self.subTest(where, arguments=arguments):
                self.run_command(arguments, f"{self.directory}/{number}")

    def write_fleet(self):
        """The files that planning.md names: the fleet that it shows, and the least that counts as benchmarks."""
        fleet, = re.findall(r'```toml title="fleet.toml"\n(.*?)```', (PAGES / "planning.md").read_text(), re.DOTALL)
        bench = '{"case": "e2e", "model_gib": 0.001, "total_s": 0.01}'
        for name, text in (("fleet.toml", fleet), ("bench.json", bench)):
            with open(f"{self.directory}/{name}", "w") as file:
                file.write(text)

    def run_command(self, arguments, out):
        values = {"--from": self.fleet.node.endpoint, "--out": out, "--token-file": self.fleet.token,
                  "--http": self.fleet.node.http if arguments[0] == "status" else "127.0.0.1:0"}
        if "--follow" in arguments:
            arguments = [*arguments, "--count", "1"]
        if arguments[0] == "plan":
            self.write_fleet()
        done = subprocess.run([CLI, *replace_options(arguments, values)], capture_output=True, text=True,
                              cwd=self.directory, timeout=4 * DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stderr)


class ManifestsRunTest(unittest.TestCase):
    """The processes of the Kubernetes manifests, as they stand there but for files and addresses of this machine."""

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="deltasync-manifests-")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.certificates = Certificates(self.directory)
        self.cert, self.key = self.certificates.sign("deltasync-trainer", "DNS:localhost,DNS:deltasync-trainer")
        self.token = f"{self.directory}/token"
        with open(self.token, "w") as file:
            file.write("a token that is long enough")
        os.chmod(self.token, 0o600)

    def start(self, file, name, agent_of=None):
        """Runs a container of a pod. Returns it and the number of each of its ports here."""
        spec, = [document["spec"]["template"]["spec"] for document in documents(KUBERNETES / file)
                 if "template" in document["spec"]]
        container, = [c for c in [*spec["initContainers"], *spec["containers"]] if c["name"] == name]
        ports = {port["containerPort"]: own_port(self) for port in container["ports"]}
        values = {"--token-file": self.token, "--tls-cert": self.cert, "--tls-key": self.key,
                  "--tls-ca": self.certificates.ca,
                  "--socket": f"{self.directory}/{file}.sock", "--agent": f"{self.directory}/{file}.sock",
                  "--out": f"{self.directory}/policy"}
        for argument in container["args"]:
            option, _, value = argument.partition("=")
            if option in ("--listen", "--http"):
                values[option] = f"127.0.0.1:{ports[int(value.rsplit(':', 1)[1])]}"
            elif option == "--name":
                values[option] = f"{value}-{os.getpid()}"
            elif option == "--from":
                self.assertEqual(value, "deltasync-trainer:7070")
                values[option] = f"localhost:{agent_of[7070]}"
        program = container.get("command", ["deltasync-agent"])
        more = [] if "command" in container else ["--shm-dir", self.directory]
        child = Child(self, [BIN / program[0], *program[1:], *replace_options(container["args"], values), *more],
                      stdin=subprocess.DEVNULL)
        return child, container, ports

    def ask(self, container, ports, probe):
        """What the kubelet would get: the status, or 0 if nobody answers."""
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        get = container[probe].get("httpGet")
        if get is None:
            with socket.create_connection(("127.0.0.1", ports[named[container[probe]["tcpSocket"]["port"]]])):
                return 200
        careless = ssl.create_default_context()
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        url = f"{get.get('scheme', 'HTTP').lower()}://127.0.0.1:{ports[named[get['port']]]}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=get.get("timeoutSeconds", DEADLINE_S),
                                        context=careless if url.startswith("https") else None) as answer:
                return answer.status
        except urllib.error.HTTPError as refused:
            return refused.code
        except OSError:
            return 0

    def wait_until_ok(self, pod, probe):
        until(lambda: self.ask(*pod[1:], probe), lambda status: status == 200)

    def test_a_version_goes_from_the_trainer_to_the_nodes_and_probes_say_so(self):
        trainer = self.start("trainer.yaml", "agent")
        self.wait_until_ok(trainer, "startupProbe")
        self.assertEqual(self.ask(*trainer[1:], "readinessProbe"), 503)
        node = self.start("relay.yaml", "agent")
        self.wait_until_ok(node, "startupProbe")
        relay = self.start("relay.yaml", "relay", trainer[2])
        receiver = self.start("rollout.yaml", "receiver", trainer[2])
        self.wait_until_ok(receiver, "livenessProbe")
        self.assertEqual(self.ask(*receiver[1:], "startupProbe"), 503)
        model = write_model(pathlib.Path(self.directory) / "step_1",
                            {"weight": ("BF16", [64, 64], pack_u16(bf16_words(4096, 1)))})
        subprocess.run([CLI, "publish", "--agent", f"{self.directory}/trainer.yaml.sock", "--model", model], check=True,
                       capture_output=True, timeout=DEADLINE_S)
        for pod in (trainer, node, relay, receiver):
            with self.subTest(pod[1]["name"]):
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    if probe in pod[1]:
                        self.wait_until_ok(pod, probe)
        self.assertTrue(os.path.exists(f"{self.directory}/policy/current/model.safetensors"))
        for child, container, _ in (receiver, relay, node, trainer):
            status, _, log = child.end(signal.SIGTERM)
            self.assertIn(status, (0, 128 + signal.SIGTERM), f"{container['name']}: {log}")


class ContainerfileTest(unittest.TestCase):
    def test_the_linter_finds_nothing(self):
        hadolint = os.path.join(os.path.dirname(sys.executable), "hadolint")
        done = subprocess.run([hadolint, PAGES / "Containerfile"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
