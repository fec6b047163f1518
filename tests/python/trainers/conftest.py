"""What the tests of trainers share."""

from __future__ import annotations

import functools
from typing import Any

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole model of a family (and dtype), made once."""
    from whole_model import Whole

    return functools.cache(lambda name, *dtype: Whole(name, tmp_path_factory.mktemp(name), *dtype))
