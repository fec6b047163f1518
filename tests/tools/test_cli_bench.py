"""`deltasync bench`: every case runs, and has the fields that scripts read."""

import os
import sys
import time
import unittest

from cli_support import CLI, Child, CliTest, DEADLINE_S, USAGE


# Size and steps of a benchmark that only has to run.
SMALL = ("--model-gib", "0.01", "--density", "0.01")


class BenchTest(CliTest):
    """Every case runs, has the contract's fields, and measures two things of one order of magnitude."""

    def bench(self, case, *options, fields):
        shm = self.tmp / "shm"
        shm.mkdir(exist_ok=True)
        got = self.cli_json("bench", case, *options, "--shm-dir", shm, timeout=DEADLINE_S * 2)
        self.assertEqual(os.listdir(shm), [])
        self.assertEqual(got["case"], case)
        self.assertEqual([f for f in fields if f not in got], [])
        for name, value in got.items():
            if name == "over_bytes_ms":  # a difference of two times
                continue
            if name.endswith(("_s", "_gbps", "_ms")) and not isinstance(value, dict):
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

    def test_copy(self):
        got = self.bench("copy", "--model-gib", "0.1", fields=["forms", "form", "chosen", "isa"])
        names = [row["form"] for row in got["forms"]]
        self.assertIn("memcpy", names)
        self.assertIn(got["form"], names)
        self.assertIs(got["chosen"], True)
        for row in got["forms"]:
            self.assertGreater(row["gbps"], 0)
        self.assertGreater(got["ratio_to_memcpy"], 0)

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
        for speed in (got["diff_encode_gbps"], got["verify_gbps"], compact["encode_gbps"], compact["verify_gbps"]):
            self.assertGreater(speed, 0)
        self.assertEqual(sum(codec["changed"] for codec in compact["codecs"].values()), got["changed"])

    def test_packed(self):
        got = self.bench("packed", *SMALL, fields=["break_even_link_gbit"])
        for speed in (got["pack_gbps_per_thread"], got["unpack_gbps_per_thread"]):
            self.assertGreater(speed, 0)
        self.assertLess(got["share"], 0.7)
        self.assertEqual(got["share"], got["packed_bytes"] / got["model_bytes"])
        self.assertGreater(got["delta"]["zstd_bytes"], 0)
        (directory,) = self.successive(1)
        got = self.bench("packed", "--from", directory, fields=["share"])
        self.assertNotIn("model_gib", got)
        self.assertNotIn("delta", got)

    def test_codec_of_two_directories(self):
        a, b = self.successive(6)[::5]
        got = self.bench("codec", "--from", a, b, fields=["density", "bits_per_change"])
        self.assertNotIn("model_gib", got)
        self.assertEqual(got["changed"], self.cli_json("diff", a, b)["changed"])
        self.cli("bench", "e2e", "--from", a, b, expect=USAGE)

    def test_merge(self):
        got = self.bench("merge", *SMALL, "--steps", "3", fields=["merge_s", "merge_gbps", "density", "target_tiles"])
        self.assertEqual(got["steps"], 3)
        self.assertIs(got["verified"], True)
        self.assertLess(got["merged_bytes"], got["chain_bytes"])
        self.assertGreaterEqual(got["merged_bytes"], got["direct_bytes"])
        self.assertGreater(got["merged_density"], got["density"])
        self.assert_ratio(got, "merged_to_chain", "merged_bytes", "chain_bytes")

    def test_apply(self):
        got = self.bench("apply", *SMALL, fields=["memcpy_s", "apply_s", "ratio_to_memcpy", "limit_s", "ratio_to_limit"])
        self.assert_ratio(got, "ratio_to_memcpy", "apply_s", "memcpy_s")
        self.assert_ratio(got, "ratio_to_limit", "apply_s", "limit_s")

    def test_gpu_on_a_fake_device(self):
        # By default the model is one that this device has room for.
        fields = ["model_bytes", "density", "delta_bytes", "verify_s", "delta_absolute_bytes", "verify_absolute_s",
                  "pause_ms", "scatter_ms", "wake_ms", "wake_gbps", "wake_to_limit", "wake_copied_gbps",
                  "pinned_d2h_limit_gbps", "offload_gbps", "offload_to_limit", "offload_ms", "offload_write_ms",
                  "pinned_h2d_limit_gbps", "full_h2d_gbps", "full_h2d_to_limit",
                  "hbm_limit_gbps", "hbm_limit_bytes", "attest_ms", "attest_gbps", "attest_to_limit",
                  "devices", "fanout_h2d_gbps", "fanout_nccl_gbps", "fanout_nccl_to_h2d"]
        got = self.bench("gpu", "--fake-device", fields=fields)
        for name in fields:
            self.assertGreater(got[name], 0, name)
        self.assert_ratio(got, "offload_to_limit", "offload_gbps", "pinned_d2h_limit_gbps")
        self.assert_ratio(got, "full_h2d_to_limit", "full_h2d_gbps", "pinned_h2d_limit_gbps")
        self.assert_ratio(got, "attest_to_limit", "attest_gbps", "hbm_limit_gbps")
        self.assert_ratio(got, "fanout_nccl_to_h2d", "fanout_nccl_gbps", "fanout_h2d_gbps")
        self.assertEqual(got["devices"], 2)
        self.assertAlmostEqual(got["density"], 0.01, delta=0.002)
        self.assertGreater(got["delta_absolute_bytes"], got["delta_bytes"])
        self.assert_ratio(got, "wake_to_limit", "wake_gbps", "pinned_h2d_limit_gbps")
        self.assertIs(got["offload_registered"], True)
        self.assertIs(got["shadow_pinned"], True)
        self.assertIn("fake", got["device"])
        self.cli("bench", "diff", "--fake-device", expect=USAGE)

    def test_offload(self):
        got = self.bench("offload", *SMALL, "--overlap-threads", "1",
                         fields=["memcpy_s", "offload_s", "offload_alone_s", "ratio_to_memcpy", "ratio_to_alone"])
        self.assert_ratio(got, "ratio_to_memcpy", "offload_s", "memcpy_s")
        self.assert_ratio(got, "ratio_to_alone", "offload_s", "offload_alone_s")
        self.assertEqual(got["overlap_threads"], 1)
        self.assertEqual(got["copy_form"], "")  # so few copies say nothing of their forms

    def test_export(self):
        got = self.bench("export", "--model-gib", "0.02",
                         fields=["memcpy_s", "direct_s", "plan_s", "tensors", "copies", "rectangles", "temporary_bytes_max"])
        self.assert_ratio(got, "ratio_to_memcpy", "direct_s", "memcpy_s")
        self.assert_ratio(got, "read_to_model", "read_bytes", "model_bytes")
        self.assert_ratio(got, "written_to_model", "written_bytes", "model_bytes")
        # Each element is read once and written once, whatever the ranks have twice.
        self.assertEqual((got["read_bytes"], got["written_bytes"]), (got["model_bytes"], got["model_bytes"]))
        self.assertIs(got["verified"], True)
        self.assertEqual(got["ranks"], 8)
        self.assertLess(got["temporary_bytes_max"], got["model_bytes"] / 2)

    def test_full(self):
        got = self.bench("full", *SMALL, fields=["limit_gbps", "digested_limit_gbps", "pull_gbps", "plain_gbps"])
        self.assert_ratio(got, "ratio_to_limit", "pull_gbps", "limit_gbps")
        self.assert_ratio(got, "ratio_to_digested_limit", "pull_gbps", "digested_limit_gbps")
        self.assertEqual({"sendfile", "sendfile, digests", "send"} - got["plain_gbps"].keys(), set())

    def test_e2e(self):
        got = self.bench("e2e", *SMALL, "--versions", "1",
                         fields=["memcpy_s", "offload_s", "guard_s", "commit_to_delta_s", "pull_s", "commit_s", "total_s",
                                 "ratio_to_memcpy", "verified", "wire_bytes", "agent_rss_bytes", "receiver_rss_bytes"])
        self.assert_ratio(got, "ratio_to_limit", "total_s", "limit_s")
        self.assertIs(got["verified"], True)
        self.assertEqual(got["mode"], "delta")
        self.assertGreaterEqual(got["versions"], 5)
        self.assertAlmostEqual(got["density"], 0.01, delta=0.002)
        self.assertNotEqual(got["density"], 0.01)  # measured, not what was asked for
        self.assertGreater(got["total_s"], got["pull_s"])
        self.assertLess(got["wire_bytes"], got["full_bytes"] / 10)
        self.assert_ratio(got, "ratio_to_memcpy", "total_s", "memcpy_s")

    def test_e2e_compact(self):
        plain, compact = (self.bench("e2e", *SMALL, "--versions", "1", *flags, fields=["verified", "compact"])
                          for flags in ((), ("--compact",)))
        self.assertIs(compact["verified"], True)
        self.assertEqual((plain["compact"], compact["compact"]), (False, True))
        self.assertLess(compact["wire_bytes"], plain["wire_bytes"] * 0.9)

    def test_tensors(self):
        got = self.bench(
            "tensors", fields=["update_ms", "one_tensor_ms", "over_bytes_ms", "offload_ms", "metadata_bytes_per_update"])
        self.assertAlmostEqual(got["over_bytes_ms"], got["update_ms"] - got["one_tensor_ms"])
        self.assert_ratio(got, "ratio_to_limit", "update_ms", "limit_ms")
        self.assertGreaterEqual(got["update_ms"], got["offload_ms"])  # from the call of offload on
        self.assertLess(got["metadata_bytes_per_update"], 4096)  # whatever the number of tensors

    def test_relay(self):
        got = self.bench("relay", *SMALL, "--versions", "1", fields=["density", "relay_commit_s", "node_diff_s"])
        self.assert_ratio(got, "ratio_to_direct", "relayed_s", "direct_s")
        self.assertIs(got["verified"], True)
        self.assertEqual(got["mode"], "delta")
        self.assertGreater(got["relayed_s"], got["relay_commit_s"])

    def test_fanout(self):
        got = self.bench("fanout", *SMALL, "--versions", "1", fields=["density", "diff_cpu_ms"])
        self.assertIs(got["verified"], True)
        rows = got["by_receivers"]
        self.assertEqual([row["receivers"] for row in rows], [1, 4, 16, 64])
        for row in rows:
            percent = 100 * row["agent_cpu_ms_each"] / got["diff_cpu_ms"]
            self.assertAlmostEqual(row["percent_of_diff"], percent, delta=1e-6)
            self.assertAlmostEqual(row["ratio_to_plain"], row["full_gb_per_s"] / row["plain_gb_per_s"], delta=1e-6)

    def test_fleet_metadata(self):
        got = self.bench("fleet-metadata", "--tensors", "9000", "--subscriptions", "20", "--versions", "1",
                         fields=["connect_s", "subscribe_ms", "agent_bytes_per_subscription"])
        self.assertEqual((got["tensors"], got["subscriptions"]), (9000, 20))
        self.assertEqual(got["ranges_each"], 15)  # of each of three layers four tensors of attention, and experts
        self.assertGreater(got["metadata_bytes_per_update"], 500)
        self.assertLess(got["metadata_bytes_worst"], 2048)  # whatever the number of tensors

    def test_colocated(self):
        got = self.bench("colocated", *SMALL, fields=["changed", "delta_wire_bytes", "metadata_us_per_tensor",
                                                      "metadata_fill_us", "metadata_take_us", "fill_to_take"])
        for way in ("", "tcp_"):
            for update in ("full", "delta"):
                self.assert_ratio(got, f"{way}{update}_ratio_to_memcpy", f"{way}{update}_s", "memcpy_s")
        # Each tile came once: out of memory, or by the connection.
        self.assertLess(got["wire_bytes"], got["local_bytes"] / 10)
        self.assertGreaterEqual(got["tcp_wire_bytes"], got["local_bytes"])
        self.assert_ratio(got, "pipelined_to_serial", "pipelined_s", "serial_s")

    def test_partial(self):
        got = self.bench("partial", "--model-gib", "0.07", fields=["density", "model_bytes"])
        self.assertIs(got["verified"], True)
        rows = {row["ranks"]: row for row in got["rows"]}
        self.assertEqual(sorted(rows), [1, 2, 4, 8])
        whole = rows[1]
        for ranks, row in rows.items():
            # A rank gets its share and the little that all have: norms, frame headers.
            self.assertAlmostEqual(row["full_bytes"] * ranks / whole["full_bytes"], 1, delta=0.01)
            self.assertAlmostEqual(row["delta_share"] * ranks, 1, delta=0.05)
            self.assertAlmostEqual(row["deltas_to_whole"], 1, delta=0.05)

    def test_baseline(self):
        got = self.bench("baseline", "--model-gib", "0.02", fields=["limit_gbps", "memcpy_s", "isa"])
        rows = {row["system"]: row for row in got["rows"]}
        self.assertAlmostEqual(rows["AstraFlow"]["bits_per_change"], 48, delta=0.5)
        # The sizes stand in the order in which they were published.
        sizes = [rows[system]["bytes"] for system in ("AstraFlow, from disk", "memcpy", "AstraFlow", "PULSE", "NeMo-RL", "deltasync",
                                                      "deltasync, slow links")]
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        self.assertLess(rows["AstraFlow, from disk"]["bytes"] - rows["memcpy"]["bytes"], 65536)  # its header
        self.assertEqual(rows["memcpy"]["encode_to_memcpy"], 1)
        for row in rows.values():
            for work in ("encode", "decode"):
                self.assertGreater(row[f"{work}_ms"], 0)
                self.assertAlmostEqual(row[f"{work}_to_memcpy"], row[f"{work}_ms"] / 1e3 / got["memcpy_s"])
            self.assertAlmostEqual(row["bits_per_change"], 8 * row["bytes"] / got["changed"])

    def test_baseline_as_a_table(self):
        self.cli("bench", "baseline", "--model-gib", "0.02")
        self.assertIn("| format | system | bytes |", self.out)
        self.assertIn("| dense XOR, zstd-1 | slime |", self.out)

    def test_unknown_case(self):
        self.cli("bench", "nothing", expect=USAGE)
        self.assertIn("e2e", self.err)

    def test_what_a_killed_one_started_ends_with_it(self):
        shm = self.tmp / "shm"
        shm.mkdir()

        def wait_for(there):
            end = time.monotonic() + DEADLINE_S
            while bool(list(shm.glob("*.g1"))) != there:
                self.assertLess(time.monotonic(), end, list(shm.iterdir()))
                time.sleep(0.02)

        killed = Child(self, [CLI, "bench", "e2e", *SMALL, "--versions", "1000", "--shm-dir", shm])
        wait_for(there=True)
        killed.process.kill()
        wait_for(there=False)
        out, _ = killed.process.communicate(timeout=DEADLINE_S)  # until nobody has its pipes any more
        self.assertEqual(out, b"")


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
