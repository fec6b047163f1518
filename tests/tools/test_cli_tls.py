"""Status pages over HTTPS, as operators and their probes ask for them: of agents, followers and relays."""

import signal
import ssl
import subprocess
import time
import unittest
import urllib.error
import urllib.request

from cli_support import ACCESS, BIN, CLI, CONNECTION, DEADLINE_S, UNSUPPORTED, USAGE, Agent, Child, CliTest, write_model
from openssl_certificates import Certificates  # where cli_support has pointed

AGENT = BIN / "deltasync-agent"


def get(http, page, context):
    with urllib.request.urlopen(f"https://{http}{page}", timeout=DEADLINE_S, context=context) as answer:
        return answer.read().decode()


class TlsPagesTest(CliTest):
    def setUp(self):
        super().setUp()
        self.certificates = Certificates(self.tmp)
        self.ca = self.certificates.client_options()

    def https_of(self, child):
        """The address that a process with --http names in its log."""
        while line := child.log_line():
            if "http_ready port=" in line:
                port, https = line.split("http_ready port=")[1].split()[:2]
                self.assertEqual(https, "https=1")
                return f"127.0.0.1:{port}"
        self.fail("it ended")

    def test_tool_probe_and_scraper_ask_an_agent(self):
        agent = Agent(self, AGENT, self.tmp / "agent", *self.certificates.server_options(), "--trace",
                      self.tmp / "trace.json")
        self.assertTrue(agent.ready["https"])
        url = f"https://{agent.http}"
        self.assertIn("no version is served yet", self.cli("status", "--http", url, *self.ca))
        self.assertIn("no version is served yet", self.cli("status", "--http", agent.http, *self.ca))
        self.assertEqual(self.cli_json("inspect", url, *self.ca)["endpoint"], agent.http)
        self.cli("trace", url, "--out", self.tmp / "merged.json", *self.ca)
        # Prometheus, with a ca_file.
        trusting = ssl.create_default_context(cafile=self.certificates.ca)
        self.assertIn("deltasync_build_info", get(agent.http, "/metrics", trusting))
        # A kubelet, which verifies nothing.
        careless = ssl.create_default_context()
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        self.assertEqual(get(agent.http, "/healthz", careless), "ok\n")
        # A stranger's certificate, and who did not expect one.
        with self.assertRaisesRegex(urllib.error.URLError, "CERTIFICATE_VERIFY_FAILED"):
            get(agent.http, "/healthz", ssl.create_default_context())

    def test_what_cannot_be_asked_says_why(self):
        agent = Agent(self, AGENT, self.tmp / "agent", *self.certificates.server_options())
        self.cli("status", "--http", agent.http, expect=CONNECTION)
        self.assertIn("this port speaks HTTPS only", self.err)
        self.cli("status", "--http", f"https://{agent.http}", expect=USAGE)
        self.assertIn("--tls-ca", self.err)
        other = Certificates(self.tmp, "other")
        self.cli("status", "--http", f"https://{agent.http}", "--tls-ca", other.ca, expect=ACCESS)
        self.assertIn("is not signed by a CA in", self.err)
        self.cli("inspect", f"https://{agent.http}", expect=USAGE)
        self.cli("trace", f"https://{agent.http}", expect=USAGE)
        plain = Agent(self, AGENT, self.tmp / "plain", *self.certificates.server_options("plain"), "--http-plain")
        self.assertFalse(plain.ready["https"])
        self.cli("status", "--http", plain.http)
        self.cli("status", "--http", f"https://{plain.http}", *self.ca, expect=UNSUPPORTED)
        self.assertIn("speaks without TLS", self.err)

    def test_options_that_would_do_nothing_are_refused(self):
        cert, key = self.certificates.sign("rollout")
        for options in (("--tls-name", "agent.example"), ("--tls-cert", cert, "--tls-key", key)):
            for command in (("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out"),
                            ("relay", "--from", "127.0.0.1:1", "--agent", self.tmp / "none.sock"),
                            ("status", "--http", "127.0.0.1:1"), ("inspect", "127.0.0.1:1"),
                            ("trace", "https://127.0.0.1:1")):
                self.cli(*command, *options, expect=USAGE)
                self.assertIn("--tls-ca", self.err)
        for certificate in ((), self.certificates.server_options()):
            done = subprocess.run([AGENT, "--name", "cli", "--shm-dir", self.tmp, "--http", "off", "--tls-allow", "rollout",
                                   *certificate], capture_output=True, timeout=DEADLINE_S)
            self.assertEqual(done.returncode, 1, done)
            self.assertIn(b"--tls-allow needs --tls-ca", done.stderr)
        for command in (("status", "--http"), ("inspect",), ("trace",)):
            self.cli(*command, "http://127.0.0.1:1", "--tls-ca", self.tmp / "nowhere.pem", expect=USAGE)
            self.assertIn("http:// is without TLS", self.err)

    def test_who_asks_may_have_to_show_a_certificate(self):
        agent = Agent(self, AGENT, self.tmp / "agent", *self.certificates.server_options(), *self.ca,
                      "--http-client-certificates")
        self.cli("status", "--http", agent.http, *self.ca, expect=ACCESS)
        self.assertIn("give --tls-cert and --tls-key", self.err)
        self.cli("status", "--http", agent.http, *self.certificates.client_options("monitor"))
        for options in (self.certificates.server_options(), ()):
            done = subprocess.run([AGENT, "--name", "cli", "--shm-dir", self.tmp, "--http-client-certificates", *options],
                                  capture_output=True, timeout=DEADLINE_S)
            self.assertEqual(done.returncode, 1, done)
            self.assertIn(b"--tls-ca", done.stderr)

    def test_a_follower_waits_for_a_certificate_that_is_being_replaced(self):
        port = self.held_port()
        options = (*self.certificates.server_options(), *self.ca)
        agent = Agent(self, AGENT, self.tmp / "agent", *options, listen=port.endpoint)
        cert, key = self.certificates.sign("rollout")
        good = cert.read_bytes()
        first, second = self.successive(2)
        self.cli("publish", "--agent", agent.socket, "--model", first)
        follower = Child(self, [CLI, "pull", "--from", agent.endpoint, "--out", self.tmp / "out", "--json", "--follow",
                                "--count", "2", *self.ca, "--tls-cert", cert, "--tls-key", key])
        self.assertEqual(follower.line()["label"], "step_0")
        self.assertEqual(agent.end(signal.SIGTERM)[0], 0)
        cert.write_text("")
        other = write_model(self.tmp / "other", {"t": ("U8", [4], b"abcd")})
        agent = Agent(self, AGENT, self.tmp / "agent", *options, listen=port.endpoint)
        self.cli("publish", "--agent", agent.socket, "--model", other)
        line = ""
        while "pull_failed" not in line or "invalid_argument" not in line:
            line = follower.log_line()
            self.assertNotEqual(line, "", "it ended")
        cert.write_bytes(good)
        self.assertEqual(follower.line()["label"], "other")
        self.assertEqual(follower.end()[0], 0)

    def test_a_follower_and_a_relay_show_the_certificate_that_they_have(self):
        agent = Agent(self, AGENT, self.tmp / "agent", *self.certificates.server_options(), *self.ca)
        node = Agent(self, AGENT, self.tmp / "node")
        cert, key = self.certificates.sign("rollout", "IP:127.0.0.1")
        tls = (*self.ca, "--tls-cert", cert, "--tls-key", key)
        for command in (("pull", "--follow", "--out", self.tmp / "out"), ("relay", "--agent", node.socket)):
            child = Child(self, [CLI, "--log-level", "info", *command, "--from", agent.endpoint, *tls, "--http",
                                 "127.0.0.1:0"])
            http = self.https_of(child)
            self.assertEqual(self.cli_json("status", "--http", http, *self.ca)["role"], command[0])
            metrics = get(http, "/metrics", ssl.create_default_context(cafile=self.certificates.ca))
            ends = float(metrics.split("\ndeltasync_tls_certificate_not_after_timestamp_seconds ")[1].split()[0])
            self.assertAlmostEqual(ends - time.time(), 60 * 86400, delta=600)
            self.cli("status", "--http", http, expect=CONNECTION)
            self.assertIn("this port speaks HTTPS only", self.err)
        self.cli("pull", "--follow", "--out", self.tmp / "out2", "--from", agent.endpoint, *self.ca, "--http",
                 "127.0.0.1:0", "--http-client-certificates", expect=USAGE)
        self.assertIn("--tls-cert", self.err)


if __name__ == "__main__":
    unittest.main()
