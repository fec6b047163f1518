"""Trainers whose clocks are wrong, and trainers that never heard of each other: nobody waits for a clock."""

import json
import os
import signal
import subprocess
import sys
import time
import unittest

from cli_support import BIN, Agent, CLI, Child, CliTest, DEADLINE, DEADLINE_S, USAGE, VERSION, sha256

SHIM = os.environ["DELTASYNC_CLOCK_SHIM"]
HOUR_BEHIND, TEN_YEARS_AHEAD = -3600, 10 * 365 * 86400


def clock(seconds):
    """The environment of a process whose wall clock is off by so much."""
    return {**os.environ, "LD_PRELOAD": SHIM, "DELTASYNC_TEST_CLOCK_S": str(seconds)}


def epoch_of(version_id):
    return int(version_id.split(":")[0], 16)


class EpochsTest(CliTest):
    def agent(self, name="agent", *options, **settings):
        return Agent(self, BIN / "deltasync-agent", self.tmp / name, *options, **settings)

    def variant(self, name, bump):
        return self.model(name, lambda words: [words[0] + bump, *words[1:]])

    def publish(self, agent, *models, off=0):
        """One run of a trainer."""
        out = self.cli("publish", "--agent", agent.socket, "--json", "--deadline-s", "30", "--model", *models,
                       env=clock(off))
        return [json.loads(line) for line in out.splitlines()]

    def pull(self, agent, *options, expect=0):
        out = self.cli("pull", "--from", agent.endpoint, "--out", self.tmp / "out", "--json", *options, expect=expect)
        return json.loads(out) if out else None

    def follow(self, agent, *options, out="out", off=0):
        return Child(self, [CLI, "--log-level", "info", "pull", "--from", agent.endpoint, "--out", self.tmp / out, "--json",
                            "--follow", *options], env=clock(off))

    def relay(self, origin, node, *options):
        return Child(self, [CLI, "relay", "--from", origin.endpoint, "--agent", node.socket, "--json", *options])

    def wait_for_log(self, child, part):
        while part not in (line := child.log_line()):
            self.assertNotEqual(line, "", f"it ended without {part}")

    def assert_received(self, model, out="out"):
        for name in ("model.safetensors", "config.json"):
            self.assertEqual(sha256(self.tmp / out / "current" / name), sha256(model / name), name)

    def give_epoch(self, epoch):
        """The version in the directory is of that one from now on."""
        out = self.tmp / "out"
        old = out / os.readlink(out / "current")
        new = old.with_name(f"{epoch:016x}-{old.name.split('-')[1]}")
        record = json.loads(old.with_name(old.name + ".json").read_text())
        new.with_name(new.name + ".json").write_text(json.dumps({**record, "epoch": f"{epoch:016x}"}))
        old.with_name(old.name + ".json").unlink()
        old.rename(new)
        target = os.readlink(out / "current").replace(old.name, new.name)
        (out / "current").unlink()
        (out / "current").symlink_to(target)

    def after_many_trainers(self, runs=3, **settings):
        """An agent at which several trainers have published, one after the other: the last one's version is pulled."""
        agent = self.agent("worn", **settings)
        for n in range(runs):
            last = self.publish(agent, self.variant(f"worn_{n}", n))[0]
        self.assertEqual(self.pull(agent)["id"], last["id"])
        return agent, last

    def test_the_shim_is_there(self):
        told = subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"],
                                       env=clock(TEN_YEARS_AHEAD))
        here = subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"])
        self.assertGreater(float(told) - float(here), TEN_YEARS_AHEAD - 60)

    def test_a_trainer_that_is_started_again_is_served_whatever_its_clock_says(self):
        agent = self.agent()
        follower = self.follow(agent)
        epochs = []
        for n, off in enumerate((0, HOUR_BEHIND, TEN_YEARS_AHEAD, HOUR_BEHIND, 0)):
            model = self.variant(f"run_{n}", n)
            said, = self.publish(agent, model, off=off)
            epochs.append(epoch_of(said["id"]))
            self.assertEqual(follower.line()["id"], said["id"])
            self.assert_received(model)
        self.assertEqual(epochs, sorted(epochs), "each comes after those before")
        _, _, err = follower.end(signal.SIGTERM)
        self.assertNotIn("older_epoch", err)

    def test_an_agent_hears_of_epochs_from_who_waits_at_it(self):
        """Another node, another agent: its trainer comes after what a follower holds, which then sees nothing odd."""
        port = self.held_port()
        worn, _ = self.after_many_trainers(listen=port.endpoint)
        follower = self.follow(worn)
        last, = self.publish(worn, self.variant("last", 98))
        self.assertEqual(follower.line()["id"], last["id"])
        self.assertEqual(worn.end(signal.SIGTERM)[0], 0)
        self.wait_for_log(follower, "agent_away")
        fresh = self.agent("fresh", listen=port.endpoint)
        self.wait_for_log(follower, "agent_back")
        model = self.variant("moved", 99)
        said, = self.publish(fresh, model, off=HOUR_BEHIND)
        self.assertEqual(follower.line()["id"], said["id"])
        self.assert_received(model)
        self.assertGreater(epoch_of(said["id"]), epoch_of(last["id"]))
        self.assertNotIn("older_epoch", follower.end(signal.SIGTERM)[2])

    def test_a_follower_goes_with_the_agent_it_is_pointed_to(self):
        _, last = self.after_many_trainers()
        other = self.agent("other")
        models = [self.variant("other_0", 50), self.variant("other_1", 51)]
        first, = self.publish(other, models[0], off=HOUR_BEHIND)
        self.assertLess(epoch_of(first["id"]), epoch_of(last["id"]))
        follower = self.follow(other, off=TEN_YEARS_AHEAD)
        got = follower.line()
        self.assertEqual((got["id"], got["mode"]), (first["id"], "full"))
        self.assert_received(models[0])
        second, = self.publish(other, models[1], off=TEN_YEARS_AHEAD)
        self.assertEqual(follower.line()["id"], second["id"])
        self.assert_received(models[1])
        _, _, err = follower.end(signal.SIGTERM)
        said = [line for line in err.splitlines() if "older_epoch" in line]
        self.assertEqual(len(said), 1, err)
        self.assertIn(first["id"], said[0])
        self.assertIn(last["id"], said[0])
        self.assertIn("policy=follow", said[0])

    def test_newest_and_newer_agree(self):
        self.after_many_trainers()
        other = self.agent("other")
        said, = self.publish(other, self.variant("named", 50))
        self.assertEqual(self.pull(other)["id"], said["id"])
        self.assertIn("older_epoch", self.err)

    def test_who_says_so_waits_or_fails(self):
        _, last = self.after_many_trainers()
        other = self.agent("other")
        self.publish(other, self.variant("other_0", 50))
        for how in ((), ("--follow",)):
            self.pull(other, "--on-older-epoch", "fail", *how, expect=VERSION)
            self.assertIn("older epoch", self.err)
            self.assertIn(last["id"], self.err)
        self.pull(other, "--on-older-epoch", "wait", "--deadline-s", "5", expect=DEADLINE)
        self.assertIn("older epoch", self.err)
        self.pull(other, "--on-older-epoch", "never", expect=USAGE)
        self.assert_received(self.tmp / "worn_2")

        follower = self.follow(other, "--on-older-epoch", "wait")
        self.wait_for_log(follower, "policy=wait")
        end = time.monotonic() + DEADLINE_S
        while "newer epoch" not in (said := self.cli("status", "--http", other.http)):
            self.assertLess(time.monotonic(), end, said)
        self.assertRegex(said, r"(?m)^cut off for .*: the trainer went on elsewhere")
        # The agent has heard by now of what is held: its next trainer comes after that, and the wait is over.
        said, = self.publish(other, self.variant("other_1", 51))
        self.assertGreater(epoch_of(said["id"]), epoch_of(last["id"]))
        self.assertEqual(follower.line()["id"], said["id"])
        self.assertNotIn("older_epoch", follower.end(signal.SIGTERM)[2], "it has been said")

    def test_another_policy_is_refused_with_those_that_there_are(self):
        self.cli("pull", "--from", "127.0.0.1:1", "--out", self.tmp / "out", "--on-older-epoch", "never", expect=1)
        self.assertIn("never", self.err)
        for policy in ("follow", "wait", "fail"):
            self.assertIn(policy, self.err)
        self.assertNotIn("->", self.err)

    def test_a_version_that_is_named_is_what_is_named(self):
        self.after_many_trainers()
        other = self.agent("other")
        said, = self.publish(other, self.variant("named", 50))
        self.assertEqual(self.pull(other, "--on-older-epoch", "fail", "--label", "named")["id"], said["id"])

    def test_a_directory_with_a_clocks_epoch_ten_years_ahead_heals(self):
        """As it was left by a release that made epochs of a clock."""
        agent = self.agent()
        said, = self.publish(agent, self.variant("first", 1))
        self.pull(agent)
        ahead = (1_795_000_000_000 + TEN_YEARS_AHEAD * 1000) << 20 | 0x12345
        self.give_epoch(ahead)

        follower = self.follow(agent)
        self.assertEqual(follower.line()["id"], said["id"])  # an older epoch, followed
        self.wait_for_log(follower, f"{ahead:016x}")
        # The agent has heard of it.
        model = self.variant("second", 2)
        second, = self.publish(agent, model, off=HOUR_BEHIND)
        self.assertGreater(epoch_of(second["id"]), ahead)
        self.assertEqual(follower.line()["id"], second["id"])
        self.assert_received(model)
        self.assertEqual(follower.end(signal.SIGTERM)[0], 128 + signal.SIGTERM)

    def test_a_mad_receiver_does_not_use_up_the_epochs(self):
        """What a receiver says it holds counts up to a bound; the next trainer's epoch is still far from the end."""
        agent = self.agent()
        said, = self.publish(agent, self.variant("first", 1))
        self.pull(agent)
        self.give_epoch((1 << 64) - 1)
        self.pull(agent)
        self.assertIn("older_epoch", self.err)
        second, = self.publish(agent, self.variant("second", 2))
        self.assertEqual(epoch_of(second["id"]) >> 32, (epoch_of(said["id"]) >> 32) + 1)

    def test_a_relay_hands_on_an_older_epoch(self):
        worn, last = self.after_many_trainers()
        node = self.agent("node")
        relay = self.relay(worn, node)
        self.assertEqual(relay.line()["id"], last["id"])
        follower = self.follow(node, out="rank")
        self.assertEqual(follower.line()["id"], last["id"])
        relay.end(signal.SIGTERM)

        other = self.agent("other")
        models = [self.variant("other_0", 50), self.variant("other_1", 51)]
        first, = self.publish(other, models[0], off=HOUR_BEHIND)
        self.assertLess(epoch_of(first["id"]), epoch_of(last["id"]))
        relay = self.relay(other, node)
        got = relay.line()
        self.assertEqual((got["id"], got["served"]), (first["id"], True))
        self.assertIn("policy=follow", relay.log_line())
        self.assertEqual(follower.line()["id"], first["id"])
        self.assert_received(models[0], "rank")
        second, = self.publish(other, models[1])
        self.assertEqual(relay.line()["id"], second["id"])
        self.assertEqual(follower.line()["id"], second["id"])
        self.assert_received(models[1], "rank")


if __name__ == "__main__":
    unittest.main()
