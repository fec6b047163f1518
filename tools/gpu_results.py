#!/usr/bin/env python3
"""Puts what tools/gpu_check.sh saw into one JSON file, says it in one line, and fails if it was not all good.

A skipped test is not good here: the machine was said to have a device.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree


def device():
    """What nvidia-smi says of the first device; empty without one."""
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        answer = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    fields = [field.strip() for field in answer.stdout.splitlines()[0].split(",")] if answer.stdout else []
    return dict(zip(("name", "driver", "memory"), fields)) if answer.returncode == 0 else {}


def skipped_cases(output):
    """Names of the cases that GoogleTest's output says were skipped."""
    return [line.split()[3] for line in output.splitlines() if line.startswith("[  SKIPPED ]") and "(" in line]


def tests(path):
    """Counts and names of the ctest entries in a JUnit file."""
    result = {"passed": 0, "failed": [], "skipped": []}
    if not path.exists():
        return result
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name")
        skips = skipped_cases("".join(out.text or "" for out in case.iter("system-out")))
        if case.get("status") == "fail" or case.find("failure") is not None:
            result["failed"].append(name)
        elif skips or case.find("skipped") is not None:
            result["skipped"].extend(f"{name}: {skip}" for skip in skips or ["all"])
        else:
            result["passed"] += 1
    return result


def benches(paths):
    """The last lines of the benchmark's outputs, which are its JSON; of those that wrote none, nothing."""
    lines = [path.read_text().splitlines() for path in paths if path.exists()]
    return [json.loads(text[-1]) for text in lines if text]


def main():
    parser = argparse.ArgumentParser()
    for name in ("junit", "out"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--bench", type=pathlib.Path, nargs="+", required=True)
    for name in ("ctest-status", "bench-status", "build-s", "tests-s"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()

    results = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device(),
        "build_s": arguments.build_s,
        "tests_s": arguments.tests_s,
        "tests": tests(arguments.junit),
        "bench": benches(arguments.bench),
    }
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    seen = results["tests"]
    print(f"gpu_check: {seen['passed']} passed, {len(seen['failed'])} failed, {len(seen['skipped'])} skipped; {arguments.out}")
    good = seen["passed"] and not seen["failed"] and not seen["skipped"] and results["device"]
    return 0 if good and arguments.ctest_status == 0 and arguments.bench_status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
