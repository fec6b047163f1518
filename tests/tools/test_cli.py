"""`deltasync` without an agent, run as its users run it: usage, `inspect`, `diff`; exit codes and JSON."""

import json
import math
import os
import pty
import subprocess
import sys
import unittest

from cli_support import (
    BIN, CLI, CONNECTION, CliTest, DEADLINE_S, MISSING, NOT_VERIFIED, NO_SPACE, OTHER, UNSUPPORTED, USAGE,
    VERSION, bf16_words, write_model,
)


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
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--cores", "8191"],
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--cores", "few"],
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--number", "1", "--follow"],
                     ["pull", "--from", "127.0.0.1:1", "--out", "o", "--count", "1"]):
            with self.subTest(argv=argv):
                self.cli(*argv, expect=USAGE)
                self.assertNotEqual(self.err, "")
        self.cli("nonsense", expect=USAGE)
        self.assertIn("no command is named nonsense", self.err)

    def test_help_says_what_holds_without_an_option(self):
        for command in ("publish", "relay", "status", "doctor", "inspect", "trace"):
            self.assertRegex(self.cli(command, "--help"), r"--deadline-s \S+ in \[[^]]*\]=\d+", command)

    def test_an_address_that_is_none_is_a_usage_error(self):
        self.cli("pull", "--from", "nowhere", "--out", self.tmp / "out", expect=USAGE)
        self.assertIn("nowhere", self.err)

    def test_all_programs_are_of_one_version(self):
        version = self.cli("--version")
        self.assertRegex(version, r"^\d+\.\d+\.\d+\n$")
        for program in ("deltasync-agent", "deltasync-bench"):
            done = subprocess.run([str(BIN / program), "--version"], capture_output=True, timeout=DEADLINE_S)
            self.assertEqual((done.returncode, done.stdout.decode()), (0, version), program)

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
        (self.tmp / "short.safetensors").write_bytes(weights[:7])
        self.cli("inspect", self.tmp / "short.safetensors", expect=NOT_VERIFIED)
        (model / "model.safetensors").write_bytes(weights[:-1])
        self.cli("inspect", model, expect=NOT_VERIFIED)
        self.assertIn("model.safetensors", self.err)

    def test_of_a_large_file_the_header_is_read(self):
        size = 1 << 38
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with open(self.tmp / "large.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
        self.assertEqual(self.cli_json("inspect", self.tmp / "large.safetensors")["data_bytes"], size)

    def test_a_pipe_is_no_file(self):
        os.mkfifo(self.tmp / "pipe")
        self.cli("inspect", self.tmp / "pipe", expect=USAGE)
        self.cli("trace", self.tmp / "pipe", expect=USAGE)

    def test_a_closed_stdout_is_no_connection(self):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run([str(CLI), "inspect", str(self.model("a"))], stdout=writer, stderr=subprocess.PIPE,
                                  timeout=DEADLINE_S, check=False)
        finally:
            os.close(writer)
        self.assertEqual(done.returncode, OTHER, done.stderr)

    def test_nobody_at_the_address(self):
        self.cli("inspect", "127.0.0.1:1", "--deadline-s", "2", expect=CONNECTION)


class DiffTest(CliTest):
    def test_of_what_a_pull_keeps_the_current_version_is_taken(self):
        self.model("out/versions/1"), self.model("b", lambda words: [words[0] + 1, *words[1:]])
        (self.tmp / "out" / "current").symlink_to("versions/1")
        self.assertEqual(self.cli_json("diff", self.tmp / "out", self.tmp / "b")["changed"], 1)
        self.assertEqual(self.cli_json("diff", self.tmp / "b", self.tmp / "out")["changed"], 1)

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


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
