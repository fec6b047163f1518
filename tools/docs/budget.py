#!/usr/bin/env python3
"""Fails if the pages have more words than they may. A page that grows makes another one shorter, or says why not."""

import sys

from pages import ROOT, pages, words

TOTAL = 38_500
#: By folder of docs/: for each page.
EACH = {"start": 400, "concepts": 800, "guides": 1_200}


def main():
    counts = {page.relative_to(ROOT): words(page.read_text()) for page in pages()}
    wrong = [f"{page}: {count} words; a page in docs/{page.parts[1]} has at most {EACH[page.parts[1]]}"
             for page, count in counts.items() if len(page.parts) > 2 and count > EACH.get(page.parts[1], count)]
    total = sum(counts.values())
    if total > TOTAL:
        wrong.append(f"all pages have {total} words, at most {TOTAL} (tools/docs/budget.py)")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"budget: {len(counts)} pages, {total} words")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
