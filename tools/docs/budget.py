#!/usr/bin/env python3
"""Fails if the pages have more words than they may. A page that grows makes another one shorter, or says why not."""

import sys

from pages import ROOT, pages, words

#: 30,000, and 1,200 for what other trainers' tensors become, 400 for the control of engines,
#: 400 for trees of relays and local pulls, 300 for buckets, 100 for clients,
#: 250 for a table of machines,
#: 600 for memory order, 50 for plots, 100 for limits of sockets and for tensors, 250 for emulated devices, 200 for vLLM's trainer side and peers,
#: 100 for Megatron's adapters and README, 150 for adapter slots, 160 for engines of several processes, 330 for UCX.
TOTAL = 34_890
#: By directory of docs/: for each page.
EACH = {"start": 400, "concepts": 420, "guides": 800, "operating": 950, "reference": 1_180, "internals": 880}
#: Pages that need more: another implementation is written from a format's or a protocol's page alone.
MORE = {
    "docs/internals/benchmarks.md": 1_340,
    "docs/internals/receiver.md": 880,
    "docs/internals/targets.md": 1_240,
    "docs/reference/cli.md": 1_355,
    "docs/reference/delta_format.md": 2_100,
    "docs/reference/shm_protocol.md": 1_960,
    "docs/reference/trainer_protocol.md": 1_450,
    "docs/reference/wire_protocol.md": 2_840,
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
