"""Slots of rollout servers that follow a trainer's LoRA adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltasync import errors
from deltasync.adapters import lora
from deltasync.adapters.servers import SglangServer
from rollout_servers import RolloutServer

torch = pytest.importorskip("torch")

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = {f"{PREFIX}.lora_A.weight": torch.ones(4, 16), f"{PREFIX}.lora_B.weight": torch.ones(16, 4)}


class SlotServer:
    """A rollout server's adapter slots; ``broken``: what it raises next, by method."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.calls: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.paused = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise self.broken.pop(name)

    def pause(self, timeout: float) -> None:
        self.paused = True
        self._call("pause")

    def load_adapter(self, name: str, path: str, timeout: float) -> None:
        self._call("load")
        assert (Path(path) / "adapter_config.json").exists()
        self.adapters[name] = path

    def loaded_adapter(self, name: str, timeout: float) -> str:
        return self.adapters.get(name, "")

    def resume(self, timeout: float) -> None:
        self._call("resume")
        self.paused = False


LOADED = ["pause", "load", "resume"]


def test_a_slot_follows_and_loads_what_the_server_has_not(segment_name: str, tmp_path: Path) -> None:
    server = SlotServer()
    with lora.manager(ADAPTER, CONFIG, name=segment_name) as manager:
        manager.offload(ADAPTER)
        with lora.AdapterSlot(server, "policy", manager.endpoint, directory=tmp_path) as slot:
            assert slot.update().number == 1
            first = server.adapters["policy"]
            assert slot.update().number == 1
            assert server.calls == LOADED
            server.adapters.clear()  # it was started again
            assert slot.update().number == 1
            assert server.calls == 2 * LOADED
            manager.offload(ADAPTER)
            assert slot.update(2).number == 2
            assert server.adapters["policy"] != first  # prefix caches go by it
            assert server.calls == 3 * LOADED


def test_files_that_somebody_removed_are_named(segment_name: str, tmp_path: Path) -> None:
    with lora.manager(ADAPTER, CONFIG, name=segment_name) as manager:
        manager.offload(ADAPTER)
        with lora.AdapterSlot(SlotServer(), "policy", manager.endpoint, directory=tmp_path) as slot:
            slot.update()
            (tmp_path / "current" / "adapter_config.json").unlink()
            with pytest.raises(errors.IoError, match="make the slot again"):
                slot.update()


@pytest.mark.parametrize("broken", ["pause", "load", "resume"])
def test_a_slot_whose_server_fails_tries_again(broken: str, segment_name: str, tmp_path: Path) -> None:
    server = SlotServer()
    server.broken[broken] = errors.ConnectionFailed("gone")
    with lora.manager(ADAPTER, CONFIG, name=segment_name) as manager:
        manager.offload(ADAPTER)
        with lora.AdapterSlot(server, "policy", manager.endpoint, directory=tmp_path) as slot:
            with pytest.raises(errors.ConnectionFailed, match="gone"):
                slot.update()
            assert server.calls[-1] == "resume"
            assert slot.update().number == 1
            assert server.calls[-1] == "resume" and not server.paused
            assert server.adapters.keys() == {"policy"}


def test_a_slot_does_not_believe_a_server_that_has_something_else(segment_name: str, tmp_path: Path) -> None:
    class Other(SlotServer):
        def loaded_adapter(self, name: str, timeout: float) -> str:
            return "/other"

    server = Other()
    with lora.manager(ADAPTER, CONFIG, name=segment_name) as manager:
        manager.offload(ADAPTER)
        with lora.AdapterSlot(server, "policy", manager.endpoint, directory=tmp_path) as slot:
            with pytest.raises(errors.InternalError, match="says that it has /other"):
                slot.update()
            assert server.calls == LOADED
        with pytest.raises(errors.InvalidArgument, match="name"):
            lora.AdapterSlot(server, "", manager.endpoint, directory=tmp_path)


def test_the_slots_of_sglang(segment_name: str, tmp_path: Path) -> None:
    fake = RolloutServer()
    try:
        with lora.manager(ADAPTER, CONFIG, name=segment_name) as manager:
            manager.offload(ADAPTER)
            server = SglangServer(fake.url, pause_mode="abort")
            with lora.AdapterSlot(server, "policy", manager.endpoint, directory=tmp_path) as slot:
                slot.update()
                first = fake.adapters["policy"]
                manager.offload(ADAPTER)
                fake.fail["/load_lora_adapter"] = (400, "bad adapter")
                with pytest.raises(errors.Error, match="bad adapter"):
                    slot.update(2)
                assert fake.adapters == {"policy": first}  # loaded again
                assert not fake.paused
                fake.fail["/unload_lora_adapter"] = (500, "no answer")
                with pytest.raises(errors.Error, match="no answer"):
                    slot.update(2)
                assert fake.adapters == {"policy": first}
                assert slot.update(2).number == 2
                assert fake.adapters["policy"] != first
                slot.server = SglangServer(fake.url)
                fake.adapters.clear()
                with pytest.raises(errors.InvalidArgument, match="abort"):
                    slot.update()
    finally:
        fake.close()
