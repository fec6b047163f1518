"""Fleets of real processes on hosts of a lab, with faults between them. At the end every rollout host has the newest
version byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "lab")]
from lab import Lab, Process, different_files, missing, until  # noqa: E402
from topology import LabError, Topology  # noqa: E402

BIN = Path(os.environ["DELTASYNC_BIN"])
DEADLINE_S = float(os.environ.get("DELTASYNC_TEST_DEADLINE_S", "60"))
MIB = 1 << 20
TOKEN = "--token-file ../token"
AGENT = f"deltasync-agent --name job --socket agent.sock --listen 0.0.0.0:7070 {TOKEN}"
PROBE = """
import socket, time
began = time.monotonic()
socket.create_connection(('{}', 7070), 1)
print(time.monotonic() - began)
"""
ALONE = 98760 + os.getpid() / 1e7  # seconds of a sleep that nobody else sleeps


def pull(source: str) -> str:
    return f"deltasync pull --from {source}:7070 --out out --follow --json {TOKEN}"


def relay(*sources: str) -> str:
    parents = ",".join(f"{source}:7070" for source in sources)
    return f"deltasync relay --from {parents} --agent agent.sock --json {TOKEN}"


def host(*names: str, **keys: Any) -> dict[str, Any]:
    return {"names": list(names), **keys}


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


class LabTest(unittest.TestCase):
    def lab(self, *hosts: dict[str, Any], mib: int = 8, versions: int = 3, changed: float = 0.3, **more: Any) -> Lab:
        models = {"mib": mib, "versions": versions, "changed": changed}
        self.versions = versions
        lab = Lab(Topology({"hosts": list(hosts), "models": models, **more}), BIN)
        self.enterContext(lab)
        self.addCleanup(self.tell_logs, lab)
        lab.run_all()
        return lab

    def tell_logs(self, lab: Lab) -> None:
        outcome = self._outcome  # type: ignore[attr-defined]
        if outcome is not None and not outcome.success:
            for log in sorted(lab.directory.glob("*.log")):
                print(f"== {log.name}", *log.read_text(errors="replace").splitlines()[-8:], sep="\n", file=sys.stderr)

    def trainer(self, lab: Lab, name: str = "trainer") -> Process:
        """Publishes a version for each line that it is told."""
        models = " ".join(f"../models/step_{step}" for step in range(self.versions))
        command = f"deltasync publish --agent agent.sock --step-on-stdin --json --model {models}"
        return lab.run(name, "publish", command, stdin=subprocess.PIPE)

    def has(self, lab: Lab, name: str, step: int) -> bool:
        return not different_files(lab.directory / f"models/step_{step}", lab.directory / name / "out/current")

    def until_has(self, lab: Lab, name: str, step: int) -> None:
        until(lambda: self.has(lab, name, step), f"{name}: step_{step}", DEADLINE_S)

    def until_sent(self, lab: Lab, name: str, count: int) -> None:
        goal = lab.bytes_to(name) + count
        until(lambda: lab.bytes_to(name) >= goal, f"{name}: {count} bytes", DEADLINE_S)

    def holds_nothing(self, lab: Lab, name: str) -> bool:
        return not (lab.directory / name / "out/current").exists()

    def pulled(self, lab: Lab, name: str) -> list[dict[str, Any]]:
        return self.told(lab, f"{name}.pull")

    def told(self, lab: Lab, process: str) -> list[dict[str, Any]]:
        lines = (lab.directory / f"{process}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def connect_s(self, lab: Lab, name: str, other: str) -> float | None:
        """None: it does not reach the other host's agent."""
        probe = [sys.executable, "-c", PROBE.format(other)]
        child = lab.node(name).popen(probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        said = child.communicate()[0]
        return float(said) if said else None


class FaultsTest(LabTest):
    def test_a_link_is_cut_in_a_pull(self) -> None:
        lab = self.lab(host("trainer", run={"agent": AGENT}), host("rollout1", rate="16mbit"), host("rollout2"))
        trainer = self.trainer(lab)
        trainer.say("")
        lab.run("rollout1", "pull", pull("trainer"))
        self.until_sent(lab, "rollout1", MIB)
        lab.cut("rollout1")
        sent = lab.bytes_to("rollout1")
        self.assertTrue(self.holds_nothing(lab, "rollout1"))
        lab.run("rollout2", "pull", pull("trainer"))
        self.until_has(lab, "rollout2", 0)
        trainer.say("")
        self.until_has(lab, "rollout2", 1)
        self.assertEqual(lab.bytes_to("rollout1"), sent)
        self.assertTrue(self.holds_nothing(lab, "rollout1"))
        lab.restore("rollout1")
        self.until_has(lab, "rollout1", 1)
        trainer.say("")
        for name in ("rollout1", "rollout2"):
            self.until_has(lab, name, 2)
        self.assertEqual(lab.ended(), {})

    def test_one_of_two_trainer_hosts_is_rebooted(self) -> None:
        """Two jobs, as long as one job has one trainer host."""
        rollouts = [host(f"rollout{i}", run={"pull": pull(f"trainer{i}")}) for i in (1, 2)]
        lab = self.lab(host("trainer1", "trainer2", run={"agent": AGENT}), *rollouts, mib=2)
        trainers = [self.trainer(lab, "trainer1"), self.trainer(lab, "trainer2")]
        for step in range(2):
            for trainer in trainers:
                trainer.say("")
            for name in ("rollout1", "rollout2"):
                self.until_has(lab, name, step)
        left = lab.node("trainer1").memory / "left"
        left.touch()
        lab.reboot("trainer1")
        self.assertFalse(left.exists())
        trainers[0].say("")
        self.until_has(lab, "rollout1", 0)
        for _ in range(2):
            trainers[0].say("")
        trainers[1].say("")
        for name in ("rollout1", "rollout2"):
            self.until_has(lab, name, 2)
        for name, epochs in (("rollout1", 2), ("rollout2", 1)):
            self.assertEqual(len({said["id"].split(":")[0] for said in self.pulled(lab, name)}), epochs)
        self.assertEqual([said["mode"] for said in self.pulled(lab, "rollout2")], ["full", "delta", "delta"])
        self.assertEqual(lab.ended(), {})

    def test_a_partition_between_relays(self) -> None:
        """The second relay pulls from the first one's host."""
        relays = [host(name, run={"agent": AGENT, "relay": relay(source)})
                  for name, source in (("relay1", "trainer"), ("relay2", "relay1"))]  # fmt: skip
        rollouts = [host(f"rollout{i}", run={"pull": pull(f"relay{i}")}) for i in (1, 2)]
        lab = self.lab(host("trainer", run={"agent": AGENT}), *relays, *rollouts, mib=2)
        trainer = self.trainer(lab)
        trainer.say("")
        for name in ("rollout1", "rollout2"):
            self.until_has(lab, name, 0)
        lab.cut("relay1", "relay2")
        trainer.say("")
        self.until_has(lab, "rollout1", 1)
        self.assertIsNone(self.connect_s(lab, "relay1", "relay2"))
        self.assertIsNone(self.connect_s(lab, "relay2", "relay1"))
        self.assertIsNotNone(self.connect_s(lab, "relay2", "trainer"))
        self.assertTrue(self.has(lab, "rollout2", 0))
        lab.restore("relay1", "relay2")
        self.until_has(lab, "rollout2", 1)
        trainer.say("")
        for name in ("rollout1", "rollout2"):
            self.until_has(lab, name, 2)
        self.assertEqual(lab.ended(), {})

    def test_a_parent_that_is_cut_off(self) -> None:
        """Nothing is closed, and nobody says so. Who has another parent does not wait for long."""
        others = {"relay1": ["trainer"], "relay2": ["relay1", "trainer"]}
        relays = [host(name, run={"agent": AGENT, "relay": relay(*parents)}) for name, parents in others.items()]
        rollout = host("rollout", run={"pull": pull("relay2")})
        lab = self.lab(host("trainer", run={"agent": AGENT}), *relays, rollout, mib=2)
        trainer = self.trainer(lab)
        trainer.say("")
        self.until_has(lab, "rollout", 0)
        lab.cut("relay1", "relay2")
        began = time.monotonic()
        trainer.say("")
        self.until_has(lab, "rollout", 1)
        self.assertLess(time.monotonic() - began, 10)  # where no other parent is known it would be 20 s
        for process in ("rollout.pull", "relay2.relay"):
            until(lambda p=process: len(self.told(lab, p)) == 2, process, DEADLINE_S)  # type: ignore[misc]
            self.assertEqual([said["mode"] for said in self.told(lab, process)], ["full", "delta"])
        lab.restore("relay1", "relay2")
        trainer.say("")
        self.until_has(lab, "rollout", 2)
        self.assertEqual(lab.ended(), {})

    def test_a_joiner_in_mid_version(self) -> None:
        slow = host("rollout1", "rollout2", rate="8mbit")
        lab = self.lab(host("trainer", run={"agent": AGENT}), slow, mib=3, changed=0.5)
        trainer = self.trainer(lab)
        trainer.say("")
        lab.run("rollout1", "pull", pull("trainer"))
        self.until_has(lab, "rollout1", 0)
        trainer.say("")
        self.until_sent(lab, "rollout1", MIB // 8)
        self.assertTrue(self.has(lab, "rollout1", 0))  # amid the second version
        lab.run("rollout2", "pull", pull("trainer"))
        self.until_sent(lab, "rollout2", MIB // 4)
        self.assertTrue(self.holds_nothing(lab, "rollout2"))
        trainer.say("")
        for name in ("rollout1", "rollout2"):
            self.until_has(lab, name, 2)
        self.assertEqual(lab.ended(), {})

    def test_killed_stopped_and_started_by_name(self) -> None:
        lab = self.lab(host("trainer", run={"agent": AGENT}), host("rollout1", run={"pull": pull("trainer")}), mib=1)
        trainer = self.trainer(lab)
        trainer.say("")
        self.until_has(lab, "rollout1", 0)
        lab.stop("rollout1.pull")
        state = Path(f"/proc/{lab.processes['rollout1.pull'].child.pid}/status")
        until(lambda: "T (stopped)" in state.read_text(), "stopped", DEADLINE_S)
        trainer.say("")
        lab.cont("rollout1")
        self.until_has(lab, "rollout1", 1)
        lab.kill("rollout1")
        self.assertFalse(lab.processes["rollout1.pull"].runs)
        trainer.say("")
        lab.start("rollout1.pull")
        self.until_has(lab, "rollout1", 2)
        self.assertEqual(lab.ended(), {})


class LinksTest(LabTest):
    def test_rate_delay_and_report(self) -> None:
        lab = self.lab(host("trainer", run={"agent": AGENT}), host("near", rate="40mbit"),
                       host("far", rate="40mbit", delay_ms=30))  # fmt: skip
        self.trainer(lab).say("")
        until(lambda: self.connect_s(lab, "near", "trainer"), "agent", DEADLINE_S)
        for name in ("near", "far"):
            began = time.monotonic()
            lab.run(name, "pull", pull("trainer"))
            self.until_has(lab, name, 0)
            took = time.monotonic() - began
            links = {link["link"]: link for link in lab.report()["links"]}
            found = links[name]
            self.assertEqual(found["rate_bits_per_s"], 40e6)
            self.assertGreater(found["down_bytes"], 2 * MIB)
            self.assertLess(found["up_bytes"], MIB)
            self.assertGreaterEqual(took, found["down_busy_s"] - 0.1)  # less what a link may send at once
            self.assertAlmostEqual(found["down_busy_s"], 8 * found["down_bytes"] / 40e6, 2)
            self.assertGreater(found["down_full_s"], 0)
        arrived = links["near"]["down_bytes"] + links["far"]["down_bytes"]
        self.assertGreaterEqual(links["trainer"]["up_bytes"], arrived - MIB)
        took_s = self.connect_s(lab, "far", "trainer")
        assert took_s is not None
        self.assertGreaterEqual(took_s, 0.06)  # there and back

    def test_the_rate_holds_for_what_a_host_sends_too(self) -> None:
        trainer = host("trainer", rate="20mbit", run={"agent": AGENT})
        lab = self.lab(trainer, host("rollout1", run={"pull": pull("trainer")}), mib=4)
        began = time.monotonic()
        self.trainer(lab).say("")
        self.until_has(lab, "rollout1", 0)
        self.assertGreaterEqual(time.monotonic() - began, lab.report()["links"][0]["up_busy_s"] - 0.1)

    def test_a_host_is_a_node_of_its_own(self) -> None:
        lab = self.lab(host("a", "b"), mib=1, versions=1)
        script = "hostname; touch /dev/shm/mine; ls /dev/shm; getent hosts b | wc -l; ls -d /proc/[0-9]* | wc -l"
        for name in ("a", "b"):
            said, _ = lab.node(name).popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True).communicate()
            words = said.split()
            self.assertEqual(words[:3], [name, "mine", "1"])
            self.assertLess(int(words[3]), 6)
        self.assertFalse(Path("/dev/shm/mine").exists())


class CheckTest(LabTest):
    def test_one_byte_of_a_rollout_host_is_changed(self) -> None:
        check = {"published": "models/step_0", "received": "out/current", "hosts": ["rollout1", "rollout2"]}
        rollouts = host("rollout1", "rollout2", run={"pull": pull("trainer")})
        lab = self.lab(host("trainer", run={"agent": AGENT}), rollouts, mib=1, versions=1, check=check)
        self.assertEqual(lab.differing(), {name: ["config.json", "model.safetensors"] for name in check["hosts"]})
        self.trainer(lab).say("")
        until(lambda: not lab.differing(), "all the same", DEADLINE_S)
        with (lab.directory / "rollout2/out/current/model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        self.assertEqual(lab.differing(), {"rollout2": ["model.safetensors"]})

    def command(self, code: int, *words: object) -> dict[str, Any]:
        """What `tools/lab.py run --json` prints."""
        argv = [sys.executable, str(ROOT / "tools/lab.py"), "run", "--json", "--bin", str(BIN), *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return dict(json.loads(done.stdout))

    def test_exit_codes(self) -> None:
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "t.toml"
        write = "mkdir -p {0} && printf x{1} >{0}/a.safetensors"
        hosts = f'[[hosts]]\nnames=["a"]\nrun.x = "sh -c \'{write.format("m", 1)}\'"\n[[hosts]]\nnames=["b"]\n'
        check = '[check]\npublished = "a/m"\nreceived = "out"\nhosts = ["b"]\n'
        for number, code, seconds in ((1, 0, DEADLINE_S), (2, 1, 0.5)):
            path.write_text(f'{hosts}run.x = "sh -c \'{write.format("out", number)}\'"\n{check}')
            found = self.command(code, path, "--seconds", seconds)
            self.assertEqual(list(found["differing"]), ["b"] if code else [])

    def test_the_example(self) -> None:
        example = ROOT / "docs/examples/lab/relays.toml"
        found = self.command(0, example, "--faults", example.with_suffix(".faults"), "--seconds", DEADLINE_S)
        self.assertEqual((found["differing"], found["ended"]), ({}, {}))
        self.assertEqual(len(found["links"]), 7)


class EndTest(LabTest):
    def outside(self) -> tuple[list[str], bool]:
        """Links, and whether the file that hosts made in shared memory is there."""
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        return [line.split()[1] for line in links.splitlines()], Path(f"/dev/shm/left-{ALONE}").exists()

    def sleepers(self) -> bool:
        return subprocess.run(["pgrep", "-f", f"sleep {ALONE}"], stdout=subprocess.DEVNULL, check=False).returncode == 0

    def test_an_exception(self) -> None:
        before = self.outside()
        with self.assertRaises(ZeroDivisionError), Lab(Topology({"hosts": [host("a", "b", delay_ms=1)]}), BIN) as lab:
            lab.run("a", "x", f"sh -c 'touch /dev/shm/left-{ALONE}; setsid sleep {ALONE} & sleep {ALONE}'")
            lab.stop("a.x")
            pids = [node.init.pid for node in lab.nodes.values()]
            until(self.sleepers, "started", DEADLINE_S)
            raise ZeroDivisionError
        self.assertTrue(all(gone(pid) for pid in pids))
        self.assertFalse(self.sleepers())
        self.assertEqual(self.outside(), before)
        self.assertFalse(lab.directory.exists())

    def test_signals(self) -> None:
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        before = self.outside()
        command = f"sh -c \'touch /dev/shm/left-{ALONE}; setsid sleep {ALONE} & sleep {ALONE}\'"
        (directory / "t.toml").write_text(f'[[hosts]]\nnames = ["a", "b"]\ndelay_ms = 1\nrun.x = "{command}"\n')
        for sign, code in (("TERM", 128 + 15), ("INT", 128 + 2), ("KILL", -9)):
            argv = [sys.executable, str(ROOT / "tools/lab.py"), "run", str(directory / "t.toml")]
            argv += ["--directory", str(directory / sign)]
            with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as child:
                assert child.stderr is not None
                said = [child.stderr.readline() for _ in range(3)]
                pids = [int(line.split("pid ")[1].split()[0]) for line in said]
                until(self.sleepers, "started", DEADLINE_S)
                subprocess.run(["kill", f"-{sign}", str(child.pid)], check=True)
                found = child.wait(DEADLINE_S)
            self.assertEqual(found, code)
            until(lambda pids=pids: all(map(gone, pids)) and not self.sleepers(), f"SIG{sign}", DEADLINE_S)  # type: ignore[misc]
            until(lambda: self.outside() == before, f"SIG{sign}: links", DEADLINE_S)

    def test_what_the_lab_refuses(self) -> None:
        with self.assertRaisesRegex(LabError, "host 'b': rate 'fast': tc qdisc add .*[Ii]llegal"):
            Lab(Topology({"hosts": [host("a"), host("b", rate="fast")]}), BIN).__enter__()
        lab = self.lab(host("a"), mib=1, versions=1)
        for said, act in {
            "no host 'b'; there are a": lambda: lab.run("b", "x", "sleep 1"),
            "no program wake in": lambda: lab.run("a", "x", "wake"),
            "no process or host 'a.x'; there are a": lambda: lab.kill("a.x"),
            "no host 'c'": lambda: lab.cut("c"),
            "no host 'd'": lambda: lab.cut("a", "d"),
        }.items():
            with self.assertRaisesRegex(LabError, said):
                act()  # type: ignore[no-untyped-call]
        lab.run("a", "x", "sleep 100")
        with self.assertRaisesRegex(LabError, "there is a process 'a.x' already"):
            lab.run("a", "x", "sleep 100")
        with self.assertRaisesRegex(LabError, f"{lab.directory} has the files of another run"):
            Lab(lab.topology, BIN, lab.directory).__enter__()


if __name__ == "__main__":
    if reason := missing():
        print(f"test_fleets: skipped: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)
