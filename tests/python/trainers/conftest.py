"""What the tests of trainers share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_trainer import Fake


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole model of a family (and dtype), made once."""
    from whole_model import Whole

    return functools.cache(lambda name, *dtype: Whole(name, tmp_path_factory.mktemp(name), *dtype))


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A trainer that is cut as Megatron's are."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from fake_trainer import Fake

    return Fake(tmp_path)
