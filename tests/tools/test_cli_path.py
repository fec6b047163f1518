"""`publish` and `pull` through a real agent, run as their users run them."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest

from cli_support import (
    ACCESS, BIN, Agent, CLI, CONNECTION, Child, CliTest, DEADLINE, DEADLINE_S, MISSING,
    NOT_VERIFIED, NO_SPACE, USAGE, VERSION, sha256, write_model,
)

#: A user who owns nothing.
NOBODY = 65534


class PathTest(CliTest):
    """publish → agent → pull."""

    def agent(self, *options):
        return Agent(self, BIN / "deltasync-agent", self.tmp / "agent", *options)

    def publish(self, agent, *models, expect=0, options=()):
        out = self.cli("publish", "--agent", agent.socket, "--json", "--deadline-s", "30", "--model", *models, *options,
                       expect=expect)
        return [json.loads(line) for line in out.splitlines()]

    def pull(self, agent, *options, expect=0):
        out = self.cli("pull", "--from", agent.endpoint, "--out", self.tmp / "out", "--json", *options, expect=expect)
        return json.loads(out) if out else None

    def assert_received(self, model):
        for name in ("model.safetensors", "config.json"):
            self.assertEqual(sha256(self.tmp / "out" / "current" / name), sha256(model / name), name)

    def test_publish_and_pull(self):
        agent = self.agent()
        models = self.successive(3)
        first = self.publish(agent, models[0])
        self.assertEqual([(p["number"], p["label"], p["bytes"], p["tensors"]) for p in first], [(1, "step_0", 8424, 3)])
        for key in ("guard_s", "copy_s", "seal_s", "total_s", "ready_s"):
            self.assertGreaterEqual(first[0][key], 0)
        got = self.pull(agent)
        self.assertEqual((got["mode"], got["id"], got["label"]), ("full", first[0]["id"], "step_0"))
        self.assertEqual(got["full_bytes"], 8424)
        self.assert_received(models[0])
        self.assertEqual(self.pull(agent)["mode"], "up_to_date")

        # Another run is another epoch, and its versions come after those of the one before.
        rest = self.publish(agent, models[1], models[2], options=["--label-prefix", "v"])
        self.assertEqual([p["label"] for p in rest], ["v1", "v2"])
        self.assertGreater(rest[0]["id"], first[0]["id"])
        self.pull(agent)
        self.assert_received(models[2])
        self.assertEqual(self.cli_json("inspect", self.tmp / "out")["layout"]["tensors"], 3)

    def test_clean_removes_what_dead_processes_left(self):
        agent = self.agent()
        shm = agent.directory
        (shm / "other.g1").write_bytes(b"not a segment")
        self.publish(agent, self.successive(1)[0])
        clean = lambda *options: [json.loads(line) for line in
                                  self.cli("clean", "--shm-dir", shm, "--json", *options).splitlines()]
        found, = clean("--remove")
        self.assertEqual((found["name"], found["used_by"], found["removed"]), ("cli", "its agent", False))
        agent.kill()
        found, = clean()
        self.assertEqual((found["used_by"], found["removed"]), ("", False))
        self.assertIn("step_0", found["version"])
        self.assertEqual(clean("--name", "another"), [])
        found, = clean("--remove")
        self.assertTrue(found["removed"])
        self.assertEqual([path.name for path in shm.glob("*.g*")], ["other.g1"])
        self.assertEqual(self.cli("clean", "--shm-dir", self.tmp / "none", expect=MISSING), "")
        # A kept delta of the agent's, whose segment is gone; another's that it holds the name of; and no such file.
        for name in ("cli.g1.d3", "cli.g1.dx", "cli.d3"):
            (shm / name).write_bytes(b"left")
        found, = clean()
        self.assertEqual((found["event"], found["file"], found["removed"]), ("kept_delta", "cli.g1.d3", False))
        found, = clean("--remove")
        self.assertTrue(found["removed"])
        self.assertEqual(clean(), [])
        self.assertTrue((shm / "cli.g1.dx").exists() and (shm / "cli.d3").exists())

    def test_an_agent_whose_files_lost_their_names_goes_on_and_nobody_takes_its_place(self):
        agent = self.agent()
        models = self.successive(3)
        trainer = Child(self, [CLI, "publish", "--agent", agent.socket, "--json", "--step-on-stdin", "--model",
                               *models[:2]], stdin=subprocess.PIPE)

        def step():
            trainer.process.stdin.write(b"\n")
            trainer.process.stdin.flush()
            return trainer.line()["label"]

        self.assertEqual(step(), "step_0")
        for name in ("cli.g1", "cli.lock"):
            (agent.directory / name).unlink()
        said = sorted((agent.log_line() for _ in range(2)), key=lambda line: line.partition(" file=")[2])
        self.assertIn(f"name_removed file={agent.directory}/cli.g1", said[0])
        self.assertIn(f"name_removed file={agent.directory}/cli.lock", said[1])
        self.assertIn("RemoveIPC=no", said[0])
        # Its socket is not for others, of whatever name; on one of its own another agent may make files of those names.
        done = subprocess.run([BIN / "deltasync-agent", "--name", "cli", "--shm-dir", agent.directory, "--socket",
                               agent.socket], capture_output=True, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 2, done.stderr.decode())
        self.assertIn(b"another agent answers", done.stderr)
        second = Agent(self, BIN / "deltasync-agent", self.tmp / "second", shm_dir=agent.directory)
        self.publish(second, models[2])
        self.assertTrue((agent.directory / "cli.g1").exists())
        # The first one's trainer goes on, and so does a new one of it.
        self.assertEqual(step(), "step_1")
        self.pull(agent)
        self.assert_received(models[1])
        self.assertEqual(trainer.end()[0], 0)
        self.publish(agent, models[2])
        self.pull(agent)
        self.assert_received(models[2])
        # At its end it removes no file of the second one.
        agent.end(signal.SIGTERM)
        left = sorted(path.name for path in agent.directory.glob("cli.*"))
        self.assertEqual([name for name in left if ".d" not in name], ["cli.g1", "cli.lock"])

    def test_slices(self):
        agent = self.agent()
        self.publish(agent, self.successive(1)[0], options=["--tp", "2"])

        def pull(*slices, expect=0):
            options = [word for text in slices for word in ("--tensor", text)]
            out = self.cli("pull", "--from", agent.endpoint, "--json", *options, expect=expect)
            return json.loads(out) if out else None

        rows = pull("layer.weight[0:16]")  # through a tile of 32 rows and 32 columns
        self.assertEqual((rows["mode"], rows["full_bytes"]), ("full", 32 * 64 * 2))
        both = pull("layer.weight[:][32:]", "layer.bias")
        self.assertEqual(both["full_bytes"], 64 * 32 * 2 + 100 * 2)
        pull("layer.weight[0:65]", expect=USAGE)
        self.assertIn("'layer.weight': rows 0 to 65", self.err)
        pull("none", expect=MISSING)
        for text in ("layer.weight[1]", "layer.weight[3:2]", "layer.weight[0:1", "layer.weight[:][:]x", "layer.weight[x:]"):
            pull(text, expect=USAGE)
            self.assertIn("is no slice", self.err)
        pull(expect=USAGE)
        self.pull(agent, "--tensor", "layer.weight", expect=USAGE)

    def test_text_output(self):
        agent = self.agent()
        out = self.cli("publish", "--agent", agent.socket, "--model", *self.successive(2))
        self.assertEqual(len(out.splitlines()), 2)
        self.assertIn("step_0", out)
        self.assertIn("full", self.cli("pull", "--from", agent.endpoint, "--out", self.tmp / "out"))
        self.assertIn("up_to_date", self.cli("pull", "--from", agent.endpoint, "--out", self.tmp / "out"))

    def test_follow_step_by_step(self):
        agent = self.agent()
        models = self.successive(4)
        trainer = Child(self, [CLI, "publish", "--agent", agent.socket, "--json", "--step-on-stdin", "--model", *models],
                        stdin=subprocess.PIPE)
        receiver = Child(self, [CLI, "pull", "--from", agent.endpoint, "--out", self.tmp / "out", "--json", "--follow"])
        modes = []
        for model in models:
            trainer.process.stdin.write(b"\n")
            trainer.process.stdin.flush()
            out, got = trainer.line(), receiver.line()
            self.assertEqual((got["id"], got["label"]), (out["id"], model.name))
            modes.append(got["mode"])
            self.assert_received(model)
        self.assertEqual(modes[0], "full")
        self.assertEqual(trainer.end()[0], 0)
        status, _, err = receiver.end(signal.SIGTERM)
        self.assertEqual(status, 128 + signal.SIGTERM)
        self.assertIn("cancelled", err)
        self.assert_received(models[-1])

    def test_a_signal_ends_whatever_a_pull_waits_for(self):
        agent = self.agent()  # nothing is published
        for sign in (signal.SIGINT, signal.SIGTERM):
            with socket.create_server(("127.0.0.1", 0)) as silent:
                silent.settimeout(DEADLINE_S)
                port = silent.getsockname()[1]
                pull = Child(self, [CLI, "pull", "--from", f"127.0.0.1:{port}", "--out", self.tmp / "out",
                                    "--deadline-s", "100000"])
                connection, _ = silent.accept()  # it waits for a handshake now
                with connection:
                    status, _, err = pull.end(sign)
            self.assertEqual(status, 128 + sign)
            self.assertIn("cancelled", err)
        self.assertFalse((self.tmp / "out" / "current").exists())
        model, = self.successive(1)
        self.publish(agent, model)
        self.pull(agent)
        self.assert_received(model)

    def test_a_signal_ends_the_wait_for_an_agent(self):
        model, = self.successive(1)
        for sign in (signal.SIGINT, signal.SIGTERM):
            trainer = Child(self, [CLI, "publish", "--agent", self.tmp / "nobody.sock", "--deadline-s", "80000", "--model",
                                   model])
            trainer.wait_for_signals("SigCgt", sign)
            self.assertEqual(trainer.end(sign)[0], 0)

    def test_a_background_job_does_not_ignore_signals(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(DEADLINE_S)
            pull = Child(self, [CLI, "pull", "--from", f"127.0.0.1:{silent.getsockname()[1]}", "--out", self.tmp / "out"],
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
            connection, _ = silent.accept()
            with connection:
                pull.wait_for_signals("SigBlk", signal.SIGINT)
                pull.wait_for_signals("SigIgn", signal.SIGINT, there=False)  # else the second one would not end it
                self.assertEqual(pull.end(signal.SIGINT)[0], 128 + signal.SIGINT)

    def test_follow_ends_after_count(self):
        agent = self.agent()
        self.publish(agent, *self.successive(2))
        got = self.pull(agent, "--follow", "--count", "1")
        self.assertEqual(got["label"], "step_1")

    def test_follow_survives_another_layout(self):
        agent = self.agent()
        first, second = self.model("first"), self.model("second", extra=["more"])
        self.publish(agent, first)
        receiver = Child(self, [CLI, "pull", "--from", agent.endpoint, "--out", self.tmp / "out", "--json", "--follow",
                                "--count", "2", "--deadline-s", "40"])
        self.assertEqual(receiver.line()["label"], "first")
        self.publish(agent, second)
        self.assertEqual(receiver.line()["label"], "second")
        self.assertEqual(receiver.end()[0], 0)
        self.assert_received(second)

    def test_follow_survives_other_side_files(self):
        agent = self.agent()
        models = [self.model(name, lambda words, n=n: [words[0] + n, *words[1:]], config=f'{{"vocab_size": {n}}}')
                  for n, name in enumerate(("first", "second", "third"))]
        self.publish(agent, models[0])
        receiver = self.follow(agent, self.tmp / "out", "--count", "3", "--deadline-s", "40")
        self.assertEqual(receiver.line()["label"], "first")
        self.assert_received(models[0])
        # Another trainer process, then the same one.
        trainer = Child(self, [CLI, "publish", "--agent", agent.socket, "--json", "--step-on-stdin", "--model",
                               *models[1:]], stdin=subprocess.PIPE)
        for model in models[1:]:
            trainer.process.stdin.write(b"\n")
            trainer.process.stdin.flush()
            self.assertEqual(trainer.line()["label"], model.name)
            self.assertEqual(receiver.line()["label"], model.name)
            self.assert_received(model)
        self.assertEqual(trainer.end()[0], 0)
        self.assertEqual(receiver.end()[0], 0)

    def follow(self, agent, out, *options):
        return Child(self, [CLI, "pull", "--from", agent.endpoint, "--out", out, "--json", "--follow", *options])

    def test_follow_goes_on_after_a_deadline(self):
        agent = self.agent()
        model, = self.successive(1)
        holder = Child(self, [CLI, "publish", "--agent", agent.socket, "--json", "--step-on-stdin", "--model", model],
                       stdin=subprocess.PIPE)
        holder.process.stdin.write(b"\n")
        holder.process.stdin.flush()
        holder.line()
        receiver = self.follow(agent, self.tmp / "out", "--count", "2", "--deadline-s", "2")
        self.assertEqual(receiver.line()["label"], "step_0")
        line = receiver.log_line()
        self.assertIn("timed_out", line)
        self.assertIn("again_in_s=0.2", line)
        second = self.model("second", lambda words: [w ^ 1 for w in words])
        self.assertEqual(holder.end()[0], 0)
        self.publish(agent, second)
        self.assertEqual(receiver.line()["label"], "second")
        status, _, err = receiver.end()
        self.assertEqual(status, 0)
        for line in err.splitlines():  # one that was slow to connect has said so before
            self.assertIn("timed_out", line)

    def test_follow_waits_for_an_agent_that_is_not_there_yet(self):
        port = self.held_port()
        follower = Child(self, [CLI, "pull", "--from", port.endpoint, "--out", self.tmp / "out", "--json", "--follow",
                                "--count", "1"])
        self.assertIn("connection", follower.log_line())
        relay = Child(self, [CLI, "relay", "--from", port.endpoint, "--agent", self.tmp / "node" / "agent.sock",
                             "--json", "--count", "1"])
        self.assertIn("connection", relay.log_line())
        agent = Agent(self, BIN / "deltasync-agent", self.tmp / "agent", listen=port.endpoint)
        model, = self.successive(1)
        self.publish(agent, model)
        self.assertEqual(follower.line()["label"], "step_0")
        status, _, err = follower.end()
        self.assertEqual((status, err), (0, ""), "one line was enough")
        self.assert_received(model)
        node = Agent(self, BIN / "deltasync-agent", self.tmp / "node")  # the relay has waited for this one too
        self.assertEqual(relay.line()["label"], "step_0")
        self.assertEqual(relay.end()[0], 0)

    def test_follow_and_tokens(self):
        token = self.tmp / "token"

        def write(text):
            token.write_text(text)
            token.chmod(0o600)

        port = self.held_port()

        def agent(name, secret):
            (self.tmp / name).write_text(secret)
            (self.tmp / name).chmod(0o600)
            return Agent(self, BIN / "deltasync-agent", self.tmp / f"{name}-agent", "--token-file", self.tmp / name,
                         listen=port.endpoint)

        first = agent("first", "secret-of-the-first-agent")
        models = self.successive(2)
        self.publish(first, models[0])
        options = ["--token-file", token]
        write("another-secret-altogether")
        self.pull(first, "--follow", *options, expect=ACCESS)  # a mistake of who started it
        write("secret-of-the-first-agent")
        follower = self.follow(first, self.tmp / "out", "--count", "2", *options)
        self.assertEqual(follower.line()["label"], "step_0")
        self.assertEqual(first.end(signal.SIGTERM)[0], 0)
        second = agent("second", "secret-of-the-second-agent")
        lines = []
        while "unauthenticated" not in (lines[-1] if lines else ""):
            lines.append(follower.log_line())
            self.assertNotEqual(lines[-1], "")
        self.publish(second, models[1])
        write("")  # as a plain write leaves it for a moment
        time.sleep(2)  # it tries meanwhile, and goes on
        write("secret-of-the-second-agent")  # as operators do: the agents first
        self.assertEqual(follower.line()["label"], "step_1")
        self.assertEqual(follower.end()[0], 0)

    def test_follow_goes_on_once_there_is_room(self):
        small = self.small_disk("64k")
        agent = self.agent()
        model = write_model(self.tmp / "big", {"t": ("U8", [1 << 20], bytes(range(256)) * 4096)})
        self.publish(agent, model)
        receiver = self.follow(agent, small / "out", "--count", "1")
        self.assertIn("no_space", receiver.log_line())
        subprocess.run(["mount", "-o", "remount,size=16m", str(small)], check=True)
        self.assertEqual(receiver.line()["label"], "big")
        self.assertEqual(receiver.end()[0], 0)

    def test_follow_ends_when_nobody_listens(self):
        agent = self.agent()
        self.publish(agent, *self.successive(1))
        receiver = self.follow(agent, self.tmp / "out")
        receiver.line()
        receiver.process.stdout.close()
        self.publish(agent, self.model("next", lambda words: [w ^ 1 for w in words]))
        self.assertNotEqual(receiver.process.wait(DEADLINE_S), 0)
        self.assertIn("stdout", receiver.process.stderr.read().decode())
        receiver.process.stdout = None

    def test_end_of_input_ends_publishing(self):
        agent = self.agent()
        self.assertEqual(self.publish(agent, *self.successive(2), options=["--step-on-stdin"]), [])

    def test_named_versions(self):
        agent = self.agent()
        models = self.successive(3)
        self.publish(agent, *models)
        self.assertEqual(self.pull(agent, "--label", "step_2")["number"], 3)
        self.assertEqual(self.pull(agent, "--number", "3")["mode"], "up_to_date")
        self.cli("pull", "--from", agent.endpoint, "--out", self.tmp / "fresh", "--number", "1", expect=VERSION)
        self.assertIn("gone", self.err)
        self.cli("pull", "--from", agent.endpoint, "--out", self.tmp / "out", "--number", "99", "--deadline-s", "1",
                 expect=DEADLINE)
        self.assert_received(models[2])

    def test_tokens(self):
        secret = "the secret of this test"
        for name, text, mode in (("right", f"{secret}\n", 0o600), ("wrong", secret[::-1], 0o600), ("open", secret, 0o644),
                                 ("short", "guess me", 0o600), ("blank", " \n", 0o600)):
            (self.tmp / name).write_text(text)
            (self.tmp / name).chmod(mode)
        agent = self.agent("--token-file", self.tmp / "right")
        models = self.successive(1)
        self.publish(agent, *models)
        self.pull(agent, "--deadline-s", "10", expect=ACCESS)
        self.pull(agent, "--deadline-s", "10", "--token-file", self.tmp / "wrong", expect=ACCESS)
        self.pull(agent, "--token-file", self.tmp / "open", expect=ACCESS)
        self.pull(agent, "--token-file", self.tmp / "nothing", expect=MISSING)
        self.pull(agent, "--token-file", self.tmp / "blank", expect=USAGE)
        self.pull(agent, "--token-file", self.tmp / "short", expect=USAGE)
        self.assertFalse((self.tmp / "out" / "current").exists())
        self.pull(agent, "--token-file", self.tmp / "right")
        self.assert_received(models[0])

    def test_of_local_users_only_the_agents_own_may_pull(self):
        agents = [self.agent(), Agent(self, BIN / "deltasync-agent", self.tmp / "open", "--insecure")]
        models = self.successive(1)
        for agent in agents:
            self.publish(agent, *models)
        self.pull(agents[0])
        self.assert_received(models[0])
        program = self.for_strangers(CLI)
        for agent, expect in zip(agents, (ACCESS, 0), strict=True):
            done = subprocess.run([program, "pull", "--from", agent.endpoint, "--tensor", "layer.bias"], user=NOBODY,
                                  group=NOBODY, extra_groups=[], capture_output=True, cwd="/", timeout=DEADLINE_S)
            self.assertEqual(done.returncode, expect, done.stderr.decode())

    def for_strangers(self, program):
        """A copy of a program that any user may run."""
        if os.geteuid() != 0:
            self.skipTest("running a program as another user needs root")
        self.tmp.chmod(0o755)
        copy = pathlib.Path(shutil.copy(program, self.tmp / "for-strangers"))
        copy.chmod(0o755)
        if subprocess.run(["test", "-x", copy], user=NOBODY, group=NOBODY, extra_groups=[], check=False).returncode:
            self.skipTest(f"user {NOBODY} cannot reach {copy}: set TMPDIR")
        return copy

    def test_nobody_there(self):
        model = self.model("a")
        self.cli("publish", "--agent", self.tmp / "none.sock", "--model", model, "--deadline-s", "1", expect=CONNECTION)
        self.assertIn("none.sock", self.err)
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--deadline-s", "1", expect=CONNECTION)

    def test_an_agent_that_starts_after_its_trainer(self):
        directory = self.tmp / "agent"
        directory.mkdir()
        model = self.model("a")
        with socket.socket(socket.AF_UNIX) as early:
            early.bind(str(directory / "agent.sock"))
            early.listen()
            trainer = Child(self, [CLI, "publish", "--agent", directory / "agent.sock", "--json", "--model", model])
            early.settimeout(DEADLINE_S)
            early.accept()[0].close()  # the trainer has asked: it waits from here on
        (directory / "agent.sock").unlink()
        agent = self.agent()
        self.assertEqual(trainer.line()["number"], 1)
        self.assertEqual(trainer.end()[0], 0)
        self.pull(agent)
        self.assert_received(model)

    def test_nothing_published_yet(self):
        agent = self.agent()
        self.pull(agent, "--deadline-s", "1", expect=DEADLINE)

    def test_a_model_that_cannot_be_read(self):
        agent = self.agent()
        good, bad = self.successive(2)
        (bad / "model.safetensors").write_bytes(b"\x10" + bytes(100))
        self.publish(agent, good, bad, expect=NOT_VERIFIED)
        self.assertIn("step_1", self.err)
        self.pull(agent)
        self.assert_received(good)

    def small_disk(self, size):
        if os.geteuid() != 0 or shutil.which("mount") is None:
            self.skipTest("mounting a small tmpfs needs root")
        small = self.tmp / "small"
        small.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], capture_output=True)
        if mounted.returncode != 0:
            self.skipTest(f"mounting a small tmpfs: {mounted.stderr.decode().strip()}")
        self.addCleanup(subprocess.run, ["umount", "-l", str(small)])
        return small

    def test_a_model_of_somebody_else_is_in_the_way(self):
        agent = self.agent()
        models = self.successive(2)
        self.publish(agent, models[0])
        plain = self.model("plain")
        self.cli("pull", "--from", agent.endpoint, "--out", plain, expect=MISSING)
        self.assertIn(str(plain), self.err)
        self.assertIn("--beside-model", self.err)
        self.assertEqual(sorted(entry.name for entry in plain.iterdir()), ["config.json", "model.safetensors"])
        self.cli("pull", "--from", agent.endpoint, "--out", plain, "--beside-model")
        self.assertEqual(sha256(plain / "current" / "model.safetensors"), sha256(models[0] / "model.safetensors"))

    def test_disk_full(self):
        small = self.small_disk("64k")
        agent = self.agent()
        model = write_model(self.tmp / "big", {"t": ("U8", [1 << 20], bytes(range(256)) * 4096)})
        self.publish(agent, model)
        self.cli("pull", "--from", agent.endpoint, "--out", small / "out", expect=NO_SPACE)
        self.assertFalse((small / "out" / "current").exists())

    def test_inspect_a_live_agent_and_its_segment(self):
        agent = self.agent()
        published = self.publish(agent, *self.successive(2))
        for address in (agent.http, f"http://{agent.http}/"):
            got = self.cli_json("inspect", address)
            self.assertEqual(got["kind"], "agent")
            self.assertIsInstance(got["status"], dict)
        self.assertIn("live agent", self.cli("inspect", agent.http))

        segments = [p for p in agent.directory.iterdir() if re.fullmatch(r"cli\.g\d+", p.name)]
        self.assertEqual(len(segments), 1, segments)
        got = self.cli_json("inspect", segments[0])
        self.assertEqual((got["kind"], got["agent"]), ("segment", {"pid": agent.ready["pid"], "alive": True}))
        active = [half for half in got["halves"] if half["state"] == "ACTIVE"]
        self.assertEqual([half["id"] for half in active], [published[-1]["id"]])
        self.assertEqual(got["layout"]["tensors"], 3)
        self.cli("inspect", segments[0])

        cut = self.tmp / "cut"
        cut.write_bytes(segments[0].read_bytes()[:-4096])
        cut.chmod(0o600)
        self.cli("inspect", cut, expect=NOT_VERIFIED)

    def test_no_agent_process_is_left(self):
        agent = self.agent()
        status, _, _ = agent.end(signal.SIGTERM)
        self.assertEqual(status, 0)
        self.assertEqual([p.name for p in agent.directory.iterdir() if p.name.startswith("cli.")], [])


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
