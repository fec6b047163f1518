"""`deltasync doctor`: what it finds on a host and at an agent, what it advises, and its exit code."""

import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import time
import unittest

from cli_support import (ACCESS, BIN, CONNECTION, DEADLINE, DEADLINE_S, MISSING, NO_SPACE, UNSUPPORTED, USAGE, Agent, Child,
                         CliTest)
from openssl_certificates import Certificates  # where cli_support has pointed

AGENT = BIN / "deltasync-agent"
TIB = 1 << 40


def token_file(path, text="a secret of the doctor's tests"):
    path.write_text(text)
    path.chmod(0o600)
    return path


class DoctorTest(CliTest):
    def doctor(self, *options, **how):
        """Check → its finding."""
        lines = self.cli("doctor", "--json", *options, **how).splitlines()
        findings = [json.loads(line) for line in lines]
        for finding in findings:
            self.assertEqual(finding["event"], "checked")
            self.assertEqual(finding["state"] == "ok", finding["remedy"] == "", finding)
        return {finding["check"]: finding for finding in findings}

    def states(self, findings):
        return {check: finding["state"] for check, finding in findings.items()}

    def large_model(self):
        """4 TiB of a hole, which no machine has in memory."""
        directory = self.tmp / "large"
        directory.mkdir()
        header = json.dumps({"w": {"dtype": "BF16", "shape": [1 << 21, 1 << 20], "data_offsets": [0, 4 * TIB]}}).encode()
        with open(directory / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            try:
                file.truncate(8 + len(header) + 4 * TIB)
            except OSError as error:
                self.skipTest(f"no file of 4 TiB here: {error}")
        (directory / "config.json").write_text("{}")
        return directory


class HostTest(DoctorTest):
    def test_a_host_that_an_agent_can_run_on(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        found = self.doctor("--model", self.model("small"), "--name", f"doctor-{os.getpid()}",
                            "--listen", f"127.0.0.1:{port}", "--receivers-max", "1",
                            "--token-file", token_file(self.tmp / "token"))
        self.assertEqual(list(found), ["shared_memory", "huge_pages", "memory", "open_files", "port", "token"])
        states = self.states(found)
        self.assertIn(states.pop("huge_pages"), ("ok", "warning"))  # of the machine
        self.assertEqual(set(states.values()), {"ok"})
        self.assertRegex(found["shared_memory"]["found"], r"^/dev/shm has .* free; .* are needed$")

    def test_a_model_that_does_not_fit(self):
        found = self.doctor("--model", self.large_model(), expect=NO_SPACE)
        self.assertEqual(found["shared_memory"]["state"], "error")
        self.assertIn("--shm-size", found["shared_memory"]["remedy"])
        self.assertEqual(found["memory"]["state"], "error")
        # Two halves and two rings of a twentieth; three more rings and 512 MiB of the agent.
        shared, memory = (int(re.findall(r"\((\d+) bytes\)", found[check]["found"])[-1])
                          for check in ("shared_memory", "memory"))
        half = 4 * TIB
        self.assertAlmostEqual(shared / (2.1 * half), 1, places=2)
        self.assertAlmostEqual(memory / (2.25 * half), 1, places=2)
        self.assertIn("2 of 4 checks failed", self.err)

    def test_what_an_agent_of_the_name_goes_on_with_is_no_lack(self):
        agent = Agent(self, AGENT, self.tmp / "agent")
        self.cli("publish", "--agent", agent.socket, "--model", self.model("small"))
        segment, = agent.directory.glob("cli.g*")
        of = ("--shm-dir", agent.directory, "--name", "cli", "--model")
        found = self.doctor(*of, self.tmp / "small")["shared_memory"]["found"]
        self.assertIn("beside 6.00 MiB that an agent of this name has already", found)
        holes = self.tmp / "holes"
        holes.mkdir()
        subprocess.run(["cp", "--sparse=always", "--preserve=mode", segment, holes], check=True)
        found = self.doctor("--shm-dir", holes, "--name", "cli", "--model", self.tmp / "small")["shared_memory"]["found"]
        self.assertRegex(found, r"beside .* KiB that an agent of this name has already")
        # Both are there until the first version of the new layout is.
        self.assertNotIn("already", self.doctor(*of, self.model("other", extra=["more"]))["shared_memory"]["found"])
        with open(agent.directory / "cli.g99", "wb") as foreign:
            foreign.truncate(9 * TIB)
        self.doctor(*of, self.large_model(), expect=NO_SPACE)

    def test_no_model_and_no_directory(self):
        self.assertEqual(self.doctor("--model", self.tmp / "no", expect=MISSING)["model"]["state"], "error")
        found = self.doctor("--shm-dir", self.tmp / "no", expect=MISSING)
        self.assertEqual(found["shared_memory"]["state"], "error")
        self.assertIn("--shm-dir", found["shared_memory"]["remedy"])

    def test_what_is_no_directory(self):
        program = self.tmp / "program"
        program.write_text("")
        program.chmod(0o755)  # which access() lets everybody search, were it a directory
        found = self.doctor("--shm-dir", program, expect=10)
        self.assertEqual(found["shared_memory"]["state"], "error")
        self.assertNotIn("huge_pages", found, "which nobody can have in it")

    def test_no_room_for_one_huge_page(self):
        if os.geteuid() != 0:
            self.skipTest("only root can mount a small tmpfs")
        small = self.tmp / "small"
        small.mkdir()
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
        if mount.returncode != 0:
            self.skipTest(mount.stderr.decode())
        self.addCleanup(subprocess.run, ["umount", small], check=True)
        found = self.doctor("--shm-dir", small)["huge_pages"]
        self.assertEqual(found["state"], "warning")
        self.assertIn("make room", found["remedy"])

    def test_few_open_files(self):
        def few():
            resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))

        found = self.doctor(preexec_fn=few)["open_files"]
        self.assertEqual(found["state"], "warning")
        self.assertIn("no more than 186 receivers", found["found"])
        self.assertIn("ulimit -Hn 11584", found["remedy"])
        found = self.doctor("--receivers-max", "5000", preexec_fn=few, expect=USAGE)["open_files"]
        self.assertEqual(found["state"], "error")

    def test_a_port_that_is_taken(self):
        port = self.held_port()
        agent = Agent(self, AGENT, self.tmp / "agent", listen=port.endpoint)
        found = self.doctor("--listen", agent.endpoint, expect=MISSING)["port"]
        self.assertEqual(found["state"], "error")
        self.assertIn("ss -ltnp", found["remedy"])
        found = self.doctor("--listen", "0.0.0.0:0", expect=ACCESS)["port"]
        self.assertIn("--token-file", found["remedy"])
        token = token_file(self.tmp / "token")
        self.assertEqual(self.doctor("--listen", "0.0.0.0:0", "--token-file", token)["port"]["state"], "ok")

    def test_files_of_token_and_tls(self):
        token = token_file(self.tmp / "token")
        token.chmod(0o644)
        found = self.doctor("--token-file", token, expect=ACCESS)["token"]
        self.assertEqual((found["state"], found["remedy"]), ("error", f"chmod 600 {token}"))
        if os.geteuid() == 0:
            token_file(token)
            os.chown(token, 12345, 12345)
            self.assertIn("run this as the user", self.doctor("--token-file", token, expect=ACCESS)["token"]["remedy"])
        token.unlink()
        token_file(token, "short")
        self.assertIn("openssl rand", self.doctor("--token-file", token, expect=USAGE)["token"]["remedy"])
        certificates = Certificates(self.tmp)
        options = certificates.server_options()
        self.assertIn("certificates until 2", self.doctor(*options)["tls"]["found"])
        options[1].write_text("no certificate")
        self.assertEqual(self.doctor(*options, expect=USAGE)["tls"]["state"], "error")

    def test_text_for_people(self):
        text = self.cli("doctor", "--token-file", self.tmp / "no", expect=MISSING)
        self.assertRegex(text, r"(?m)^ok +open_files +\d+ may be open")
        self.assertRegex(text, r"(?m)^error +token +.*no.*\n +remedy: name the file that the agent has")
        self.assertIn("1 of 5 checks failed", self.err)


class AgentTest(DoctorTest):
    def test_an_agent_of_this_user(self):
        agent = Agent(self, AGENT, self.tmp / "agent")
        found = self.doctor("--from", agent.endpoint, "--http", agent.http)
        self.assertEqual(found.pop("versions")["state"], "warning")
        self.assertEqual(self.states(found), {check: "ok" for check in ("agent", "handshake", "protocol", "release")})
        self.assertIn("no receiver is connected", self.cli("status", "--http", agent.http))

    def test_whether_newer_versions_come(self):
        agent = Agent(self, AGENT, self.tmp / "agent")
        node = Agent(self, AGENT, self.tmp / "node")

        def versions(of):
            return self.doctor("--http", of.http)["versions"]

        self.assertIn("no version is served yet, and no trainer", versions(agent)["found"])
        self.cli("publish", "--agent", agent.socket, "--model", self.model("small"))
        said = versions(agent)
        self.assertIn("nothing newer comes", said["found"])
        self.assertIn("if it went on elsewhere", said["remedy"])
        relay = Child(self, [BIN / "deltasync", "relay", "--from", agent.endpoint, "--agent", node.socket, "--json"])
        self.assertEqual(relay.line()["event"], "relayed")
        self.assertEqual((versions(node)["state"], versions(node)["found"]), ("ok", "a version is served, and 1 writer is attached"))
        relay.kill()
        end = time.monotonic() + DEADLINE_S
        while "cut off for" not in (said := versions(node))["found"]:
            self.assertLess(time.monotonic(), end, said)
        self.assertEqual(said["state"], "warning")
        self.assertIn("start it again", said["found"])
        self.assertRegex(self.cli("status", "--http", node.http), r"(?m)^cut off for .*start it again$")
        # So does its next agent, which gives the relay some time to be there again.
        node.kill()
        (self.tmp / "node" / "ready.json").unlink()
        node = Agent(self, AGENT, self.tmp / "node")
        self.assertNotIn("cut off", versions(node)["found"])
        end = time.monotonic() + DEADLINE_S
        while "cut off for" not in (said := versions(node))["found"]:
            self.assertLess(time.monotonic(), end, said)
            time.sleep(0.5)
        self.assertIn(f"from {agent.endpoint} is gone: start it again", said["found"])

    def test_tokens(self):
        token = token_file(self.tmp / "token")
        agent = Agent(self, AGENT, self.tmp / "agent", "--token-file", token)
        found = self.doctor("--from", agent.endpoint, "--token-file", token)
        self.assertIn("the agent takes the token", found["handshake"]["found"])
        other = token_file(self.tmp / "other", "another secret of these tests")
        for options in ([], ["--token-file", other]):
            found = self.doctor("--from", agent.endpoint, *options, expect=ACCESS)
            self.assertEqual((found["agent"]["state"], found["handshake"]["state"]), ("ok", "error"))
            self.assertIn("--token-file", found["handshake"]["remedy"])
        other.chmod(0o640)
        found = self.doctor("--from", agent.endpoint, "--token-file", other, expect=ACCESS)
        self.assertEqual(self.states(found), {"token": "error"}, "it is not sent to anybody")

    def test_nobody_and_somebody_else(self):
        port = self.held_port()
        found = self.doctor("--from", port.endpoint, expect=CONNECTION)
        self.assertEqual(self.states(found), {"agent": "error"})
        self.assertIn("--listen", found["agent"]["remedy"])
        agent = Agent(self, AGENT, self.tmp / "agent")
        found = self.doctor("--from", agent.http, "--deadline-s", "1", expect=4)
        self.assertEqual(found["handshake"]["state"], "error")
        self.doctor("--http", agent.endpoint, expect=CONNECTION)
        self.doctor("--from", "nowhere", expect=USAGE)
        self.doctor("--from", agent.endpoint, "--listen", "127.0.0.1:0", expect=USAGE)

    def test_one_that_is_stopped(self):
        agent = Agent(self, AGENT, self.tmp / "agent")
        os.killpg(agent.process.pid, signal.SIGSTOP)
        found = self.doctor("--from", agent.endpoint, "--http", agent.http, "--deadline-s", "1", expect=DEADLINE)
        self.assertEqual(self.states(found), {"agent": "ok", "handshake": "error", "release": "error"})
        for check in ("handshake", "release"):
            self.assertIn("is the agent stopped", found[check]["remedy"])

    def test_tls(self):
        certificates = Certificates(self.tmp)
        agent = Agent(self, AGENT, self.tmp / "agent", *certificates.server_options())
        found = self.doctor("--from", agent.endpoint, "--http", agent.http, *certificates.client_options())
        self.assertEqual({check for check, state in self.states(found).items() if state != "ok"}, {"versions"})
        self.assertIn("over TLS", found["handshake"]["found"])
        found = self.doctor("--from", agent.endpoint, expect=UNSUPPORTED)
        self.assertIn("TLS on both sides", found["handshake"]["remedy"])
        found = self.doctor("--from", agent.endpoint, "--token-file", self.tmp / "no", *certificates.client_options(),
                            expect=MISSING)
        self.assertEqual(self.states(found), {"token": "error", "tls": "ok"})


if __name__ == "__main__":
    unittest.main(verbosity=2)
