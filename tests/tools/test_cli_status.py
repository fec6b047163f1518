"""`deltasync status`, and the pages of agents, followers and relays: what an operator sees."""

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import time
import unittest
import urllib.error
import urllib.request

from cli_support import BIN, CLI, CONNECTION, DEADLINE, DEADLINE_S, USAGE, Agent, Child, CliTest, sha256

AGENT = BIN / "deltasync-agent"


def get(http, page):
    """Status and text of a page."""
    try:
        with urllib.request.urlopen(f"http://{http}{page}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


class StatusTest(CliTest):
    def publisher(self, models):
        publisher = Child(self, [CLI, "publish", "--agent", self.agent.socket, "--step-on-stdin", "--json", "--model",
                                 *models], stdin=subprocess.PIPE)
        self.publisher_in = publisher.process.stdin

        def step():
            self.publisher_in.write(b"\n")
            self.publisher_in.flush()
            self.assertEqual(publisher.line()["event"], "published")

        return step

    def with_pages(self, command, *options):
        """A process with --http on a free port, which its log names. Returns it and the pages' address."""
        child = Child(self, [CLI, "--log-level", "info", command, "--http", "127.0.0.1:0", "--json", *options])
        while True:
            line = child.log_line()
            self.assertTrue(line, "it ended")
            if "http_ready port=" in line:
                return child, "127.0.0.1:" + line.split("http_ready port=")[1].split()[0]

    def until(self, what, wanted):
        """Asks again until `wanted(answer)`; the last answer is in the failure."""
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = what()
            if wanted(answer):
                return answer
            self.assertLess(time.monotonic(), end, answer)
            time.sleep(0.05)

    def test_an_agent_and_its_receivers(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        self.assertIn("no version is served yet", self.cli("status", "--http", self.agent.http))
        self.assertEqual(get(self.agent.http, "/readyz")[0], 503)
        step = self.publisher(self.successive(3))
        step()
        self.assertEqual(get(self.agent.http, "/readyz")[0], 200)
        self.assertEqual(get(self.agent.http, "/healthz"), (200, "ok\n"))
        follower, _ = self.with_pages("pull", "--from", self.agent.endpoint, "--out", self.tmp / "out", "--follow")
        self.assertEqual(follower.line()["label"], "step_0")

        def committed(label):
            page = self.cli_json("status", "--from", self.agent.http)
            return [line["committed"] and line["committed"]["label"] for line in page["receivers"]] == [label]

        self.until(lambda: committed("step_0"), bool)
        follower.process.send_signal(signal.SIGHUP)  # its terminal is closed
        step()
        self.assertEqual(follower.line()["label"], "step_1")
        self.until(lambda: committed("step_1"), bool)
        text = self.cli("status", "--http", self.agent.http)
        self.assertIn("RECEIVER", text)
        self.assertRegex(text, r"deltasync pull +127\.0\.0\.1:\d+ +step_1 \([0-9a-f]{16}:2\) +0 +- +-\n")
        self.assertRegex(text, r"step_1 \([0-9a-f]{16}:2\) +\S+ (\S+ )?ago ")
        follower.kill()
        self.until(lambda: self.cli("status", "--http", self.agent.http), lambda text: "lost " in text)
        other, _ = self.with_pages("pull", "--from", self.agent.endpoint, "--out", self.tmp / "other", "--follow")
        other.line()
        other.end(signal.SIGTERM)
        self.until(lambda: self.cli("status", "--http", self.agent.http), lambda text: "left " in text)
        counts = get(self.agent.http, "/metrics")[1]
        for line in ('deltasync_receivers{state="left"} 1', 'deltasync_receivers{state="lost"} 1'):
            self.assertIn("\n" + line + "\n", counts)

    def test_when_a_version_was_published_before_the_agent_started_is_not_known(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        self.cli("publish", "--agent", self.agent.socket, "--model", *self.successive(3))
        self.agent.kill()
        (self.tmp / "agent" / "ready.json").unlink()
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        page = self.until(lambda: self.cli_json("status", "--http", self.agent.http), lambda page: page["active"])
        self.assertTrue(page["active"]["found_at_start"])
        lines = self.cli("status", "--http", self.agent.http).splitlines()
        versions = [line for line in lines if line.startswith("step_")]
        self.assertGreater(len(versions), 0)
        for line in versions:
            self.assertIn("before this agent's start", line)
        self.cli("publish", "--agent", self.agent.socket, "--model", *self.successive(1))
        self.assertRegex(self.cli("status", "--http", self.agent.http), r"step_0 \([0-9a-f]{16}:1\) +\S+ (\S+ )?ago ")

    def test_how_a_follower_stands(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        follower, http = self.with_pages("pull", "--from", self.agent.endpoint, "--out", self.tmp / "out", "--follow",
                                         "--ready-lag", "1")
        self.assertEqual(get(http, "/healthz"), (200, "ok\n"))
        status, page = get(http, "/readyz")
        self.assertEqual((status, json.loads(page)["reason"]), (503, "no version is held yet"))
        step = self.publisher(self.successive(4))
        step()
        self.assertEqual(follower.line()["mode"], "full")
        self.assertEqual(get(http, "/readyz"), (200, "ready\n"))
        page = self.cli_json("status", "--http", http)
        self.assertEqual((page["role"], page["held"]["label"], page["versions_behind"], page["last_error"]),
                         ("pull", "step_0", 0, ""))
        self.assertEqual(page["last_pull"]["mode"], "full")
        self.assertRegex(self.cli("status", "--http", http), r"step_0 \([0-9a-f]{16}:1\) +step_0 .* 0 +- +-\n")
        metrics = get(http, "/metrics")[1]
        for line in ('deltasync_pulls_total{mode="full"} 1', "deltasync_versions_behind 0", "deltasync_version_held 1",
                     "deltasync_agent_reached 1", "deltasync_failing 0", "deltasync_pull_duration_seconds_count 1",
                     "deltasync_commit_duration_seconds_count 1", "deltasync_pull_failures_total 0"):
            self.assertIn("\n" + line + "\n", metrics)
        if shutil.which("promtool"):
            done = subprocess.run(["promtool", "check", "metrics"], input=metrics.encode(), capture_output=True)
            self.assertEqual(done.returncode, 0, done)

        self.agent.kill()
        page = self.until(lambda: self.cli_json("status", "--http", http), lambda page: page["newest"] is None)
        self.assertIsNone(page["versions_behind"])
        self.assertEqual(page["held"]["label"], "step_0")
        self.assertIn(self.agent.endpoint, page["last_error"])
        self.assertEqual(page["heard_newest"]["label"], "step_0")
        self.assertRegex(self.cli("status", "--http", http), r"step_0 \(\S+\), heard \S+ (\S+ )?ago +unknown")
        metrics = get(http, "/metrics")[1]
        self.assertNotIn("deltasync_versions_behind ", metrics)
        self.assertIn("\ndeltasync_agent_reached 0\n", metrics)
        self.assertEqual(get(http, "/readyz"), (200, "ready\n"), "it goes by what it heard last")

    def test_numbers_that_mean_nothing_are_refused(self):
        for options in (("--number", "-1"), ("--follow", "--count", "-1"), ("--follow", "--count", "0"),
                        ("--follow", "--http", "127.0.0.1:0", "--ready-lag", "-1")):
            self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", *options, expect=USAGE)
            self.assertIn(next(o for o in reversed(options) if o.startswith("--")), self.err)
        self.cli("relay", "--from", "127.0.0.1:1", "--agent", self.tmp / "none.sock", "--count", "0", expect=USAGE)

    def test_a_follower_that_is_not_let_in_says_so(self):
        port = self.held_port()
        self.agent = Agent(self, AGENT, self.tmp / "agent", listen=port.endpoint)
        self.publisher(self.successive(1))()
        follower, http = self.with_pages("pull", "--from", self.agent.endpoint, "--out", self.tmp / "out", "--follow",
                                         "--ready-lag", "1")
        self.assertEqual(follower.line()["mode"], "full")
        self.agent.kill()
        (self.tmp / "agent" / "ready.json").unlink()
        token = self.tmp / "token"
        token.write_text("another secret of this agent")
        token.chmod(0o600)
        self.agent = Agent(self, AGENT, self.tmp / "agent", "--token-file", token, listen=port.endpoint)
        while "unauthenticated" not in (line := follower.log_line()):
            self.assertTrue(line, "it ended")
        status, page = get(http, "/readyz")
        self.assertEqual(status, 503)
        self.assertIn("unauthenticated", json.loads(page)["reason"])

    def test_one_that_is_too_far_behind_is_not_ready(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        models = self.successive(5)
        step = self.publisher(models)
        step()
        follower, http = self.with_pages("pull", "--from", self.agent.endpoint, "--out", self.tmp / "out", "--follow",
                                         "--ready-lag", "1")
        self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)
        # It says each version in a line, and stands still where there is no room for one.
        filler = os.open(f"/proc/{follower.process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
        lines = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filler, b'{"label": ""}\n')
                lines += 1
        os.close(filler)
        for _ in models[1:]:
            step()
        page = json.loads(self.until(lambda: get(http, "/v1/status")[1],
                                     lambda page: json.loads(page)["versions_behind"] > 1))
        self.assertGreater(page["seconds_behind"], page["newest_age_s"])
        status, page = get(http, "/readyz")
        self.assertEqual(status, 503)
        self.assertIn("--ready-lag allows 1", json.loads(page)["reason"])
        for _ in range(lines + len(models)):
            if follower.line()["label"] == models[-1].name:
                break
        self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)

    def test_a_relay_has_the_same_pages(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        node = Agent(self, AGENT, self.tmp / "node")
        step = self.publisher(self.successive(2))
        step()
        relay, http = self.with_pages("relay", "--from", self.agent.endpoint, "--agent", node.socket)
        self.assertEqual(relay.line()["event"], "relayed")
        page = self.cli_json("status", "--http", http)
        self.assertEqual((page["role"], page["held"]["label"], page["versions_behind"]), ("relay", "step_0", 0))
        self.assertIn("\ndeltasync_version_held 1\n", get(http, "/metrics")[1])
        self.assertEqual(get(http, "/readyz")[0], 200)
        self.until(lambda: self.cli_json("status", "--http", self.agent.http)["receivers"],
                   lambda lines: [line["name"] for line in lines] == ["deltasync relay"]
                   and lines[0]["committed"]["label"] == "step_0")

    def relayed_node(self):
        """A trainer that has published one version and pauses, its agent, a node's agent, and a relay between them."""
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        self.node_port = self.held_port()
        self.node = Agent(self, AGENT, self.tmp / "node", listen=self.node_port.endpoint)
        self.step = self.publisher(self.successive(2))
        self.step()
        self.relay, http = self.with_pages("relay", "--from", self.agent.endpoint, "--agent", self.node.socket)
        self.assertEqual(self.relay.line()["event"], "relayed")
        self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)
        return http

    def start_node_again(self):
        (self.tmp / "node" / "ready.json").unlink()
        self.node = Agent(self, AGENT, self.tmp / "node", listen=self.node_port.endpoint)

    def not_served_seconds(self, http):
        line = next(line for line in get(http, "/metrics")[1].splitlines()
                    if line.startswith("deltasync_not_served_seconds "))
        return float(line.split()[1])

    def test_a_node_that_lost_its_version_has_it_again_while_the_trainer_pauses(self):
        http = self.relayed_node()
        follower = Child(self, [CLI, "pull", "--from", self.node.endpoint, "--out", self.tmp / "out", "--follow", "--json"])
        self.assertEqual(follower.line()["label"], "step_0")
        self.node.kill()
        for left in (self.tmp / "node").glob("cli*"):
            left.unlink()
        self.start_node_again()
        again = self.relay.line()
        self.assertEqual((again["event"], again["label"], again["mode"], again["served"]),
                         ("relayed", "step_0", "full", True))
        self.cli("pull", "--from", self.node.endpoint, "--out", self.tmp / "other")
        self.assertEqual(sha256(self.tmp / "other" / "current" / "model.safetensors"),
                         sha256(self.tmp / "step_0" / "model.safetensors"))
        self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)
        self.assertEqual(self.not_served_seconds(http), 0)
        self.step()
        self.assertEqual(follower.line()["label"], "step_1")
        code, _, log = self.relay.end(signal.SIGTERM)
        self.assertEqual(code, 128 + signal.SIGTERM)
        self.assertIn("relayed_version_not_served", log)
        self.assertIn("without its segment", log)

    def test_a_relay_is_not_ready_while_its_nodes_agent_is_dead_or_stopped(self):
        http = self.relayed_node()
        socket = str(self.node.socket)

        def not_ready(remedy):
            reason = json.loads(self.until(lambda: get(http, "/readyz"), lambda page: page[0] == 503)[1])["reason"]
            self.assertIn(f"the agent on {socket} does not serve", reason)
            self.assertIn(remedy, reason)
            page = self.cli_json("status", "--http", http)
            self.assertIn(socket, page["last_error"])
            self.assertGreater(page["not_served_s"], 0)
            self.assertGreater(self.not_served_seconds(http), 0)
            self.assertIn("\ndeltasync_failing 1\n", get(http, "/metrics")[1])
            self.until(lambda: self.cli("status", "--http", self.agent.http), lambda text: socket in text)

        def ready_again():
            self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)
            self.assertEqual(self.cli_json("status", "--http", http)["last_error"], "")

        self.node.process.send_signal(signal.SIGSTOP)
        not_ready("it is stopped")
        self.node.process.send_signal(signal.SIGCONT)
        ready_again()
        self.node.kill()
        not_ready("start it again")
        self.start_node_again()
        ready_again()
        code, _, log = self.relay.end(signal.SIGTERM)
        self.assertEqual(code, 128 + signal.SIGTERM)
        # A line when it begins, when it becomes another, and at its end; not one for each look.
        said = re.findall(r"relayed_version_(served|not_served .*?error=\"\w+)", log)
        self.assertGreaterEqual(sum(line != "served" for line in said), 2, log)
        self.assertGreaterEqual(said.count("served"), 2, log)
        self.assertEqual(said[-1], "served", log)
        for before, after in zip(said, said[1:]):
            self.assertNotEqual(before, after, log)

    def test_a_relay_is_not_ready_where_the_layout_changes_and_its_nodes_agent_is_gone(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        node = Agent(self, AGENT, self.tmp / "node")
        step = self.publisher([self.model("one"), self.model("two", extra=["more"])])
        step()
        relay, http = self.with_pages("relay", "--from", self.agent.endpoint, "--agent", node.socket)
        self.assertEqual(relay.line()["label"], "one")
        self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)
        node.kill()
        step()
        reason = json.loads(self.until(lambda: get(http, "/readyz"), lambda page: page[0] == 503)[1])["reason"]
        self.assertIn(str(node.socket), reason)
        (self.tmp / "node" / "ready.json").unlink()
        Agent(self, AGENT, self.tmp / "node")
        self.assertEqual(relay.line()["label"], "two")
        self.until(lambda: get(http, "/readyz")[0], lambda status: status == 200)

    def test_an_agent_is_no_relay_of_itself(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        self.cli("publish", "--agent", self.agent.socket, "--model", *self.successive(1))
        self.cli("relay", "--from", self.agent.endpoint, "--agent", self.agent.socket, expect=USAGE)
        self.assertIn(str(self.agent.socket), self.err)
        self.assertIn("this node's own agent", self.err)

    def test_logs_as_json_and_a_closed_terminal(self):
        agent = Child(self, [AGENT, "--name", "cli", "--shm-dir", self.tmp, "--socket", self.tmp / "agent.sock",
                             "--log-format", "json"])

        def event(name):
            while True:
                line = json.loads(agent.log_line())
                self.assertEqual(line["process"], "deltasync-agent")
                self.assertEqual(line["pid"], agent.process.pid)
                self.assertIsNotNone(datetime.datetime.fromisoformat(line["time"]).utcoffset())
                if line["event"] == name:
                    return line

        ready = event("agent_ready")
        self.assertIsInstance(ready["port"], int)
        self.assertEqual(ready["socket"], str(self.tmp / "agent.sock"))
        agent.process.send_signal(signal.SIGHUP)
        event("sighup_ignored")
        http = f"127.0.0.1:{ready['http_port']}"
        self.assertEqual(get(http, "/healthz")[0], 200)
        relay = Child(self, [CLI, "relay", "--from", f"127.0.0.1:{ready['port']}", "--agent", self.tmp / "agent.sock"])
        relay.wait_for_signals("SigIgn", signal.SIGHUP)
        agent.process.send_signal(signal.SIGTERM)
        event("agent_stopped")
        self.assertEqual(agent.end()[0], 0)

    def test_an_address_that_is_another_ones_is_named(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        self.cli("status", "--http", self.agent.endpoint, expect=CONNECTION)
        self.assertIn("address for receivers (--listen); its pages are at another (--http)", self.err)
        # Its pages wait for a question as long as a receiver does for a word: each may give up first.
        done = subprocess.run([CLI, "pull", "--from", self.agent.http, "--out", self.tmp / "out"], capture_output=True,
                              timeout=DEADLINE_S)
        self.assertIn(done.returncode, (CONNECTION, DEADLINE))
        self.assertIn("that of its pages (--http)", done.stderr.decode())

    def test_an_agent_that_does_not_answer_is_waited_for_as_long_as_is_said(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")
        self.agent.process.send_signal(signal.SIGSTOP)
        self.cli("status", "--http", self.agent.http, "--deadline-s", "0.2", expect=DEADLINE)
        self.agent.process.send_signal(signal.SIGCONT)
        self.cli("status", "--http", self.agent.http)

    def test_agents_that_are_in_each_others_way_say_what_helps(self):
        self.agent = Agent(self, AGENT, self.tmp / "agent")

        def refused(*options):
            done = subprocess.run([AGENT, "--shm-dir", self.agent.directory, *options], capture_output=True,
                                  timeout=DEADLINE_S)
            self.assertNotEqual(done.returncode, 0)
            return done.stderr.decode()

        there = ("--socket", self.tmp / "new.sock", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        self.assertIn("give this one another --name", refused("--name", "cli", *there))
        self.assertIn("give this one another --socket", refused("--name", "new", "--socket", self.agent.socket))
        self.assertIn("choose another port, or 0 for a free one",
                      refused("--name", "new", *there[:3], self.agent.endpoint))

    def test_what_cannot_be_asked(self):
        self.cli("status", expect=USAGE)
        self.cli("status", "--http", "127.0.0.1:1", expect=CONNECTION)
        self.assertIn("127.0.0.1:1", self.err)
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--http", "127.0.0.1:0", expect=USAGE)
        self.assertIn("--follow", self.err)
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--follow", "--http", "0.0.0.0:0",
                 expect=7)
        self.assertIn("--http-allow-remote", self.err)


if __name__ == "__main__":
    unittest.main()
