"""AReaL's own remote engines, in disk mode, drive the control service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("areal", reason="areal is not installed")
torch = pytest.importorskip("torch")
from control_fleet import TOKENS, Fleet, model  # noqa: E402

pytestmark = pytest.mark.engines


def remote(dialect: str, fleet: Fleet, root: Path) -> Any:
    """As the trainer has it, without what it generates with."""
    from areal.api.cli_args import InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from areal.engine.vllm_remote import RemotevLLMEngine

    config = InferenceEngineConfig(
        backend=f"{dialect}:d1",
        experiment_name="exp",
        trial_name="trial",
        fileroot=str(root),
        setup_timeout=60.0,
        request_timeout=60.0,
        pause_grace_period=0.0,
    )
    engine = {"sglang": RemoteSGLangEngine, "vllm": RemotevLLMEngine}[dialect](config)
    engine.initialize("test", fleet.control.endpoint, train_data_parallel_size=1)
    return engine


@pytest.fixture(params=["sglang", "vllm"])
def driven(
    request: pytest.FixtureRequest, fleets: Callable[..., Fleet], tmp_path: Path
) -> Iterator[tuple[Any, Fleet, Path]]:
    from areal.api.cli_args import NameResolveConfig
    from areal.utils import name_resolve

    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path / "names")))
    fleet = fleets(dialects=[request.param])
    engine = remote(request.param, fleet, tmp_path)
    yield engine, fleet, tmp_path
    engine.destroy()


def update(engine: Any, root: Path, version: int, value: float | None) -> Any:
    """What FSDPEngine does in disk mode; without a value nothing is written."""
    import safetensors.torch
    from areal.api.io_struct import WeightUpdateMeta
    from areal.utils import name_resolve, names

    meta = WeightUpdateMeta.from_disk("exp", "trial", str(root)).with_version(version)
    engine.set_version(version)
    engine.pause_generation()
    done = engine.update_weights_from_disk(meta)
    directory = Path(str(meta.path))
    directory.mkdir(parents=True)
    if value is not None:
        safetensors.torch.save_file(model(value).state_dict(), directory / "model.safetensors")
    name = names.update_weights_from_disk("exp", "trial", version)
    name_resolve.add(name, str(time.time()), keepalive_ttl=120)
    done.result(120)
    engine.continue_generation()


def test_it_pauses_updates_and_continues(driven: tuple[Any, Fleet, Path]) -> None:
    engine, fleet, root = driven
    for version in (1, 2):
        running = fleet.engine.submit("running")
        update(engine, root, version, 5.0 + version)
        assert running.ended in ("abort", "length")
        assert fleet.engine.finish(fleet.engine.submit("next")).tokens == [5.0 + version] * TOKENS
    engine.offload()
    assert fleet.engine.asleep == {"weights", "kv_cache"}
    engine.onload(["weights"])
    engine.onload(["kv_cache"])
    assert fleet.engine.finish(fleet.engine.submit("woken")).tokens == [7.0] * TOKENS


def test_what_fails_it_asks_again_and_then_raises(driven: tuple[Any, Fleet, Path]) -> None:
    engine, fleet, root = driven
    update(engine, root, 1, 6.0)
    with pytest.raises(RuntimeError, match="Failed after 3 retries"):
        update(engine, root, 2, None)
    engine.continue_generation()
    assert fleet.engine.finish(fleet.engine.submit("old")).tokens == [6.0] * TOKENS
    stop_admission = fleet.engine.stop_admission
    failures = [RuntimeError("not now"), RuntimeError("not now")]

    def fails_twice() -> None:
        if failures:
            raise failures.pop()
        stop_admission()

    fleet.engine.stop_admission = fails_twice  # type: ignore[method-assign]
    update(engine, root, 3, 8.0)
    assert failures == []
    assert fleet.engine.finish(fleet.engine.submit("new")).tokens == [8.0] * TOKENS
