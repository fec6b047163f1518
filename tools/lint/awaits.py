"""A rule for coroutines: no expression has both `co_await` and one of `||`, `&&`, `?:`.

g++ 12 keeps the temporaries of an expression that awaits in the coroutine's frame. Where an operator decides at run time
which of them are made, it destroys what was never made, or destroys it twice. The author gives the choice a name of its
own before or after.
"""

import re

# Comments, string literals, character literals, numbers and words, the operators of two characters that matter here.
TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(?P<mark>[^(\n]*)\(.*?\)(?P=mark)" | "(?:\\.|[^"\\\n])*" | \d[\w.']* |
        '(?:\\.|[^'\\\n])*' | \w+ | \|\| | && | \S""", re.VERBOSE | re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
OPENING = {"(": ")", "[": "]", "{": "}"}
# What stands before a parenthesis whose content is an expression of its own.
CONDITION = {"if", "while", "for", "switch", "constexpr"}


def tokens(text):
    """[(token, line)] of C++ without comments and preprocessor directives."""
    text = DIRECTIVE.sub(lambda found: "\n" * found.group().count("\n"), text)
    found = []
    line, at = 1, 0
    for match in TOKEN.finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        if not match.group().startswith(("//", "/*")):
            found.append((match.group(), line))
    return found


def blocks(source):
    """Positions of braces around statements; other braces are part of an expression."""
    found = set()
    opened = []
    for at, (token, _) in enumerate(source):
        if token == "{":
            opened.append(at)
        elif token == "}" and opened:
            opened.pop()
        elif token == ";":
            found.update(opened)
    return found


class Expression:
    """What was seen of the expression that is being read."""

    def __init__(self):
        self.awaits = False
        self.operators = []  # (operator, line)

    def end(self):
        """The operators that must not be there; what follows is another expression."""
        wrong = self.operators if self.awaits else []
        self.__init__()
        return wrong


def check_awaits(name, text):
    if not name.endswith((".cpp", ".hpp")) or "co_await" not in text:
        return
    source = tokens(text)
    statements = blocks(source)
    wrong = []
    reading = [Expression()]  # the innermost last
    own = []  # for each bracket that is open: whether its content is an expression of its own
    for at, (token, line) in enumerate(source):
        before = source[at - 1][0] if at else ""
        if token == "co_await":
            reading[-1].awaits = True
        elif token in ("||", "?") or (token == "&&" and before not in ("auto", ">")):  # those are references
            reading[-1].operators.append((token, line))
        elif token == ";":
            wrong += reading[-1].end()
        elif token in OPENING:
            own.append(at in statements if token == "{" else token == "(" and before in CONDITION)
            if own[-1]:
                reading.append(Expression())
        elif token in OPENING.values() and own and own.pop():
            wrong += reading.pop().end()
    for operator, line in wrong:
        yield (f"{name}:{line}: {'?:' if operator == '?' else operator} in an expression with co_await, which g++ 12 gets "
               "wrong: give the choice a name of its own")
