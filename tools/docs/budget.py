#!/usr/bin/env python3
"""Fails if the pages have more words than they may. A page that grows makes another one shorter, or says why not."""

import sys

from pages import ROOT, pages, words

#: What the pages have, rounded up. A change that needs more first removes what is said twice, then raises it.
TOTAL = 30_000
#: By directory of docs/: for each page.
EACH = {"start": 250, "concepts": 340, "guides": 765, "operating": 780, "reference": 1_160, "internals": 690}
#: Pages that need more: another implementation is written from a format's or a protocol's page alone.
MORE = {
    "docs/internals/benchmarks.md": 1_010,
    "docs/internals/targets.md": 1_000,
    "docs/reference/cli.md": 1_240,
    "docs/reference/delta_format.md": 2_050,
    "docs/reference/shm_protocol.md": 1_890,
    "docs/reference/trainer_protocol.md": 1_690,
    "docs/reference/wire_protocol.md": 2_895,
}


def words_max(page, count):
    return MORE.get(str(page), EACH.get(page.parts[1], count) if len(page.parts) > 2 else count)


def main():
    counts = {page.relative_to(ROOT): words(page.read_text()) for page in pages()}
    wrong = [f"{page}: {count} words, at most {words_max(page, count)} (tools/docs/budget.py)"
             for page, count in counts.items() if count > words_max(page, count)]
    total = sum(counts.values())
    if total > TOTAL:
        wrong.append(f"all pages have {total} words, at most {TOTAL} (tools/docs/budget.py)")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"budget: {len(counts)} pages, {total} words")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
