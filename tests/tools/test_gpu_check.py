"""tools/gpu_check.sh and what it makes of its results, with stand-ins for the compiler, the build, the tests and the bench."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What each program does unless a test says otherwise.
PROGRAMS = {
    "nvcc": """while (($#)); do [[ $1 == -o ]] && out=$2; shift; done
printf '#!/bin/sh\\n. "$STAND/probe"\\n' >"$out"; chmod +x "$out\"""",
    "probe": 'echo "90 100000 A Device"',
    "g++": "echo 13.2.0",
    "ninja": "exit 9",
    "mount": "exit 32",
    "umount": 'echo "$*" >>"$STAND/umounted"',
    "nvidia-smi": 'echo "A Device, 580.1, 143771 MiB"',
    "cmake": """case $1 in
  --version) echo "cmake version 3.28.1" ;;
  --build) . "$STAND/build" ;;
  -S) echo "$*" >"$STAND/configured"; cat "$STAND/configure_says" ;;
esac""",
    "configure_says": "-- CUDA 13.0: devices are supported",
    "build": """mkdir -p build-gpu/bin
{ echo '#!/bin/bash'; cat "$STAND/bench"; } >build-gpu/bin/deltasync
chmod +x build-gpu/bin/deltasync""",
    "ctest": """if [[ $* == *" -N"* ]]; then
  printf '  Test  #%s: %s\\n' 1 test_one_cuda 12 test_two_cuda
  exit 0
fi
while (($#)); do [[ $1 == -R ]] && name=${2//[^a-z_]/}; [[ $1 == --output-junit ]] && xml=$2; shift; done
. "$STAND/test\"""",
    "test": """echo "<testsuite><testcase name='$name' status='run'><system-out>fine</system-out></testcase></testsuite>" >"$xml\"""",
    "bench": 'echo "$*" >>"$STAND/benches"; cat "$STAND/figures"',
    "figures": json.dumps({"case": "gpu", "pause_ms": 3.0, "offload_to_limit": 0.93, "offload_registered": True,
                           "full_h2d_to_limit": 0.5, "attest_to_limit": 0.7}),
}


class GpuCheckTest(unittest.TestCase):
    def setUp(self):
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-gpu-check-"))
        self.addCleanup(shutil.rmtree, self.tmp, ignore_errors=True)
        (self.tmp / "tools/ci").mkdir(parents=True)
        for name in ("tools/gpu_check.sh", "tools/ci/gpu_results.py"):
            shutil.copy(ROOT / name, self.tmp / name)
        self.stand = self.tmp / "stand"
        self.stand.mkdir()
        for name, text in PROGRAMS.items():
            self.put(name, text)

    def put(self, name, text):
        path = self.stand / name
        path.write_text(text if name in ("figures", "configure_says") else f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def check(self, *arguments):
        """Runs it; the exit status, and the JSON that is there in any case."""
        env = os.environ | {"PATH": f"{self.stand}:{os.environ['PATH']}", "STAND": str(self.stand)}
        done = subprocess.run([self.tmp / "tools/gpu_check.sh", *arguments], env=env, capture_output=True, text=True,
                              timeout=120)
        self.said = done.stdout + done.stderr
        return done.returncode, json.loads((self.tmp / "build-gpu/gpu_check.json").read_text())

    def fails(self, reason, *arguments):
        status, got = self.check(*arguments)
        self.assertEqual((status, got["verdict"]), (1, "failed"), self.said)
        self.assertIn(reason, "\n".join(got["reasons"]))
        self.assertIn(reason, self.said)
        return got

    def test_all_is_well(self):
        status, got = self.check()
        self.assertEqual(status, 0, self.said)
        self.assertEqual((got["verdict"], got["reasons"]), ("passed", []))
        self.assertEqual(got["device"]["name"], "A Device")
        self.assertEqual(got["device"]["driver"], "580.1")
        self.assertEqual([stage["status"] for stage in got["stages"]], ["ok"] * 4 + ["not built"])
        self.assertEqual(got["tests"], {"passed": 2, "failed": [], "skipped": [], "not_reached": [], "output": {}})
        self.assertEqual({bench["density"] for bench in got["bench"]}, {0.01, 0.05})
        # A missed aim is told, and fails nothing.
        self.assertEqual([aim["status"] for aim in got["aims"]], ["met", "met", "missed", "met"])
        self.assertIn("full H2D >= 0.9 of the pinned limit: missed (0.5)", self.said)
        configured = (self.stand / "configured").read_text()
        self.assertIn("-DDELTASYNC_WERROR=OFF", configured)
        self.assertIn("-DCMAKE_CUDA_ARCHITECTURES=90", configured)

    def test_what_was_packed_elsewhere(self):
        packed = self.tmp / "packed"
        (packed / "bin").mkdir(parents=True)
        (packed / "built_in").write_text("/some/where\n")
        (packed / "CTestTestfile.cmake").write_text('add_test(one "/some/where/build-gpu/tests/one")\n')
        (packed / "probe").symlink_to(self.stand / "probe")
        program = packed / "bin/deltasync"
        program.write_text(f"#!/bin/bash\n{PROGRAMS['bench']}\n")
        program.chmod(0o755)
        subprocess.run(["tar", "-C", packed, "-czf", self.tmp / "packed.tgz", "."], check=True)
        for name in ("nvcc", "g++", "ninja"):
            self.put(name, "exit 1")
        (self.tmp / "build-gpu").mkdir()
        status, got = self.check("--packed", str(self.tmp / "packed.tgz"))
        self.assertEqual((status, got["verdict"]), (0, "passed"), self.said)
        self.assertFalse((self.stand / "configured").exists())
        listed = (self.tmp / "build-gpu/CTestTestfile.cmake").read_text()
        self.assertEqual(listed, f'add_test(one "{self.tmp}/build-gpu/tests/one")\n')

    def test_no_device(self):
        self.put("probe", "echo no CUDA-capable device is detected; exit 1")
        got = self.fails("no device: no CUDA-capable device is detected")
        self.assertEqual(got["device"], {})
        self.assertEqual([stage["status"] for stage in got["stages"]], ["ok", "failed"] + ["not reached"] * 3)
        self.assertEqual({aim["status"] for aim in got["aims"]}, {"not measured"})
        self.assertFalse((self.stand / "configured").exists())

    def test_tools_that_are_missing_or_old(self):
        self.put("g++", "echo 11.4.0")
        self.fails("g++ is 11.4.0; 12 or later is needed")
        self.put("cmake", 'echo "cmake version 3.22.1"')
        self.fails("cmake is 3.22.1; 3.25 or later is needed")

    def test_a_compiler_that_nvcc_refuses(self):
        self.put("nvcc", "echo 'host_config.h:143: error: unsupported GNU version!'; exit 1")
        self.fails("unsupported GNU version!")

    def test_cmake_that_finds_no_cuda(self):
        self.put("configure_says", "-- CUDA: not used; tests that need a device are skipped")
        got = self.fails("cmake found no CUDA that it can use")
        self.assertEqual(got["stages"][2]["status"], "failed")

    def test_a_build_that_fails(self):
        self.put("build", "echo 'a.cpp:1: error: of all things'; exit 1")
        self.fails("build: the build failed: a.cpp:1: error: of all things")

    def test_a_build_without_end(self):
        self.put("build", "exec sleep 100")
        self.fails("the build did not end within", "--limit", "5")

    def test_failed_and_skipped_tests(self):
        self.put("test", """case $name in
  *one*) inside="<failure/><system-out>a.cpp:1: Failure</system-out>" ;;
  *) inside="<system-out>[  SKIPPED ] Suite.Case (0 ms)</system-out>" ;;
esac
echo "<testsuite><testcase name='$name' status='run'>$inside</testcase></testsuite>" >"$xml\"""")
        got = self.fails("tests failed: test_one_cuda")
        self.assertEqual(got["tests"]["skipped"], ["test_two_cuda: Suite.Case"])
        self.assertEqual(got["tests"]["output"], {"test_one_cuda": ["a.cpp:1: Failure"]})
        self.assertTrue(got["bench"])

    def test_time_that_is_up_in_the_tests(self):
        self.put("test", "sleep 6; exit 1")
        got = self.fails("tests not reached: test_one_cuda, test_two_cuda", "--limit", "10")
        self.assertEqual(got["stages"][3]["status"], "timed out")

    def test_benches_that_fail_or_take_too_long(self):
        self.put("bench", "echo of all things >&2; exit 8")
        got = self.fails("failed: of all things")
        self.assertEqual({bench["status"] for bench in got["bench"]}, {"failed"})
        self.put("bench", "exec sleep 100")
        got = self.fails("timed out", "--limit", "16")
        self.assertEqual([bench["status"] for bench in got["bench"]], ["timed out", "not reached"])
        self.assertEqual({aim["status"] for aim in got["aims"]}, {"not measured"})

    def test_an_offload_through_a_buffer_is_not_what_was_to_be_measured(self):
        figures = json.loads(PROGRAMS["figures"]) | {"offload_registered": False}
        self.put("figures", json.dumps(figures))
        _, got = self.check()
        self.assertEqual([aim["status"] for aim in got["aims"]], ["met", "not measured", "missed", "met"])

    def test_little_shared_memory(self):
        self.put("df", """case $* in
  *"/dev/shm") printf 'Avail\\n64M\\n' ;;
  *) printf 'Avail\\n9000M\\n' ;;
esac""")
        self.put("stat", "echo ext2/ext3")
        _, got = self.check()
        place = self.tmp / "build-gpu/shm"
        self.assertIn(f"/dev/shm has 64 MiB: shared memory goes to {place}", self.said)
        self.assertIn(f"--shm-dir {place}", (self.stand / "benches").read_text())
        self.assertLessEqual(max(bench["model_mib"] for bench in got["bench"]), 1024)

    def test_little_shared_memory_where_more_may_be_mounted(self):
        place = self.tmp / "build-gpu/shm"
        self.put("df", """case $* in
  *"/dev/shm") printf 'Avail\\n64M\\n' ;;
  *) printf 'Avail\\n90000M\\n' ;;
esac""")
        self.put("stat", f'[[ $* == *{place} ]] && echo tmpfs || echo ext2/ext3')
        self.put("mount", 'echo "$*" >>"$STAND/mounted"')
        for bench in (PROGRAMS["bench"], "exit 3"):
            self.put("bench", bench)
            for name in ("mounted", "umounted", "benches"):
                (self.stand / name).unlink(missing_ok=True)
            self.check()
            self.assertEqual((self.stand / "mounted").read_text(), "-t tmpfs -o size=80% deltasync build-gpu/shm\n")
            # What a run before left there, and at the end its own.
            self.assertEqual((self.stand / "umounted").read_text(), f"-l build-gpu/shm\n-l {place}\n")
            if bench != "exit 3":
                self.assertIn(f"--shm-dir {place}", (self.stand / "benches").read_text())


if __name__ == "__main__":
    unittest.main()
