#!/usr/bin/env python3
"""Words that this project made up or that only it uses so, and the field's words for them. Prints every use and exits
with 1 if there is one. Identifiers are taken apart at capitals and underscores, so a word is found inside of them too.

Usage: check_words.py [ROOT]
"""

import pathlib
import re
import sys

from check_tree import tracked

# A word, in any of its forms, and what to say instead.
WORDS = {
    "anew": "again",
    "bury buries buried burying": "retire",
    "disown disowns disowned": "invalidate",
    "distrust distrusts distrusted": "invalidate",
    "folder folders": "directory",
    "mend mends mended mending unmended": "repair; of a fault in the code: fix",
    "reckon reckons reckoned reckoning": "compute",
    "shelf shelves": "cache",
    "sound": "valid",
    "stranded": "orphaned",
    "whoever whomever": "the caller, or who it is",
    "wish wishes wished": "request",
    "yard": "reclaimer",
}

# Where only words together, or an identifier as a whole, say it.
PHRASES = {
    r"HomeProcess": "ForkGuard",
    r"BehindDiff|behind[_-]threads|\bdiff(s|ed)? behind (it|them|the writers?)\b": "overlapped diff",
    r"\b(take|takes|taken|taking|took)[_ ]back\b|TakeBack|TakenBack|\b(go|goes|going)_back\b": "roll back",
    r"\bway back\b|\bway_back\b|WayBack": "undo log",
    r"\bMade(Cache|Key|Wait)\b": "DerivedDeltaCache, DeltaKey, PendingPlan",
    r"\bDigestLot\b": "DigestBatch",
    r"\b(Device|Host)Lanes?\b": "CopyStream, HostDevice",
    r"\bknow_parts\b": "compute_subset_roots",
    r"\blet_go\w*": "release",
    r"\btend\(|\btend_\w+": "run_maintenance",
    r"\bdeltasync[./]tracing\b": "deltasync.autoplacement",
    r"\bfor want of\b": "for lack of",
    r"\bone behind the other\b": "contiguous; of events: one after the other",
    r"\bcannot be said\b": "unsupported, or what cannot be done",
}

# Files, and directories with a slash at the end, in which a word is right, and why.
ALLOWED = {
    "tools/lint/check_words.py": "lists the old names",
}

TEXT = {"", ".cmake", ".cpp", ".cu", ".h", ".hpp", ".json", ".md", ".py", ".pyi", ".sh", ".svg", ".toml", ".txt",
        ".yaml", ".yml"}
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
REPLACEMENT = {word: instead for words, instead in WORDS.items() for word in words.split()}
ANY_WORD = re.compile("|".join(REPLACEMENT), re.IGNORECASE)  # a quick look, before an identifier is taken apart
ANY_PHRASE = [(re.compile(phrase), instead) for phrase, instead in PHRASES.items()]


def found_in(line):
    """Pairs of what is in the line and what to say instead."""
    if ANY_WORD.search(line):
        for part in PARTS.findall(line):
            if part.lower() in REPLACEMENT:
                yield part, REPLACEMENT[part.lower()]
    for phrase, instead in ANY_PHRASE:
        if match := phrase.search(line):
            yield match.group(), instead


def is_checked(name):
    allowed = any(name.startswith(path) if path.endswith("/") else name == path for path in ALLOWED)
    return not allowed and "/corpus/" not in name and pathlib.PurePosixPath(name).suffix in TEXT


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    uses = []
    for name in filter(is_checked, tracked(root)):
        try:
            text = (root / name).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        uses += [f"{name}: its name has \"{word}\": {instead}" for word, instead in found_in(name)]
        for number, line in enumerate(text.splitlines(), 1):
            uses += [f"{name}:{number}: \"{word}\": {instead}" for word, instead in found_in(line)]
    uses += [f"{name}: is allowed words, and is not there" for name in ALLOWED if not (root / name).exists()]
    for use in uses:
        print(use, file=sys.stderr)
    print(f"check_words: {len(uses)} uses of private words")
    return 1 if uses else 0


if __name__ == "__main__":
    sys.exit(main())
