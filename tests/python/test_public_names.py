"""What a user of the package reads and has checked: help() says something of every name, and a small program that
uses them passes mypy --strict."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import deltasync
import pytest

#: The package's own lines are not the user's, as where it is installed.
MYPY = """
[mypy]
strict = True
follow_imports = silent
follow_imports_for_stubs = True
"""

USER_PROGRAM = """
from __future__ import annotations

import asyncio

import deltasync


def train(manager: deltasync.WeightManager, steps: int) -> float:
    waited = 0.0
    for step in range(1, steps + 1):
        report: deltasync.OffloadReport = manager.offload(version=step, label=f"step_{step}")
        waited += report.total_s
    return waited


def serve(endpoint: str, plan: deltasync.PlacementPlan) -> int:
    with deltasync.Receiver(endpoint, plan=plan, shadow=True, full_update_policy="stage") as receiver:
        prepared: deltasync.Prepared = receiver.prepare("step_3")
        pulled: deltasync.PullReport = prepared.wait()
        if prepared.is_current("step_3"):
            receiver.commit()
        wrong: list[deltasync.TileMismatch] = receiver.attest()
        for mismatch in wrong:
            print(mismatch.tile, mismatch.tensor, mismatch.copy_in)
        repaired: deltasync.RepairReport = receiver.repair(wrong)
        receiver.release()
        restored: deltasync.RepairReport = receiver.restore()
        lag: deltasync.Lag = receiver.lag()
        wrong_type: str = receiver.lag()  # type: ignore[assignment]
        print(wrong_type)
        version: deltasync.Version | None = receiver.version
        number = version.number if version is not None else 0
        return number + pulled.tiles + repaired.tiles + restored.tiles + (lag.versions or 0)


async def serve_async(endpoint: str) -> str:
    async with await deltasync.AsyncReceiver.connect(endpoint) as receiver:
        report = await receiver.update()
        return report.version.label
"""


def test_a_users_program_is_typed(tmp_path: Path) -> None:
    """One line is wrong on purpose: were it not found, its ignore would be."""
    pytest.importorskip("mypy")
    package = Path(deltasync.__file__).parent
    assert (package / "py.typed").exists()
    program = tmp_path / "program.py"
    program.write_text(USER_PROGRAM)
    config = tmp_path / "mypy.ini"
    config.write_text(MYPY)
    cache = Path(__file__).parents[2] / ".mypy_cache"  # torch's types, which take a minute, are there already
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--config-file", str(config), str(program)],
        env={**os.environ, "MYPYPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_public_name_says_what_it_is() -> None:
    silent = []
    for name in deltasync.__all__:
        thing = getattr(deltasync, name)
        if name.startswith("__"):
            continue
        if not inspect.getdoc(thing):
            silent.append(name)
        if not inspect.isclass(thing) or issubclass(thing, tuple):
            continue
        for attribute, member in vars(thing).items():
            described = callable(member) or isinstance(member, (property, classmethod, staticmethod))
            if not attribute.startswith("_") and described and not inspect.getdoc(getattr(thing, attribute)):
                silent.append(f"{name}.{attribute}")
    assert silent == []


def test_every_field_of_a_report_is_explained() -> None:
    """In the docstring: help() and the site show no comments."""
    things = [getattr(deltasync, name) for name in deltasync.__all__]
    things += [deltasync.megatron.Difference, deltasync.megatron.ProofReport, deltasync.control.Admission]
    silent = []
    for thing in things:
        fields = getattr(thing, "_fields", None) or getattr(thing, "__dataclass_fields__", ())
        said = inspect.getdoc(thing) or ""
        silent += [f"{thing.__name__}.{field}" for field in fields if f"``{field}``" not in said]
    assert silent == []


def test_every_argument_is_explained() -> None:
    """By the call or, for all of its calls, by the class."""
    silent = []
    for name in deltasync.__all__:
        thing = getattr(deltasync, name)
        if not inspect.isclass(thing) or issubclass(thing, (tuple, deltasync.Error)):
            continue
        if thing in (deltasync.AsyncReceiver, deltasync.Prepared):  # as of Receiver; made by prepare()
            continue
        own = inspect.getdoc(thing) or ""
        for call, function in vars(thing).items():
            if not inspect.isfunction(function) or call.startswith("_") and call != "__init__":
                continue
            said = own + (inspect.getdoc(function) or "")
            arguments = list(inspect.signature(function).parameters)[1:]
            silent += [f"{name}.{call}: {argument}" for argument in arguments if f"``{argument}" not in said]
    assert silent == []
