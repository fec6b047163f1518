"""The two phases of a rank of SGLang, with receivers and peers that are made up (the real ones: engines/)."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from deltasync import errors
from deltasync._native import Version
from deltasync.engines import sglang_rank
from deltasync.engines.sglang_rank import RankUpdates, Settings, Target, asked_version
from deltasync.engines.votes import Verdict, Votes


class FakeReceiver:
    def __init__(self, calls: list[str], role: str) -> None:
        self.calls, self.role, self.state, self.name = calls, role, "placed", role
        self.version: Version | None = Version(1, 1)
        self.newest = 2
        self.mode = "delta"
        self.failing = ""
        self.trace = types.SimpleNamespace(placed=["w"], reload={})

    def prepare(self, asked: int | None, timeout: float) -> Any:
        self.do("prepare")
        version = Version(1, asked or self.newest)
        return types.SimpleNamespace(wait=lambda timeout: version, version=version)

    def commit(self, staging: Any, timeout: float, verify: bool) -> Any:
        self.do("commit")
        return types.SimpleNamespace(version=staging.version, mode=self.mode)

    def rollback(self) -> None:
        self.do("rollback")

    def follow(self) -> None:
        self.do("follow")

    def do(self, what: str) -> None:
        self.calls.append(f"{self.role}.{what}")
        if self.failing == what:
            raise errors.CorruptData(f"{self.role}: tile 3")


class Rank:
    """Rank 0 of two; ``peer`` says what the other one votes in turn: what about, or why not."""

    ranks = 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *peer: str) -> None:
        self.calls: list[str] = []
        self.peer = list(peer)
        manager = types.SimpleNamespace(tp_cpu_group=None, offload_tags=set(), _session=None)
        self.updates = RankUpdates(manager, Settings(("trainer:7070",)))
        self.receivers = {role: FakeReceiver(self.calls, role) for role in ("target", "draft")}
        self.updates.targets = [Target(role, None, receiver) for role, receiver in self.receivers.items()]  # type: ignore
        monkeypatch.setattr(sglang_rank, "parallel_refusal", lambda: None)
        monkeypatch.setattr(self.updates, "_ballot", lambda: self)

    def decide(self, reason: str | None, *, subject: str, timeout: float) -> Verdict:
        self.calls.append("vote")
        other = self.peer.pop(0)
        if reason is not None:
            return Verdict(False, f"rank 0: {reason}")
        return Verdict(other == subject, "" if other == subject else other)

    def update(self, version: str | None = "2") -> tuple[bool, str]:
        return self.updates.update(version, None)


STAGED, WRITTEN = "version 2 of trainer 1", "the commit"
PREPARED = ["target.prepare", "draft.prepare", "vote"]
COMMITTED = ["target.commit", "draft.commit", "vote"]
FOLLOWED = ["target.follow", "draft.follow"]


def test_all_are_staged_everywhere_before_any_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN)
    success, message = rank.update()
    assert success and "version 2 of trainer 1 on 2 rank(s) (target: delta, draft: delta)" in message
    assert rank.calls == PREPARED + COMMITTED + FOLLOWED


def test_a_peer_that_cannot_stage_keeps_this_rank_from_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, "rank 1: no space")
    success, message = rank.update()
    assert not success and "nothing was written" in message and "rank 1: no space" in message
    assert rank.calls == PREPARED + FOLLOWED


def test_a_draft_that_cannot_be_staged_keeps_all_ranks_from_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED)
    rank.receivers["draft"].failing = "prepare"
    success, message = rank.update()
    assert not success and "draft: tile 3" in message
    assert "target.commit" not in rank.calls


def test_a_peer_that_cannot_write_has_this_rank_take_back_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: device lost")
    success, message = rank.update()
    assert not success and "all was taken back" in message
    assert rank.calls == [*PREPARED, *COMMITTED, "draft.rollback", "target.rollback", *FOLLOWED]


def test_a_draft_that_cannot_be_written_has_the_target_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN)
    rank.receivers["draft"].failing = "commit"
    success, message = rank.update()
    assert not success and "all was taken back" in message
    assert rank.calls == [*PREPARED, *COMMITTED, "target.rollback", *FOLLOWED]


def test_a_peer_that_cannot_take_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: loader broke (cannot be taken back)")
    success, message = rank.update()
    assert not success and "RANKS DIFFER NOW" in message


def test_what_this_ranks_loader_has_done_cannot_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: device lost")
    for receiver in rank.receivers.values():
        receiver.mode = "loaded"
    success, message = rank.update()
    assert not success and "RANKS DIFFER NOW" in message


def test_a_loader_that_broke_half_way_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN)
    rank.receivers["target"].failing, rank.receivers["target"].version = "commit", None
    success, message = rank.update()
    assert not success and "RANKS DIFFER NOW" in message and "cannot be taken back" in message


def test_ranks_whose_store_failed_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)

    def lost(*_: Any, **__: Any) -> Verdict:
        raise errors.ConnectionFailed("the store failed")

    monkeypatch.setattr(rank, "decide", lost)
    success, message = rank.update()
    assert not success and "the store failed" in message
    assert "target.commit" not in rank.calls


@pytest.mark.parametrize(
    ("tags", "session", "reason"), [({"weights"}, None, "released"), ({"kv_cache"}, object(), "session is open")]
)
def test_asleep_or_in_a_session_nothing_is_even_staged(
    monkeypatch: pytest.MonkeyPatch, tags: set[str], session: Any, reason: str
) -> None:
    rank = Rank(monkeypatch, STAGED)
    rank.updates.manager.offload_tags, rank.updates.manager._session = tags, session
    success, message = rank.update()
    assert not success and reason in message
    assert "target.prepare" not in rank.calls


def test_settings_of_environment_and_request(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    environment = {"DELTASYNC_ENDPOINTS": "relay:7071, trainer:7070", "DELTASYNC_TOKEN_FILE": str(tmp_path / "token")}
    settings = Settings.from_environment(environment)
    assert settings == Settings(("relay:7071", "trainer:7070"), "secret", 60.0, False)
    other = settings.with_request({"deltasync": {"endpoints": ["other:1"], "timeout": 5}})
    assert other == Settings(("other:1",), "secret", 5, False)
    assert settings.with_request(None) == settings.with_request({"else": 1}) == settings
    with pytest.raises(errors.InvalidArgument, match="colour"):
        settings.with_request({"deltasync": {"colour": "red"}})


def test_what_a_request_asks_for() -> None:
    assert [asked_version(text) for text in (None, "", "42", "step-42")] == [None, None, 42, "step-42"]


def test_without_endpoints_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED)
    rank.updates.targets, rank.updates.settings = [], Settings()
    success, message = rank.update()
    assert not success and "DELTASYNC_ENDPOINTS" in message


def test_a_rank_that_comes_late_to_a_round_takes_its_verdict() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    early, late = (Votes(store, rank, 2, lockstep=True) for rank in (1, 0))
    said = early.decide("no space", timeout=0.1)
    assert not said.yes and said.reason.startswith("rank 1: no space")
    assert late.decide(None, timeout=30) == said
    said = late.decide("broken", timeout=0.1)
    assert said.reason.startswith("rank 0: broken")
    assert early.decide(None, timeout=30) == said
