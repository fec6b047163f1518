#!/usr/bin/env python3
"""Runs what the pages show: `tools/docs/snippets.py [--bin DIR] [--python-path DIR] [PAGE ...]`, all pages by default.

Python and shell blocks are run as pages.py says, the scripts of a page at the same time, in a directory of their own,
with free ports in the place of those that the page names. Each must end with 0 (or be done, `until`) before the
deadline; what it leaves running is ended. C++ and CMake blocks have to stand, line for line, in a file of docs/examples
that tools/ci/check_install.sh builds and runs. JSON has to parse; so have Python and shell blocks that are not run.
Other blocks are shown only.
"""

import argparse
import ast
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from pages import ROOT, BadPage, blocks_of, pages

DEADLINE_S = 180
PORTS = re.compile(r"(?<=[:= ])(7070|7071|7072|8000|8080|8081)\b")
HOSTS = re.compile(r"\b(trainer|rollout|10\.0\.0\.5|0\.0\.0\.0)(?=:\d)")
RUN = {"python": "py", "sh": "sh"}


def examples(root):
    found = {}
    for file in sorted((root / "docs/examples").rglob("*")):
        if file.is_file():
            found[file.relative_to(root)] = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    return found


def stands_in(code, lines):
    wanted = [line.strip() for line in code.splitlines() if line.strip()]
    return any(lines[i:i + len(wanted)] == wanted for i in range(len(lines) - len(wanted) + 1))


def check_shown(block, files):
    """What is wrong with a block that is not run, or ""."""
    if block.language == "python":
        try:
            compile(block.code, "a block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            return f"{block.where}: {error}"
    if block.language == "sh":
        parsed = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
        if parsed.returncode != 0:
            return f"{block.where}: {parsed.stderr.strip()}"
    if block.language in ("cpp", "cmake"):
        if not any(stands_in(block.code, lines) for lines in files.values()):
            return f"{block.where}: no file of docs/examples has these lines"
    if block.language == "json":
        try:
            json.loads(block.code)
        except ValueError as error:
            return f"{block.where}: {error}"
    return ""


class Script:
    """The blocks of one title, as one file and one process in a session of its own."""

    def __init__(self, first):
        self.language = first.language
        self.where, self.title, self.until = first.where, first.title, ""
        self.code = "set -euo pipefail\n" if first.language == "sh" else ""
        self.child = self.log = None

    def add(self, block):
        self.code += block.code
        self.until = block.until or self.until

    @property
    def name(self):
        return f"{self.where} ({self.title or self.language})"

    def start(self, work, index, env, python, change):
        file = work / f".{index}.{RUN[self.language]}"
        file.write_text(change(self.code))
        self.log = work / f".{index}.log"
        program = [python, file] if self.language == "python" else ["bash", file]
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(program, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                          start_new_session=True)
        self.condition = change(self.until)

    def is_done(self, work, env):
        """Whether its work is done; a failure raises."""
        if self.until:
            asked = subprocess.run(["bash", "-c", self.condition], cwd=work, env=env, capture_output=True)
            done = asked.returncode == 0
            if not done and self.child.poll() is not None:
                raise BadPage(f"{self.name} ended with {self.child.returncode}; it was to go on until {self.until}")
            return done
        if self.child.poll() is None:
            return False
        if self.child.returncode != 0:
            raise BadPage(f"{self.name} ended with {self.child.returncode}")
        return True

    def stop(self):
        """Ends it and all that it started."""
        for sign, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.child.pid, sign)
            except ProcessLookupError:
                return
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.child.poll()
                try:
                    os.killpg(self.child.pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.05)


class Ports:
    """Free ports for those that pages name, and this host for the hosts."""

    def __init__(self):
        self.of = {}

    def __call__(self, text):
        return PORTS.sub(lambda found: self._port(found[1]), HOSTS.sub("127.0.0.1", text))

    def _port(self, named):
        if named not in self.of:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.of[named] = str(probe.getsockname()[1])
        return self.of[named]


def environment(work, args):
    """Programs of the build, sockets and segments below `work`."""
    agent = work / ".bin/deltasync-agent"
    agent.parent.mkdir()
    (work / ".run").mkdir(mode=0o700)
    agent.write_text(f'#!/bin/sh\nexec {args.bin}/deltasync-agent --shm-dir {work}/.run "$@"\n')
    agent.chmod(0o755)
    os.symlink(args.bin / "deltasync", work / ".bin/deltasync")
    path = f"{work}/.bin:{pathlib.Path(args.python).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "DELTASYNC_BIN": str(work / ".bin"), "PYTHONPATH": str(args.python_path),
            "HOME": str(work), "XDG_RUNTIME_DIR": str(work / ".run"), "OMP_NUM_THREADS": "1",
            "DOCS": str(ROOT / "docs")}


def run_page(blocks, args):
    """Runs the scripts of a page; what went wrong, with the ends of the logs, or ""."""
    scripts = {}
    for block in blocks:
        scripts.setdefault((block.language, block.title), Script(block)).add(block)
    work = pathlib.Path(tempfile.mkdtemp(prefix="ds-docs-"))
    started = []
    try:
        env, change = environment(work, args), Ports()
        for index, script in enumerate(scripts.values()):
            script.start(work, index, env, args.python, change)
            started.append(script)
        waiting = list(started)
        end = time.monotonic() + args.deadline
        while waiting := [script for script in waiting if not script.is_done(work, env)]:
            if time.monotonic() > end:
                raise BadPage(f"{waiting[0].name} is not done after {args.deadline} s")
            time.sleep(0.1)
        return ""
    except BadPage as error:
        logs = "".join(f"--- {script.name}\n{script.log.read_text(errors='replace')[-3000:]}" for script in started)
        return f"{error}\n{logs}"
    finally:
        for script in reversed(started):
            script.stop()
        shutil.rmtree(work, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/bin")
    parser.add_argument("--python", default=str(ROOT / "build/python-venv/bin/python"))
    parser.add_argument("--python-path", type=pathlib.Path, default=ROOT / "build/python")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S)
    parser.add_argument("pages", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    files = examples(args.root)
    ran = left = wrong = 0
    for page in args.pages or pages(args.root):
        name = str(page.resolve().relative_to(args.root.resolve()))
        try:
            blocks = list(blocks_of(name, page.read_text()))
        except BadPage as error:
            blocks, wrong = [], wrong + 1
            print(error, file=sys.stderr)
        troubles = []
        to_run = []
        for block in blocks:
            if block.not_run:
                left += 1
                print(f"{block.where}: not run: {block.not_run}")
                if block.language in RUN:
                    troubles.append(check_shown(block, files))
            elif block.language in RUN:
                to_run.append(block)
            else:
                troubles.append(check_shown(block, files))
        if to_run:
            began = time.monotonic()
            troubles.append(run_page(to_run, args))
            print(f"{name}: {len(to_run)} blocks run, {time.monotonic() - began:.0f} s", flush=True)
            ran += len(to_run)
        for trouble in filter(None, troubles):
            wrong += 1
            print(trouble, file=sys.stderr)
    print(f"snippets: {ran} blocks run, {left} shown only, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
