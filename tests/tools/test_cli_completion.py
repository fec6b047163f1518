"""`deltasync completion`: what a shell offers is what `--help` lists, asked of the shells themselves."""

import os
import re
import select
import shutil
import signal
import subprocess
import time
import unittest

from cli_support import DEADLINE_S, USAGE, CliTest


class Terminal:
    """An interactive shell that shows between < and > what its line is, when it gets Ctrl-G."""

    def __init__(self, test, how, script):
        argv, setup = how
        self.seen = b""
        self.shell, self.screen = os.forkpty()
        if self.shell == 0:
            os.chdir(test.tmp)
            os.execvpe(argv[0], argv, {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null", "HOME": str(test.tmp)})
        test.addCleanup(self.end)
        os.write(self.screen, f"{setup}; source {script}; echo rea''dy\n".encode())
        self.until(b"ready")

    def end(self):
        os.kill(self.shell, signal.SIGKILL)
        os.close(self.screen)
        os.waitpid(self.shell, 0)

    def until(self, mark):
        end = time.monotonic() + DEADLINE_S
        while mark not in self.seen:
            if not select.select([self.screen], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"no {mark!r} in {self.seen!r}")
            self.seen += os.read(self.screen, 1 << 16)
        before, self.seen = self.seen.split(mark, 1)
        return before.decode()

    def complete(self, line):
        os.write(self.screen, line.encode() + b"\t\a")
        self.until(b"<")
        shown = self.until(b">")
        os.write(self.screen, b"\x15")  # away with the line
        return shown


class CompletionTest(CliTest):
    def setUp(self):
        super().setUp()
        (self.tmp / "weights.pem").write_text("")
        (self.tmp / "a directory").mkdir()

    def script(self, shell):
        file = self.tmp / f"completion.{shell}"
        file.write_text(self.cli("completion", shell))
        return file

    def run_shell(self, *argv):
        done = subprocess.run([str(arg) for arg in argv], capture_output=True, text=True, cwd=self.tmp, timeout=DEADLINE_S)
        self.assertEqual((done.returncode, done.stderr), (0, ""), argv)
        return done.stdout.splitlines()

    def bash(self, *words):
        """What is offered for the last of the words behind `deltasync`."""
        return self.run_shell("bash", "-uec", 'source "$1"; compopt() { :; }; shift; COMP_WORDS=("$@"); '
                              'COMP_CWORD=$(($# - 1)); _deltasync; printf "%s\\n" "${COMPREPLY[@]}"',
                              "-", self.script("bash"), "deltasync", *words)

    def fish(self, *words):
        line = " ".join(("deltasync", *words))
        offered = self.run_shell("fish", "--no-config", "-c", f"source {self.script('fish')}; complete -C '{line}'")
        return [word.split("\t")[0] for word in offered]

    def zsh(self, *words):
        """The specifications that _arguments gets for a command."""
        return self.run_shell("zsh", "-fec", 'compdef() { :; }; _describe() { :; }; '
                              '_arguments() { if [[ $1 == -C ]]; then state=argument; else print -l -- "$@"; fi; }; '
                              'source $1; shift; words=("$@"); _deltasync', "-", self.script("zsh"), *words)

    def commands(self):
        text = self.cli("--help").split("Subcommands:\n")[1].split("\nExit codes")[0]
        return re.findall(r"^  ([\w-]+) ", text, re.M)

    def flags(self, command):
        """Of its --help, without those of `bench`, which is another program."""
        if command == "bench":
            return set()
        text = self.cli(*command.split(), "--help").split("Exit codes")[0]
        names = re.findall(r"^  (-[^ ]+)", text, re.M)
        return {name for group in names for name in group.split(",") if name.startswith("--")}

    def need(self, shell):
        if shutil.which(shell) is None:
            self.skipTest(f"no {shell}")

    def test_the_commands_and_all_their_options(self):
        commands = self.commands()
        self.assertIn("completion", commands)
        self.assertEqual(set(commands), {word for word in self.bash("") if not word.startswith("-")})
        self.assertEqual(self.flags(""), {word for word in self.bash("--")})
        for command in commands:
            with self.subTest(command=command):
                self.assertEqual(self.flags(command), {word for word in self.bash(command, "--") if word})

    def test_values_in_bash(self):
        self.assertEqual(self.bash("--log-format", ""), ["text", "json"])
        self.assertEqual(self.bash("--log-level", "warn", "pull", "--fo"), ["--follow"])
        self.assertEqual(self.bash("pull", "--on-older-epoch", "f"), ["follow", "fail"])
        self.assertEqual(self.bash("pull", "--out", "a"), ["a directory"])
        self.assertEqual(self.bash("pull", "--tls-ca", "w"), ["weights.pem"])
        self.assertEqual(self.bash("pull", "--from", "w"), [""])
        self.assertEqual(self.bash("inspect", "w"), ["weights.pem"])
        self.assertEqual(self.bash("completion", "f"), ["fish"])
        self.assertEqual(self.bash("publish", "--model", "one", "a"), ["a directory"])

    def test_fish(self):
        self.need("fish")
        self.assertEqual(set(self.commands()), set(self.fish("")))
        for command in self.commands():
            with self.subTest(command=command):
                self.assertEqual(self.flags(command), {word for word in self.fish(command, "--") if word.startswith("--")})
        self.assertEqual(set(self.fish("pull", "--on-older-epoch", "")), {"follow", "wait", "fail"})
        self.assertEqual(self.fish("pull", "--tls-ca", "w"), ["weights.pem"])
        self.assertEqual(self.fish("pull", "--from", "w"), [])
        self.assertEqual(self.fish("completion", "f"), ["fish"])
        self.assertEqual(self.fish("--log-level", "warn", "pul"), ["pull"])
        self.assertEqual(self.fish("pull", "--on-older-epoch=wa"), ["--on-older-epoch=wait"])

    def test_zsh(self):
        self.need("zsh")
        for command in self.commands():
            if command == "bench":
                continue
            with self.subTest(command=command):
                specs = self.zsh(command)
                self.assertEqual(self.flags(command),
                                 {spec.lstrip("*").split("[")[0].rstrip("=") for spec in specs if spec.lstrip("*").startswith("--")})
        pull = "\n".join(self.zsh("pull"))
        self.assertIn(":value:(follow wait fail)", pull)
        self.assertRegex(pull, r"(?m)^--out=\[.*\]:value:_files -/$")
        self.assertIn("*:argument:(bash zsh fish)", self.zsh("completion"))

    def typed(self, shell, *lines):
        """What an interactive shell makes of each line and a TAB."""
        asked = Terminal(self, {
            "bash": (["bash", "--norc", "--noprofile", "-i"],
                     'bind -x \'"\\C-g": printf "<%s>" "$READLINE_LINE"\'; bind "set bell-style none"'),
            "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; unsetopt beep; '
                                         'show() { print -rn -- "<$BUFFER>" }; zle -N show; bindkey ^G show'),
        }[shell], self.script(shell))
        return [asked.complete(line) for line in lines]

    def test_what_is_typed(self):
        for shell in ("bash", "zsh"):
            with self.subTest(shell=shell):
                self.need(shell)
                self.assertEqual(
                    self.typed(shell, "deltasync pul", "deltasync pull --on-older-epoch w",
                               "deltasync pull --on-older-epoch=w", "deltasync pull --on-older-epoch=",
                               "deltasync --log-level=wa", "deltasync --log-level=warn pul",
                               "deltasync pull --tls-ca=wei", "deltasync inspect 'wei", "deltasync relay --from wei"),
                    ["deltasync pull ", "deltasync pull --on-older-epoch wait ",
                     "deltasync pull --on-older-epoch=wait ", "deltasync pull --on-older-epoch=",
                     "deltasync --log-level=warn ", "deltasync --log-level=warn pull ",
                     "deltasync pull --tls-ca=weights.pem ", "deltasync inspect 'weights.pem' ",
                     "deltasync relay --from wei"])

    def test_another_shell_is_a_usage_error(self):
        self.cli("completion", "tcsh", expect=USAGE)
        self.assertIn("tcsh", self.err)


if __name__ == "__main__":
    unittest.main(verbosity=2)
