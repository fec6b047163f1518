"""tools/docs: what of a page is run, and that a page whose snippets are wrong is found."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/docs"))

import pages  # noqa: E402

FENCE = "```"
PAGE = "docs/page" + ".md"  # apart, so that the tree's own check does not look for it


def page(*blocks):
    return "\n\n".join(text.replace("FENCE", FENCE) for text in ("# A page", *blocks)) + "\n"


class PagesTest(unittest.TestCase):
    def blocks(self, *blocks):
        return list(pages.blocks_of("page", page(*blocks)))

    def test_blocks_in_order_with_their_titles(self):
        one, two, three = self.blocks('FENCEpython title="a.py"\nx = 1\nFENCE',
                                      "<!-- hidden python a.py\ny = 2\n-->",
                                      "<!-- until: test -e done -->\nFENCEsh\nsleep 9\nFENCE")
        self.assertEqual((one.language, one.title, one.code), ("python", "a.py", "x = 1\n"))
        self.assertEqual((two.language, two.title, two.code), ("python", "a.py", "y = 2\n"))
        self.assertEqual((three.title, three.until), ("", "test -e done"))

    def test_a_block_in_a_list_loses_its_indent(self):
        (block,) = self.blocks("1. first\n\n    FENCEpython\n    if x:\n        y()\n    FENCE")
        self.assertEqual(block.code, "if x:\n    y()\n")

    def test_a_reason_stands_before_a_block(self):
        (block,) = self.blocks("<!-- not run: no GPU -->\nFENCEpython\nx\nFENCE")
        self.assertEqual(block.not_run, "no GPU")
        with self.assertRaises(pages.BadPage):
            self.blocks("<!-- not run: no GPU -->\nA sentence.")

    def test_a_block_that_does_not_end(self):
        with self.assertRaises(pages.BadPage):
            self.blocks("FENCEpython\nx = 1")

    def test_words_are_what_a_reader_reads(self):
        self.assertEqual(pages.words("| a | two words |\n|---|---|\n<!-- hidden\nfour\n-->\n"), 3)


class DocstringsTest(unittest.TestCase):
    def test_docstrings_become_markdown(self):
        sys.modules.setdefault("griffe", types.SimpleNamespace(Extension=object, Object=object))
        import docstrings

        text = """Keeps ``one`` version; see :meth:`Receiver.pull` and :class:`~deltasync.Tls`. One of:
  ``module``  a module
      of torch
``hf``: a directory::

    code
"""
        self.assertEqual(docstrings.as_markdown(text), """Keeps `one` version; see `pull()` and `Tls`. One of:

- `module`: a module
      of torch

- `hf`: a directory:

    code
""")


class SnippetsTest(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="deltasync-docs-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        (self.root / "docs/examples").mkdir(parents=True)
        (self.root / "docs/examples/a.cpp").write_text("int f() {\n  return 1;\n}\nint g();\n")

    def run_page(self, *blocks):
        file = self.root / PAGE
        file.write_text(page(*blocks))
        command = [sys.executable, ROOT / "tools/docs/snippets.py", "--root", self.root, "--bin", "/nowhere"]
        command += ["--python", sys.executable, "--deadline", "60", file]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_scripts_run_side_by_side(self):
        status, said = self.run_page('FENCEsh title="a"\nwhile [[ ! -e there ]]; do sleep 0.1; done\nFENCE',
                                     'FENCEpython title="b.py"\nopen("there", "w").close()\nFENCE',
                                     'FENCEpython title="b.py"\nimport os\nassert os.path.exists("there")\nFENCE')
        self.assertEqual(status, 0, said)
        self.assertIn("3 blocks run", said)

    def test_one_that_goes_on_is_stopped_when_its_work_is_done(self):
        status, said = self.run_page("<!-- until: test -e there -->\nFENCEsh\ntouch there\nsleep 600\nFENCE")
        self.assertEqual(status, 0, said)

    def test_one_that_fails_is_named(self):
        status, said = self.run_page('FENCEpython title="a.py"\nraise SystemExit(3)\nFENCE')
        self.assertEqual(status, 1)
        self.assertIn(f"{PAGE}:3 (a.py) ended with 3", said)

    def test_one_that_ends_before_its_work_is_done(self):
        status, said = self.run_page("<!-- until: test -e there -->\nFENCEsh\ntrue\nFENCE")
        self.assertEqual(status, 1)
        self.assertIn("it was to go on until test -e there", said)

    def test_cpp_stands_in_an_example(self):
        status, said = self.run_page("FENCEcpp\n  return 1;\n}\n\nint g();\nFENCE")
        self.assertEqual(status, 0, said)
        status, said = self.run_page("FENCEcpp\nreturn 2;\nFENCE")
        self.assertEqual(status, 1)
        self.assertIn(f"{PAGE}:3: no file of docs/examples has these lines", said)

    def test_what_is_not_run_parses(self):
        for block in ("FENCEpython\nif True:\n    a = 1\n        b = 2\nFENCE", "FENCEsh\nif true; then\nFENCE"):
            status, said = self.run_page(f"<!-- not run: a reason -->\n{block}")
            self.assertEqual(status, 1)
            self.assertIn(f"{PAGE}:4: ", said)
        status, said = self.run_page("<!-- not run: a reason -->\nFENCEpython\nawait a()\nFENCE")
        self.assertEqual(status, 0, said)

    def test_json_parses(self):
        status, said = self.run_page('FENCEjson\n{"a": }\nFENCE')
        self.assertEqual(status, 1)
        self.assertIn(f"{PAGE}:3", said)


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
