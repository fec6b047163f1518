"""docs/operating: the configuration of Prometheus, alert rules and the Grafana board, on pages of real processes."""

import json
import math
import re
import subprocess
import unittest

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from operating_support import PAGES, ROOT, Cleanups, Fleet, Prometheus, metric_names, needs, until

BOARD = json.loads((PAGES / "grafana.json").read_text())
NAME = re.compile(r"\b(?:deltasync|process)_[a-z_]+\b")
RULES = [rule for group in yaml.safe_load((PAGES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def queries():
    """(panel, expression) of the board."""
    return [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", ())]


class AlertTest(unittest.TestCase):
    @needs("promtool")
    def test_rules_are_valid_and_do_what_their_tests_say(self):
        for command in (("check", "rules", PAGES / "alerts.yaml"),
                        ("test", "rules", ROOT / "tests" / "operating" / "alerts_test.yaml")):
            done = subprocess.run(["promtool", *command], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_rule_has_a_test_that_raises_it_and_one_that_does_not(self):
        raised, quiet = set(), set()
        for test in yaml.safe_load((ROOT / "tests" / "operating" / "alerts_test.yaml").read_text())["tests"]:
            for case in test["alert_rule_test"]:
                (raised if case.get("exp_alerts") else quiet).add(case["alertname"])
        names = [rule["alert"] for rule in RULES]
        self.assertEqual(raised, set(names))
        self.assertEqual(quiet, set(names))
        self.assertEqual(len(names), len(set(names)))

    def test_each_rule_tells_how_severe_it_is_and_what_to_do(self):
        for rule in RULES:
            with self.subTest(rule["alert"]):
                self.assertIn(rule["labels"]["severity"], {"warning", "critical"})
                self.assertEqual(set(rule["annotations"]), {"summary", "description"})
                for page in re.findall(r"[\w-]+\.md", rule["annotations"]["description"]):
                    self.assertTrue(list((ROOT / "docs").rglob(page)), page)


class BoardTest(unittest.TestCase):
    def test_is_what_grafana_reads(self):
        """Through Grafana's own types and back: what they do not know would be lost."""
        register_default_plugins()
        again = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARD)))

        def compare(ours, theirs, where):
            if isinstance(ours, dict):
                for key, value in ours.items():
                    self.assertIn(key, theirs, where)
                    compare(value, theirs[key], f"{where}/{key}")
            elif isinstance(ours, list):
                self.assertEqual(len(ours), len(theirs), where)
                for index, value in enumerate(ours):
                    compare(value, theirs[index], f"{where}[{index}]")
            else:
                self.assertEqual(ours, theirs, where)

        compare(BOARD, again, "")

    def test_panels_lie_side_by_side(self):
        taken = {}
        for panel in BOARD["panels"]:
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24, panel["title"])
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    self.assertIsNone(taken.setdefault((x, y), None), (panel["title"], taken[x, y]))
                    taken[x, y] = panel["title"]
        self.assertEqual(len({panel["id"] for panel in BOARD["panels"]}), len(BOARD["panels"]))

    def test_each_panel_says_what_it_shows(self):
        for panel in BOARD["panels"]:
            if panel["type"] != "row":
                self.assertTrue(panel["description"].endswith("."), panel["title"])
                self.assertTrue(panel["fieldConfig"]["defaults"]["unit"], panel["title"])


@needs("prometheus", "promtool")
class FleetTest(unittest.TestCase):
    """A trainer's agent, a node's agent, a relay and a follower, while versions come four times a second."""

    @classmethod
    def setUpClass(cls):
        owner = Cleanups(cls)
        cls.fleet = Fleet(owner)
        cls.prometheus = Prometheus(owner, cls.fleet)
        # Rates over ten seconds need as many samples.
        until(lambda: cls.prometheus.query("min(count_over_time(up[1h]))"), lambda got: got and got[0][1] >= 15)

    def test_every_target_is_scraped_under_its_labels(self):
        targets = self.prometheus.ask("targets", state="active")["activeTargets"]
        self.assertEqual({target["health"] for target in targets}, {"up"}, targets)
        pods = {(target["labels"]["pod"], target["labels"]["container"], target["discoveredLabels"]["__address__"],
                 target["scrapeUrl"].split(":")[0])
                for target in targets if target["labels"]["job"] == "deltasync-pods"}
        self.assertEqual(pods, {("node-0", "relay", self.fleet.relay_http, "http"),
                                ("rollout-0", "receiver", self.fleet.follower_http, "http"),
                                ("trainer-0", "agent", self.fleet.trainer.http, "https")})
        self.assertEqual(len(targets), 6, "a port of another name is not scraped")

    def test_every_panel_has_something_to_show(self):
        for title, expression in queries():
            with self.subTest(title, expression=expression):
                plain = expression.replace("$__rate_interval", "10s").replace("$instance", ".*")
                got = self.prometheus.query(plain)
                self.assertTrue(got, "no series")
                self.assertTrue(any(math.isfinite(value) for _, value in got), got)

    def test_panels_name_series_apart(self):
        for panel in BOARD["panels"]:
            for target in panel.get("targets", ()):
                plain = target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".*")
                labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                with self.subTest(panel["title"]):
                    for series, _ in self.prometheus.query(plain):
                        self.assertLessEqual(set(labels), set(series), "the legend names a label that is not there")

    def test_alerts_ask_for_what_the_pages_have(self):
        names = set().union(*(metric_names(self.fleet.metrics(page)) for page in self.fleet.pages()))
        for rule in RULES:
            for name in NAME.findall(rule["expr"]):
                self.assertIn(name, names, rule["alert"])

    def test_pages_of_the_manual_name_metrics_that_there_are(self):
        names = set().union(*(metric_names(self.fleet.metrics(page)) for page in self.fleet.pages()))
        for page in PAGES.glob("*.md"):
            for name in re.findall(r"\b(?:deltasync|process)_[a-z_]+\b(?![.*-])", page.read_text()):
                with self.subTest(page.name, name=name):
                    self.assertTrue({name, f"{name}_bucket"} & names)

    def test_a_healthy_fleet_raises_no_alert(self):
        self.assertEqual([alert["labels"] for alert in self.prometheus.ask("alerts")["alerts"]
                          if alert["state"] == "firing"], [])


if __name__ == "__main__":
    unittest.main()
