"""The scripts below tools/: what they do to a terminal and to a tree, with everything slow replaced by a stand-in."""

import os
import pathlib
import pty
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = "docs/"  # apart, so that the tree's own check does not look for the pages of these tests
PAGE = ".md"


class ScriptTest(unittest.TestCase):
    def setUp(self):
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-scripts-"))
        self.addCleanup(shutil.rmtree, self.tmp, ignore_errors=True)

    def put(self, name, text, mode=0o644):
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)


class QuickstartTest(ScriptTest):
    def test_the_installer_may_ask_for_a_password(self):
        """A process in the background that reads from the terminal is stopped; so was sudo."""
        self.put("tools/quickstart.sh", (ROOT / "tools/quickstart.sh").read_text(), 0o755)
        self.put("tools/install_deps.sh", "#!/bin/sh\nread -r word </dev/tty && echo \"got $word\"\n", 0o755)
        self.put("tools/build.sh", "#!/bin/sh\nexit 7\n", 0o755)
        pid, terminal = pty.fork()
        if pid == 0:
            os.execv("/usr/bin/timeout", ["timeout", "--foreground", "20", self.tmp / "tools/quickstart.sh"])
        os.write(terminal, b"secret\n")
        out = b""
        try:
            while chunk := os.read(terminal, 4096):
                out += chunk
        except OSError:
            pass  # how a terminal says that its last process has gone
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
        self.assertIn(b"got secret", out)
        self.assertEqual(status, 7, out)


class CheckReachTest(ScriptTest):
    def check(self):
        done = subprocess.run([sys.executable, ROOT / "tools/lint/check_reach.py", self.tmp], capture_output=True,
                              text=True)
        return done.returncode, done.stderr

    def test_what_only_tests_link_is_dead(self):
        self.put("src/CMakeLists.txt", """
deltasync_library(low SOURCES low.cpp)  # reached through high
deltasync_library(
  high
  SOURCES high.cpp
  DEPENDS low)
deltasync_library(deltasync_layer SOURCES layer.cpp)
deltasync_library(bound SOURCES bound.cpp)
nanobind_add_module(_native bindings/module.cpp)
target_link_libraries(_native PRIVATE bound)
deltasync_executable(program SOURCES main.cpp DEPENDS high)
""")
        self.put("tools/cmake/Package.cmake", """
set(layers layer)
add_library(deltasync_archive STATIC ${layers})
add_library(for_users INTERFACE)
install(TARGETS deltasync_archive for_users EXPORT all)
""")
        self.put("tests/CMakeLists.txt", "deltasync_test(test_high SOURCES test_high.cpp DEPENDS high support)\n"
                                         "deltasync_library(support SOURCES support.cpp)\n")
        self.assertEqual(self.check(), (0, ""))
        self.put("src/room/CMakeLists.txt", "deltasync_library(room SOURCES room.cpp DEPENDS low)\n")
        self.put("tests/room/CMakeLists.txt", "deltasync_test(test_room SOURCES test_room.cpp DEPENDS room)\n")
        status, errors = self.check()
        self.assertEqual(status, 1)
        self.assertEqual(errors, "src/room/CMakeLists.txt: nothing that ships links room, only test_room: bind it to "
                                 "something that ships, or remove it\n")

    def test_a_tree_without_programs_is_none(self):
        self.assertEqual(self.check()[0], 1)


class CheckTreeTest(ScriptTest):
    def check(self):
        done = subprocess.run([sys.executable, ROOT / "tools/lint/check_tree.py", self.tmp], capture_output=True, text=True)
        return done.returncode, done.stderr

    def test_pages_that_are_named_are_there(self):
        subprocess.run(["git", "init", "-q", self.tmp], check=True)
        self.put(PAGES + "here" + PAGE, "a page\n")
        self.put("src/base/a.cpp", f"// See {PAGES}here{PAGE}.\n")
        self.assertEqual(self.check(), (0, ""))
        self.put("src/base/b.cpp", f"// See {PAGES}gone{PAGE}.\n")
        status, errors = self.check()
        self.assertEqual(status, 1)
        self.assertEqual(errors, f"src/base/b.cpp:1: {PAGES}gone{PAGE} is not there\n")

    def test_comments_name_a_page_by_its_file_name(self):
        subprocess.run(["git", "init", "-q", self.tmp], check=True)
        self.put(PAGES + "inside/here" + PAGE, "a page\n")
        self.put("src/base/a.cpp", f"// See here{PAGE}.\n")
        self.assertEqual(self.check(), (0, ""))
        self.put("src/base/b.cpp", f"// See gone{PAGE}.\n")
        self.put(PAGES + "here" + PAGE, "which of the two?\n")
        status, errors = self.check()
        self.assertEqual(status, 1)
        self.assertEqual(
            errors.splitlines(),
            [f"src/base/b.cpp:1: docs/ has no page gone{PAGE}",
             f"{PAGES}inside/here{PAGE}: {PAGES}here{PAGE} has the same name"])

    def test_no_choice_in_an_expression_that_awaits(self):
        """g++ 12 gets such an expression wrong."""
        subprocess.run(["git", "init", "-q", self.tmp], check=True)
        self.put("src/net/good.cpp", """
#define BOTH(a, b) ((a) && (b))
awaitable<bool> good(Request&& request) {  // co_await a || b
  if (request && request->now) co_return co_await ask(request, "a || b");
  const auto limit = request ? request->limit : Deadline{};
  for (auto&& word : co_await words(limit)) use(word || last);
  co_await run([&] { return limit && request; });
  const bool told = co_await tell();
  co_return told || last;
}
""")
        self.assertEqual(self.check(), (0, ""))
        for line, operator in {
            "co_return told || co_await last();": "||",
            "if (told && co_await last()) stop();": "&&",
            "while (co_await last() && told) stop();": "&&",
            "const auto answer = told ? co_await last() : Answer();": "?:",
            "co_await wait(told ? first : second);": "?:",
            "co_await wait(Limits{told, told || first});": "||",
            "run([&]() -> awaitable<void> { if (told) co_await wait(told && first); });": "&&",
        }.items():
            with self.subTest(line):
                self.put("src/net/bad.cpp", f"awaitable<bool> bad() {{\n  first();\n  {line}\n}}\n")
                status, errors = self.check()
                self.assertEqual(status, 1)
                self.assertEqual(errors, f"src/net/bad.cpp:3: {operator} in an expression with co_await, which g++ 12 "
                                         "gets wrong: give the choice a name of its own\n")


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
