"""`deltasync trace`: one update recorded by agent, `publish` and `pull`, merged, summarised, drawn; and bad input."""

import json
import subprocess
import sys
import unittest
import xml.etree.ElementTree

from cli_support import (
    BIN, CLI, CONNECTION, Agent, Child, CliTest, MISSING, NOT_VERIFIED, UNSUPPORTED, USAGE, bf16_words, pack_u16,
    write_model,
)

TENSOR_BYTES = 8 << 20
BATCHES = 2  # of 4 MiB


def spans_of(timeline, number):
    """By name, of the version with this number."""
    spans = {}
    for event in timeline["traceEvents"]:
        if event["ph"] == "X" and event["args"].get("version", "").endswith(f":{number}"):
            spans.setdefault(event["name"], []).append(event)
    return spans


def begin(spans):
    return min(s["ts"] for s in spans)


def end(spans):
    return max(s["ts"] + s["dur"] for s in spans)


class TraceTest(CliTest):
    def big_model(self, name, changed):
        words = bf16_words(4096, 1)
        block = pack_u16(words)
        data = bytearray(block * (TENSOR_BYTES // len(block)))
        for at in range(0, changed * 10_000, 10_000):
            data[at] ^= 1
        return write_model(self.tmp / name, {"layer.weight": ("BF16", [2048, 2048], bytes(data))})

    def record(self, elsewhere=(), local="never"):
        """Two versions through three processes. Returns the three sources: two files and the live agent. `elsewhere` is
        a command that runs the receiver."""
        models = [self.big_model("step_1", 0), self.big_model("step_2", 100)]
        self.agent = Agent(self, BIN / "deltasync-agent", self.tmp / "agent", "--trace", self.tmp / "agent.json")
        publisher = Child(self, [CLI, "publish", "--agent", self.agent.socket, "--step-on-stdin", "--json", "--trace",
                                 self.tmp / "publish.json", "--model", *models], stdin=subprocess.PIPE)

        def step():
            publisher.process.stdin.write(b"\n")
            publisher.process.stdin.flush()
            self.assertEqual(publisher.line()["event"], "published")

        step()
        follower = Child(self, [*elsewhere, CLI, "pull", "--from", self.agent.endpoint, "--out", self.tmp / "out", "--follow",
                                "--local", local, "--count", "2", "--json", "--trace", self.tmp / "pull.json"])
        self.assertEqual(follower.line()["mode"], "full")
        step()
        self.assertEqual(follower.line()["mode"], "delta")
        self.assertEqual(follower.end()[0], 0)
        publisher.process.stdin.close()
        publisher.process.stdin = None
        self.assertEqual(publisher.end()[0], 0)
        return self.tmp / "publish.json", f"http://{self.agent.http}", self.tmp / "pull.json"

    def test_one_update_from_offload_to_commit(self):
        sources = self.record()
        self.cli("trace", *sources, "-o", self.tmp / "all.json")
        timeline = json.loads((self.tmp / "all.json").read_text())
        processes = timeline["deltasync"]["processes"]
        self.assertEqual([p["process"] for p in processes], ["publish", "agent cli", "pull"])
        self.assertEqual({p["clock_from"] for p in processes}, {"same"})
        self.assertEqual({p["uncertainty_us"] for p in processes}, {0})
        self.assertEqual({p["dropped"] for p in processes}, {0})
        names = {(e["pid"], e["args"]["name"]) for e in timeline["traceEvents"] if e["name"] == "process_name"}
        self.assertEqual(names, {(p["pid"], p["process"]) for p in processes})
        self.assert_full(spans_of(timeline, 1))
        self.assert_delta(spans_of(timeline, 2), {p["process"]: p["pid"] for p in processes})
        self.assert_nested(timeline)

    def test_a_receiver_with_another_clock_is_placed_as_exactly_as_is_said(self):
        """A time namespace is a machine whose clock is ahead by exactly so much."""
        ahead_us = 1000e6
        elsewhere = ["unshare", "--time", "--monotonic", str(int(ahead_us / 1e6)), "--fork"]
        try:
            subprocess.run([*elsewhere, "true"], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            self.skipTest(f"no time namespace to be had: {error}")
        sources = self.record(elsewhere)
        self.cli("trace", *sources, "-o", self.tmp / "all.json", "--summary")
        self.assertIn("its clock was measured", self.out)
        timeline = json.loads((self.tmp / "all.json").read_text())
        publish, agent, pull = timeline["deltasync"]["processes"]
        self.assertEqual((publish["clock_from"], agent["clock_from"], pull["clock_from"]), ("same", "same", "measured"))
        self.assertEqual(timeline["deltasync"]["clock"], agent["clock"])
        error_us = abs(pull["offset_us"] - agent["offset_us"] + ahead_us)
        self.assertLessEqual(error_us, pull["uncertainty_us"])
        self.assertGreaterEqual(len(pull["clocks"]), 2)
        self.assert_nested(timeline)

    def assert_full(self, spans):
        for stage in ("offload", "guard", "copy", "seal", "publish", "digest", "install", "plan", "serve plan",
                      "serve digests", "serve extent", "pull", "open", "fetch", "commit"):
            self.assertIn(stage, spans)
        self.assertEqual(spans["offload"][0]["args"]["bytes"], TENSOR_BYTES)
        self.assertGreaterEqual(sum(s["args"]["bytes"] for s in spans["fetch"]), TENSOR_BYTES)
        self.assertIn("full", {s["args"].get("mode") for s in spans["pull"]})

    def assert_delta(self, spans, pids):
        where = {"publish": ("offload", "guard", "copy", "seal", "wait ready"),
                 "agent cli": ("publish", "diff", "finish", "install", "serve plan", "serve frames", "serve release"),
                 "pull": ("plan", "pull", "fetch", "verify", "scrub", "commit")}
        for process, stages in where.items():
            for stage in stages:
                self.assertIn(stage, spans)
                self.assertEqual({s["pid"] for s in spans[stage]}, {pids[process]}, stage)
        for stage in ("serve plan", "serve frames", "serve release"):  # on the line of a connection, not of a thread
            self.assertGreater(min(s["tid"] for s in spans[stage]), 10_000_000)
        # During the offload or after it: the delta has each batch once. What comes late during the offload is discarded.
        batches = [s for s in spans["diff"] + spans.get("overlapped diff", [])
                   if "batch" in s["args"] and "discarded" not in s["args"]]
        self.assertEqual(sorted(s["args"]["batch"] for s in batches), list(range(BATCHES)))
        self.assertEqual(sum(s["args"]["bytes"] for s in batches), TENSOR_BYTES)
        self.assertEqual({s["args"]["label"] for s in spans["offload"] + spans["publish"]}, {"step_2"})
        # In the order in which an update goes.
        self.assertLessEqual(begin(spans["offload"]), begin(spans["guard"]))
        self.assertLessEqual(end(spans["guard"]), begin(spans["copy"]))
        self.assertLessEqual(end(spans["copy"]), begin(spans["seal"]))
        self.assertLess(begin(spans["seal"]), begin(spans["publish"]))
        self.assertLess(begin(spans["publish"]), begin(spans["pull"]))
        self.assertLess(begin(spans["install"]), begin(spans["pull"]))
        self.assertLessEqual(end(spans["pull"]), begin(spans["commit"]))
        for batch in batches:  # a discarded one may begin at any time: its thread looks whether it is told to end, then waits
            self.assertLess(batch["ts"], end(spans["diff"]))

    def assert_nested(self, timeline):
        """Spans of one line follow each other or lie inside one another: viewers draw them wrong otherwise."""
        lines = {}
        for event in timeline["traceEvents"]:
            if event["ph"] == "X":
                lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
        self.assertGreater(len(lines), 5)
        for line in lines.values():
            around = []
            for ts, minus_dur, name in sorted(line):
                while around and around[-1][0] <= ts + 0.002:
                    around.pop()
                if around:
                    self.assertLessEqual(ts - minus_dur, around[-1][0] + 0.002, (name, around[-1][1]))
                around.append((ts - minus_dur, name))

    def test_a_full_update_out_of_the_agents_memory(self):
        publish, http, pull = self.record(local="always")
        self.cli("trace", publish, http, pull, "--version", "step_1")
        self.assertIn("local copy", self.out)
        self.assertIn("serve local", self.out)
        self.assertNotIn("serve extent", self.out)

    def test_summary_picture_and_the_agents_file(self):
        publish, http, pull = self.record()
        self.cli("trace", publish, http, pull)
        for word in ("step_2", "offload", "wait ready", "8.00 MiB", "agent cli"):
            self.assertIn(word, self.out)
        self.cli("trace", publish, http, pull, "--version", "step_1")
        self.assertIn("serve extent", self.out)
        self.cli("trace", publish, pull, "--version", "step_7", expect=MISSING)
        self.assertIn("step_7", self.err)

        self.assertEqual(self.agent.end(15)[0], 0)
        got = self.cli_json("trace", publish, self.tmp / "agent.json", pull, "-o", self.tmp / "all.json", "--svg",
                            self.tmp / "update.svg")
        self.assertEqual((got["number"], got["label"]), (2, "step_2"))
        stages = {s["stage"]: s for s in got["stages"]}
        self.assertEqual(stages["offload"]["begin_s"], 0)
        self.assertEqual(stages["offload"]["bytes"], TENSOR_BYTES)
        for stage in stages.values():
            self.assertGreater(stage["took_s"], 0, stage)
        self.assertEqual({p["clock_from"] for p in got["processes"]}, {"same"})
        # What was merged says the same as what it was made of.
        again = self.cli_json("trace", self.tmp / "all.json")
        self.assertEqual([s["stage"] for s in again["stages"]], [s["stage"] for s in got["stages"]])
        self.assertAlmostEqual(again["stages"][-1]["begin_s"], got["stages"][-1]["begin_s"], places=6)
        picture = xml.etree.ElementTree.parse(self.tmp / "update.svg").getroot()
        texts = {t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")}
        self.assertLessEqual({"publish", "agent cli", "pull", "offload", "commit"}, texts)

    def test_sources_that_are_none(self):
        good = {"deltasync": {"schema": "deltasync-trace-1", "versions": [], "processes": [
            {"process": "p", "pid": 1, "host": "h", "boot_id": "b", "clock": "c", "dropped": 0, "clocks": [],
             "anchor": {"monotonic_us": 1.0, "realtime_us": 2.0}}]}, "traceEvents": []}
        other = json.loads(json.dumps(good))
        other["deltasync"]["schema"] = "deltasync-trace-2"
        no_anchor = json.loads(json.dumps(good))
        del no_anchor["deltasync"]["processes"][0]["anchor"]
        for name, text, code in (("noise", "neither this nor that", NOT_VERIFIED),
                                 ("cut", json.dumps(good)[:-9], NOT_VERIFIED),
                                 ("chrome", '{"traceEvents": []}', UNSUPPORTED),
                                 ("schema", json.dumps(other), UNSUPPORTED),
                                 ("anchor", json.dumps(no_anchor), NOT_VERIFIED),
                                 ("empty", json.dumps(good), MISSING)):
            with self.subTest(name=name):
                (self.tmp / name).write_text(text)
                self.cli("trace", self.tmp / name, expect=code)
                self.assertIn(str(self.tmp / name), self.err)
        self.assertIn("no span", self.err)
        self.cli("trace", self.tmp / "nothing", expect=MISSING)
        self.assertIn("nothing", self.err)
        self.cli("trace", self.tmp, expect=USAGE)
        self.cli("trace", expect=USAGE)
        self.cli("trace", "http://nowhere", expect=USAGE)

    def test_names_do_nothing_to_the_terminal(self):
        red, clear = "\x1b[31m", "\u009b2J"
        json_file = {"deltasync": {"schema": "deltasync-trace-1", "versions": [
            {"id": "000000000000e18c:3", "label": f"step {red}"}], "processes": [
                {"process": f"p{clear}", "pid": 1, "host": "h\x07", "boot_id": "b", "clock": clock, "dropped": 3,
                 "clocks": [], "anchor": {"monotonic_us": 1.0, "realtime_us": 2.0}} for clock in ("c", "d")]},
            "traceEvents": [{"ph": "X", "name": "commit\x7f\r", "pid": 1, "tid": 1, "ts": 1, "dur": 1,
                             "args": {"version": "000000000000e18c:3"}}]}
        (self.tmp / "hostile.json").write_text(json.dumps(json_file))
        self.cli("trace", self.tmp / "hostile.json")
        for word in (r"step \x1b[31m", r"p\x9b2J", r"commit\x7f\x0d", r"h\x07"):
            self.assertIn(word, self.out)
        self.cli("trace", self.tmp / "hostile.json", "--version", red, expect=MISSING)
        self.assertIn(r"\x1b[31m", self.err)
        for text in (self.out, self.err):
            self.assertEqual({c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n"}, set())
        self.assertEqual(self.cli_json("trace", self.tmp / "hostile.json")["label"], f"step {red}")

    def test_agents_that_cannot_answer(self):
        self.cli("trace", "http://127.0.0.1:1", "--deadline-s", "2", expect=CONNECTION)
        self.assertIn("http://127.0.0.1:1", self.err)
        agent = Agent(self, BIN / "deltasync-agent", self.tmp / "agent")
        self.cli("trace", f"http://{agent.http}/", expect=CONNECTION)
        self.assertIn("--trace FILE", self.err)

    def test_a_file_that_cannot_be_written_is_known_at_once(self):
        missing = self.tmp / "no" / "trace.json"
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--trace", missing, expect=MISSING)
        self.assertIn(str(missing), self.err)
        done = subprocess.run([BIN / "deltasync-agent", "--name", "x", "--shm-dir", self.tmp, "--socket",
                               self.tmp / "s", "--trace", missing], capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 5)
        self.assertIn(str(missing).encode(), done.stderr)

    def test_a_failed_pull_leaves_its_timeline(self):
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--deadline-s", "2", "--trace",
                 self.tmp / "t.json", expect=CONNECTION)
        self.assertEqual(json.loads((self.tmp / "t.json").read_text())["deltasync"]["schema"], "deltasync-trace-1")

    def test_a_benchmark_records_all_its_processes(self):
        theirs = {"bench.json.agent": "{not ours", "bench.json.receiver": "{}", "bench.json.trainer": ""}
        for name, text in theirs.items():  # somebody's, who likes such names
            (self.tmp / name).write_text(text)
        self.cli("bench", "e2e", "--model-gib", "0.01", "--shm-dir", self.tmp, "--json", "--trace",
                 self.tmp / "bench.json", timeout=120)
        got = self.cli_json("trace", self.tmp / "bench.json")
        self.assertEqual({p["process"].split()[0] for p in got["processes"]}, {"trainer", "agent", "receiver"})
        self.assertEqual(got["number"], 6)
        self.assertLessEqual({"offload", "copy", "publish", "pull", "commit"}, {s["stage"] for s in got["stages"]})
        self.assertEqual(sorted(p.name for p in self.tmp.iterdir()), sorted(["bench.json", *theirs]))
        for name, text in theirs.items():
            self.assertEqual((self.tmp / name).read_text(), text)


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
