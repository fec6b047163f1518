"""Every code of the library is an exception of its own, with what Python calls the case as a base."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from deltasync import errors

HEADER = Path(__file__).parents[2] / "include" / "deltasync" / "result.hpp"


def codes() -> list[str]:
    body = re.search(r"enum class Errc[^{]*\{(.*?)\};", HEADER.read_text(), re.S)
    assert body is not None
    return re.findall(r"^\s*(\w+),", body[1], re.M)


@pytest.mark.parametrize("code", codes())
def test_each_code_has_its_class(code: str) -> None:
    error = errors.from_code(code, "tile 8: it is so")
    assert type(error) is not errors.Error
    assert error.code == code
    assert str(error).startswith("tile 8: it is so")
    assert isinstance(error, errors.Error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize(
    ("code", "base"),
    [
        ("timed_out", TimeoutError),
        ("connection", ConnectionError),
        ("peer_died", ConnectionError),
        ("invalid_argument", ValueError),
        ("no_space", OSError),
        ("permission", PermissionError),
        ("already_exists", FileExistsError),
        ("not_found", LookupError),
        ("unsupported", NotImplementedError),
    ],
)
def test_bases(code: str, base: type[BaseException]) -> None:
    assert isinstance(errors.from_code(code, ""), base)


def test_no_remedy_points_at_the_message_that_it_stands_in() -> None:
    assert [code for code in codes() if "the message" in str(errors.from_code(code, ""))] == []
