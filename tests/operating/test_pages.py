"""The pages of docs/operating: short, and what they quote is there."""

import errno
import os
import re
import unittest

from operating_support import PAGES, ROOT

WORDS_MAX = 1200
SOURCES = [path for directory in ("agent", "receiver", "src", "tools") for suffix in ("cpp", "hpp", "py")
           for path in (ROOT / directory).rglob(f"*.{suffix}")]
LITERAL = r'"(?:[^"\\\n]|\\.)*"'


def texts(source):
    """What a file says: its string literals, those side by side as one, and what stands for a value left out."""
    joined = re.findall(rf"f?{LITERAL}(?:\s*f?{LITERAL})*", source)
    return ["".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)).replace('\\"', '"') for text in joined]


def table_rows(page):
    """(heading of the first column, cells) of every row of every table."""
    heading = None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            heading = None
        elif heading is None:
            heading = cells[0]
        elif not set(cells[0]) <= {"-", "|"}:
            yield heading, cells


class PagesTest(unittest.TestCase):
    def test_pages_are_short(self):
        for page in PAGES.glob("*.md"):
            with self.subTest(page.name):
                self.assertLessEqual(len(page.read_text().split()), WORDS_MAX)

    def test_messages_are_what_programs_say(self):
        said = [texts(path.read_text()) for path in SOURCES]
        said.append([os.strerror(number) for number in errno.errorcode])
        rows = 0
        for heading, cells in table_rows((PAGES / "troubleshooting.md").read_text()):
            if heading not in ("message", "you see"):
                continue
            quoted = [text for text in re.findall(r"`([^`]+)`", cells[0]) if text not in ("/dev/shm", "OOMKilled")]
            self.assertTrue(quoted or heading == "you see", cells[0])
            for message in quoted:
                rows += 1
                parts = [part.strip() for part in message.split("…") if part.strip()]
                with self.subTest(message):
                    self.assertTrue(any(all(any(part in text for text in file) for part in parts) for file in said),
                                    "no source file says this any more")
        self.assertGreater(rows, 40)

    def test_every_file_is_named_by_a_page(self):
        pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
        for path in PAGES.rglob("*"):
            if path.is_file() and path.name != "index.md":
                self.assertIn(f"({path.relative_to(PAGES)})", pages.replace("#", ")"), path)


if __name__ == "__main__":
    unittest.main()
