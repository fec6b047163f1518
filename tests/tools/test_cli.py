"""`deltasync`, run as its users run it: exit codes, JSON, and the whole path through a real agent."""

import hashlib
import json
import math
import os
import pathlib
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

from cli_support import DEADLINE_S, Agent, Child, bf16_words, pack_u16, write_model

BIN = pathlib.Path(os.environ["DELTASYNC_BIN"])
CLI = BIN / "deltasync"

USAGE, CONNECTION, NOT_VERIFIED, DEADLINE, NO_SPACE, VERSION, ACCESS, MISSING, UNSUPPORTED = range(1, 10)


# Size and steps of a benchmark that only has to run.
SMALL = ("--model-gib", "0.01", "--density", "0.01")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class CliTest(unittest.TestCase):
    def setUp(self):
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-cli-"))
        self.addCleanup(shutil.rmtree, self.tmp, ignore_errors=True)

    def cli(self, *argv, expect=0, **options):
        options.setdefault("timeout", DEADLINE_S)
        done = subprocess.run([str(CLI), *map(str, argv)], stdin=subprocess.DEVNULL, capture_output=True, **options)
        self.out, self.err = done.stdout.decode(), done.stderr.decode()
        self.assertEqual(done.returncode, expect, f"deltasync {argv}\n{self.out}\n{self.err}")
        return self.out

    def cli_json(self, *argv, **options):
        return json.loads(self.cli(*argv, "--json", **options))

    def model(self, name, change=lambda words: words, extra=(), **options):
        """Two bf16 tensors and an int64 one; `change` edits the words of the first."""
        words = change(bf16_words(4096, 1))
        tensors = {"layer.weight": ("BF16", [64, 64], pack_u16(words)),
                   "layer.bias": ("BF16", [100], pack_u16(bf16_words(100, 2))),
                   "positions": ("I64", [1, 4], bytes(range(32)))}
        for extra_name in extra:
            tensors[extra_name] = ("BF16", [2], pack_u16([1, 2]))
        return write_model(self.tmp / name, tensors, **options)

    def successive(self, count):
        def step(number):
            def change(words):
                for i in range(number):
                    words[i * 37 % 4096] += 1
                return words

            return change

        return [self.model(f"step_{i}", step(i)) for i in range(count)]


class UsageTest(CliTest):
    def test_help_lists_commands_and_exit_codes(self):
        out = self.cli("--help")
        for word in ("publish", "pull", "inspect", "diff", "Exit codes:", "4  the deadline passed"):
            self.assertIn(word, out)
        for command in ("publish", "pull", "inspect", "diff"):
            self.assertIn("Exit codes:", self.cli(command, "--help"))

    def test_wrong_usage_exits_with_1(self):
        for argv in ([], ["nonsense"], ["pull"], ["pull", "--from", "x:1"], ["diff", "only-one"],
                     ["publish", "--model", "a", "--agent", "b", "--tp", "0"],
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--streams", "0"],
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--number", "1", "--follow"],
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--count", "1"]):
            with self.subTest(argv=argv):
                self.cli(*argv, expect=USAGE)
                self.assertNotEqual(self.err, "")

    def test_an_address_that_is_none_is_a_usage_error(self):
        self.cli("pull", "--from", "nowhere", "--out", self.tmp / "out", expect=USAGE)
        self.assertIn("nowhere", self.err)

    def test_version(self):
        self.assertRegex(self.cli("--version"), r"^\d+\.\d+\.\d+$")

    def test_a_full_stdout_is_no_success(self):
        model = self.model("a")
        with open("/dev/full", "wb") as full:
            done = subprocess.run([str(CLI), "inspect", str(model), "--json"], stdout=full, stderr=subprocess.PIPE,
                                  timeout=DEADLINE_S)
        self.assertEqual(done.returncode, NO_SPACE, done.stderr)

    def test_no_progress_without_a_terminal_and_some_with_one(self):
        a, b = self.successive(2)
        self.cli("diff", a, b)
        self.assertEqual(self.err, "")
        master, slave = pty.openpty()
        try:
            subprocess.run([str(CLI), "diff", str(a), str(b)], stderr=slave, stdout=subprocess.DEVNULL, check=True,
                           timeout=DEADLINE_S)
            self.assertIn(b"compared", os.read(master, 4096))
        finally:
            os.close(master)
            os.close(slave)


class InspectTest(CliTest):
    def test_model_layout_and_safetensors(self):
        model = self.model("a")
        got = self.cli_json("inspect", model, "--tensors", "--save-layout", self.tmp / "layout")
        self.assertEqual(got["kind"], "model")
        self.assertEqual(got["weight_files"], ["model.safetensors"])
        self.assertEqual(got["other_files"], ["config.json"])
        layout = got["layout"]
        self.assertEqual((layout["tensors"], layout["elements"], layout["model_bytes"]), (3, 4200, 8424))
        self.assertEqual(layout["bytes_by_dtype"], {"BF16": 8392, "I64": 32})
        self.assertEqual([t["name"] for t in layout["tensor_list"]], ["layer.weight", "layer.bias", "positions"])

        from_file = self.cli_json("inspect", self.tmp / "layout", "--tensors")
        self.assertEqual(from_file["kind"], "layout")
        self.assertEqual(from_file["layout"], layout)

        file = self.cli_json("inspect", model / "model.safetensors")
        self.assertEqual((file["kind"], file["tensors"], file["data_bytes"]), ("safetensors", 3, 8424))
        for what in (model, self.tmp / "layout", model / "model.safetensors"):
            self.assertIn(str(what), self.cli("inspect", what, "--tensors"))

    def test_cuts_make_another_layout(self):
        model = self.model("a")
        self.assertNotEqual(self.cli_json("inspect", model)["layout"]["digest"],
                            self.cli_json("inspect", model, "--tp", "2")["layout"]["digest"])

    def test_what_is_not_there_and_what_is_unknown(self):
        self.cli("inspect", self.tmp / "nothing", expect=MISSING)
        self.assertIn("nothing", self.err)
        (self.tmp / "noise").write_bytes(b"neither this nor that")
        self.cli("inspect", self.tmp / "noise", expect=UNSUPPORTED)
        (self.tmp / "short").write_bytes(b"x")
        self.cli("inspect", self.tmp / "short", expect=UNSUPPORTED)
        (self.tmp / "empty").mkdir()
        self.cli("inspect", self.tmp / "empty", expect=MISSING)

    def test_damaged_files_are_not_verified(self):
        model = self.model("a")
        self.cli("inspect", model, "--save-layout", self.tmp / "layout")
        encoded = (self.tmp / "layout").read_bytes()
        (self.tmp / "cut").write_bytes(encoded[:-3])
        self.cli("inspect", self.tmp / "cut", expect=NOT_VERIFIED)
        weights = (model / "model.safetensors").read_bytes()
        (self.tmp / "cut.safetensors").write_bytes(weights[:-1])
        self.cli("inspect", self.tmp / "cut.safetensors", expect=NOT_VERIFIED)
        (model / "model.safetensors").write_bytes(weights[:-1])
        self.cli("inspect", model, expect=NOT_VERIFIED)
        self.assertIn("model.safetensors", self.err)

    def test_nobody_at_the_address(self):
        self.cli("inspect", "127.0.0.1:1", "--deadline-s", "2", expect=CONNECTION)


class DiffTest(CliTest):
    def test_counts_and_sizes_are_what_the_definitions_say(self):
        ulps = {5: 1, 70: -1, 130: 1, 900: 2, 1300: 5, 2000: -8, 4000: 9}

        def change(words):
            for at, difference in ulps.items():
                words[at] += difference if words[at] < 0x8000 else -difference
            return words

        a, b = self.model("a"), self.model("b", change)
        got = self.cli_json("diff", a, b)
        n, c = 4200 + 0, len(ulps)
        self.assertEqual((got["elements"], got["changed"]), (n, c))
        self.assertEqual(got["changed_by_ulp"], {"1": 3, "2": 1, "3_to_8": 2, "more": 1})
        self.assertEqual((got["tiles"], got["tiles_changed"]), (3, 1))
        self.assertEqual([t["changed"] for t in got["tensors"]], [c, 0, 0])
        self.assertEqual(got["sizes"]["coo"]["bits_per_change"], 48)
        self.assertAlmostEqual(got["sizes"]["bitmap"]["bits_per_change"], (4096 + 16 * c) / c)
        self.assertEqual(got["sizes"]["raw_tiles"]["bytes"], 8192)

        def positions(n, c):
            return -c * math.log2(c / n) - (n - c) * math.log2((n - c) / n)

        # +1 twice, −1 once, and four others: six values in all.
        values = -sum(k / c * math.log2(k / c) for k in (2, 1, 1, 1, 1, 1)) * c
        self.assertAlmostEqual(got["floors"]["model"]["position_bits_per_change"], positions(n, c) / c)
        self.assertAlmostEqual(got["floors"]["tile"]["position_bits_per_change"], positions(4096, c) / c)
        self.assertAlmostEqual(got["floors"]["model"]["value_bits_per_change"], values / c)

        # Given the exponent of the old value, which takes 8 bits above the 7 of the mantissa.
        old = bf16_words(4096, 1)
        exponent = lambda word: (word & 0x7FFF) >> 7
        per_tensor = 0.0
        for e in {exponent(w) for w in old}:
            group = [i for i, w in enumerate(old) if exponent(w) == e]
            changed = [i for i in group if i in ulps]
            if changed and len(changed) < len(group):
                per_tensor += positions(len(group), len(changed))
        self.assertAlmostEqual(got["floors"]["exponent"]["position_bits_per_change"], per_tensor / c)
        self.assertLessEqual(got["floors"]["exponent"]["value_bits_per_change"], values / c)

        self.assertLessEqual(got["sizes"]["delta_compact"]["bytes"], got["sizes"]["delta_ulp"]["bytes"])
        for form in ("delta_ulp", "delta_compact", "delta_absolute"):
            self.assertGreater(got["sizes"][form]["bytes"], 0)
            self.assertEqual(sum(s["changed"] for s in got["sizes"][form]["tiles"].values()), c)
        text = self.cli("diff", a, b)
        self.assertIn(f"changed {c} of {n}", text)

    def test_across_zero_and_every_extreme_the_difference_is_exact(self):
        cases = [("BF16", 2, 0x0000, 0x8000, "1"),  # +0 to −0: neighbours on the monotone scale
                 ("BF16", 2, 0x0001, 0x8001, "3_to_8"),
                 ("BF16", 2, 0x7FFF, 0xFFFF, "1"),  # the ends of the scale meet: differences are modulo 2^w
                 ("BF16", 2, 0x3F80, 0xBF80, "more"), ("U8", 1, 255, 0, "1"),
                 ("I8", 1, 127, 128, "1"), ("I64", 8, 2**63, 0, "more"), ("F32", 4, 0x3F800000, 0x3F800002, "2")]
        for dtype, width, old, new, expected in cases:
            with self.subTest(dtype=dtype, old=old, new=new):
                name = f"{dtype}-{old}-{new}"
                a = write_model(self.tmp / f"a-{name}", {"t": (dtype, [1], old.to_bytes(width, "little"))})
                b = write_model(self.tmp / f"b-{name}", {"t": (dtype, [1], new.to_bytes(width, "little"))})
                got = self.cli_json("diff", a, b)
                self.assertEqual({k for k, v in got["changed_by_ulp"].items() if v}, {expected})

    def test_nothing_changed(self):
        a, b = self.model("a"), self.model("b")
        got = self.cli_json("diff", a, b)
        self.assertEqual((got["changed"], got["sizes"]["coo"]["bytes"], got["sizes"]["delta_ulp"]["bytes"]), (0, 0, 0))
        self.assertEqual(got["floors"]["model"]["bits_per_change"], 0)
        self.cli("diff", a, b)

    def test_another_layout_is_named(self):
        a, b = self.model("a"), self.model("b", extra=["more"])
        self.cli("diff", a, b, expect=VERSION)
        self.assertIn("layout_mismatch", self.err)
        self.cli("diff", a, self.tmp / "nothing", expect=MISSING)

    def test_saved_delta_is_checked(self):
        a, b = self.successive(6)[::5]
        changed = self.cli_json("diff", a, b, "--save-delta", self.tmp / "delta")["changed"]
        got = self.cli_json("inspect", self.tmp / "delta", "--layout", a)
        self.assertEqual((got["kind"], got["changed"]), ("delta", changed))
        self.cli("inspect", a, "--save-layout", self.tmp / "layout")
        self.assertEqual(self.cli_json("inspect", self.tmp / "delta", "--layout", self.tmp / "layout"), got)
        self.cli("inspect", self.tmp / "delta", "--layout", a)

        self.cli("inspect", self.tmp / "delta", expect=USAGE)
        other = self.model("other", extra=["more"])
        self.cli("inspect", self.tmp / "delta", "--layout", other, expect=VERSION)
        intact = (self.tmp / "delta").read_bytes()
        for at in (20, len(intact) // 2, len(intact) - 1):
            bad = bytearray(intact)
            bad[at] ^= 0x10
            (self.tmp / "bad").write_bytes(bad)
            self.cli("inspect", self.tmp / "bad", "--layout", a, expect=NOT_VERIFIED)
        (self.tmp / "bad").write_bytes(intact[:-1])
        self.cli("inspect", self.tmp / "bad", "--layout", a, expect=NOT_VERIFIED)


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
        receiver = self.follow(agent, self.tmp / "out", "--count", "2", "--deadline-s", "0.5")
        self.assertEqual(receiver.line()["label"], "step_0")
        for _ in range(2):  # the wait was the pause: it does not grow
            line = receiver.log_line()
            self.assertIn("timed_out", line)
            self.assertIn("again_in_s=0.2", line)
        second = self.model("second", lambda words: [w ^ 1 for w in words])
        self.assertEqual(holder.end()[0], 0)
        self.publish(agent, second)
        self.assertEqual(receiver.line()["label"], "second")
        self.assertEqual(receiver.end()[0], 0)

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
        for name, text, mode in (("right", "secret\n", 0o600), ("wrong", "other", 0o600), ("open", "secret", 0o644),
                                 ("blank", " \n", 0o600)):
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
        self.assertFalse((self.tmp / "out" / "current").exists())
        self.pull(agent, "--token-file", self.tmp / "right")
        self.assert_received(models[0])

    def test_nobody_there(self):
        model = self.model("a")
        self.cli("publish", "--agent", self.tmp / "none.sock", "--model", model, "--deadline-s", "1", expect=CONNECTION)
        self.assertIn("none.sock", self.err)
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--deadline-s", "1", expect=CONNECTION)

    def test_an_agent_that_starts_after_its_trainer(self):
        folder = self.tmp / "agent"
        folder.mkdir()
        model = self.model("a")
        with socket.socket(socket.AF_UNIX) as early:
            early.bind(str(folder / "agent.sock"))
            early.listen()
            trainer = Child(self, [CLI, "publish", "--agent", folder / "agent.sock", "--json", "--model", model])
            early.settimeout(DEADLINE_S)
            early.accept()[0].close()  # the trainer has asked: it waits from here on
        (folder / "agent.sock").unlink()
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

        segments = [p for p in agent.folder.iterdir() if p.name.startswith("cli.g")]
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
        self.assertEqual([p.name for p in agent.folder.iterdir() if p.name.startswith("cli.")], [])


class BenchTest(CliTest):
    """Every case runs, has the contract's fields, and measures two things of one order of magnitude."""

    def bench(self, case, *options, fields):
        shm = self.tmp / "shm"
        shm.mkdir()
        got = self.cli_json("bench", case, *options, "--shm-dir", shm, timeout=DEADLINE_S * 2)
        self.assertEqual(os.listdir(shm), [])
        self.assertEqual(got["case"], case)
        self.assertEqual([f for f in fields if f not in got], [])
        for name, value in got.items():
            if name.endswith(("_s", "_gbps", "_ms")):
                self.assertGreater(value, 0, name)
            if "bytes" in name:
                self.assertIsInstance(value, int, name)
        return got

    def assert_ratio(self, got, name, of, to):
        """Of a model this small the figures say nothing about speed."""
        self.assertGreater(got[of], 0)
        self.assertAlmostEqual(got[name], got[of] / got[to])

    def test_diff(self):
        got = self.bench("diff", *SMALL, fields=["limit_gbps", "diff_encode_gbps", "ratio_to_limit", "isa"])
        self.assert_ratio(got, "ratio_to_limit", "diff_encode_gbps", "limit_gbps")

    def test_codec(self):
        got = self.bench("codec", *SMALL, fields=["density", "bits_per_change", "floor_bits", "coo_bits", "codecs"])
        self.assertAlmostEqual(got["density"], 0.01, delta=0.002)
        self.assertLess(got["floor_bits"], got["bits_per_change"])
        self.assertLess(got["bits_per_change"], got["coo_bits"])
        self.assertEqual(got["coo_bits"], 48)
        self.assertEqual(got["bits_per_change"], 8 * got["container_bytes"] / got["changed"])
        compact = got["compact"]
        self.assertIs(compact["verified"], True)
        self.assertLess(compact["bits_per_change"], got["floor_bits"])
        self.assertEqual(compact["bits_per_change"], 8 * compact["container_bytes"] / got["changed"])
        self.assertGreater(compact["codecs"]["rice_class"]["tiles"], 0)
        self.assertEqual(sum(codec["changed"] for codec in compact["codecs"].values()), got["changed"])

    def test_codec_of_two_directories(self):
        a, b = self.successive(6)[::5]
        got = self.bench("codec", "--from", a, b, fields=["density", "bits_per_change"])
        self.assertNotIn("model_gib", got)
        self.assertEqual(got["changed"], self.cli_json("diff", a, b)["changed"])
        self.cli("bench", "e2e", "--from", a, b, expect=USAGE)

    def test_apply(self):
        got = self.bench("apply", *SMALL, fields=["memcpy_s", "apply_s", "ratio_to_memcpy"])
        self.assert_ratio(got, "ratio_to_memcpy", "apply_s", "memcpy_s")

    def test_full(self):
        got = self.bench("full", *SMALL, fields=["limit_gbps", "pull_gbps", "ratio_to_limit"])
        self.assert_ratio(got, "ratio_to_limit", "pull_gbps", "limit_gbps")

    def test_e2e(self):
        got = self.bench("e2e", *SMALL, "--versions", "1",
                         fields=["memcpy_s", "offload_s", "guard_s", "commit_to_delta_s", "pull_s", "commit_s", "total_s",
                                 "ratio_to_memcpy", "verified", "wire_bytes", "agent_rss_bytes", "receiver_rss_bytes"])
        self.assertIs(got["verified"], True)
        self.assertEqual(got["mode"], "delta")
        self.assertGreaterEqual(got["versions"], 5)
        self.assertAlmostEqual(got["density"], 0.01, delta=0.002)
        self.assertNotEqual(got["density"], 0.01)  # measured, not what was asked for
        self.assertGreater(got["total_s"], got["pull_s"])
        self.assertLess(got["wire_bytes"], got["full_bytes"] / 10)
        self.assert_ratio(got, "ratio_to_memcpy", "total_s", "memcpy_s")

    def test_tensors(self):
        got = self.bench("tensors", fields=["update_ms", "offload_ms", "metadata_bytes_per_update"])
        self.assertGreaterEqual(got["update_ms"], got["offload_ms"])  # from the call of offload on
        self.assertLess(got["metadata_bytes_per_update"], 4096)  # whatever the number of tensors

    def test_baseline(self):
        got = self.bench("baseline", "--model-gib", "0.02", fields=["limit_gbps", "memcpy_s"])
        rows = {row["system"]: row for row in got["rows"]}
        self.assertAlmostEqual(rows["AstraFlow"]["bits_per_change"], 48, delta=0.5)
        # The sizes stand in the order in which they were published.
        sizes = [rows[system]["bytes"] for system in ("AstraFlow", "PULSE", "NeMo-RL", "deltasync")]
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        for row in rows.values():
            self.assertGreater(row["encode_gbps"], 0)
            self.assertGreater(row["decode_gbps"], 0)

    def test_baseline_as_a_table(self):
        self.cli("bench", "baseline", "--model-gib", "0.02")
        self.assertIn("| format | system | bytes |", self.out)
        self.assertIn("| dense XOR, zstd-1 | slime |", self.out)

    def test_unknown_case(self):
        self.cli("bench", "nothing", expect=USAGE)
        self.assertIn("e2e", self.err)


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
