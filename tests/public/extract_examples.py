"""The examples in the public headers' comments, as one source to compile: each is the body of a function that has what
examples speak of.

Usage: extract_examples.py OUT HEADER...
"""

import pathlib
import re
import sys

PREAMBLE = """\
// Made by tests/public/extract_examples.py.
#include <deltasync/deltasync.hpp>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

using namespace deltasync;
"""

FUNCTION = """
Status {name}(Receiver& receiver, const LayoutPtr& layout, const std::stop_token& stop);
Status {name}([[maybe_unused]] Receiver& receiver, [[maybe_unused]] const LayoutPtr& layout,
              [[maybe_unused]] const std::stop_token& stop) {{
  {{
#line {line} "{path}"
{body}
  }}
  return {{}};
}}
"""


def examples(text):
    """(line, body) of each block ```cpp … ``` in the comments."""
    body = None
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.match(r"\s*///? ?(.*)", line)
        if comment is None:
            if body is not None:
                raise SystemExit(f"line {number}: an example without its end")
        elif comment[1].strip() == "```cpp":
            body, first = [], number + 1
        elif comment[1].strip() == "```" and body is not None:
            yield first, "\n".join(body)
            body = None
        elif body is not None:
            body.append(comment[1])


def main():
    out, *headers = (pathlib.Path(argument) for argument in sys.argv[1:])
    source = PREAMBLE
    for header in headers:
        found = list(examples(header.read_text()))
        if not found and header.name not in ("deltasync.hpp", "version.hpp"):
            raise SystemExit(f"{header} has no example")
        for index, (line, body) in enumerate(found, 1):
            source += FUNCTION.format(name=f"example_{header.stem}_{index}", line=line, path=header, body=body)
    out.write_text(source)


if __name__ == "__main__":
    main()
