"""The two phases of a rank of SGLang, with receivers and peers that are made up (the real ones: engines/)."""

from __future__ import annotations

import json
import time
import types
from pathlib import Path
from typing import Any

import pytest
from deltasync import Tls, errors
from deltasync._native import Version
from deltasync.engines import sglang_plugin, sglang_rank
from deltasync.engines.group import Ending, Group, Lacks
from deltasync.engines.sglang_rank import RankUpdates, Settings, Target, asked_version


class FakeReceiver:
    def __init__(self, calls: list[str], role: str) -> None:
        self.calls, self.role, self.state, self.name = calls, role, "placed", role
        self.doubt = ""
        self.newest = 2
        self.mode = "delta"
        self.failing = ""
        self.doubt_after = ""  # what fails leaves the version before, or none
        self.trace = types.SimpleNamespace(placed=["w"], reload={}, specs=[])
        self.untaken: dict[str, str] = {}

    def prepare(self, asked: int | None, timeout: float) -> Any:
        self.do("prepare")
        version = Version(1, asked or self.newest)
        return types.SimpleNamespace(wait=lambda timeout: version, version=version)

    def commit(self, staging: Any, timeout: float, verify: bool) -> Any:
        self.do("commit")
        self.verified = verify
        return types.SimpleNamespace(version=staging.version, mode=self.mode, placed="placed 1 of 1")

    def rollback(self) -> None:
        self.do("rollback")
        if self.mode == "loaded":
            self.void("its first load was rolled back")

    def void(self, reason: str, *, doubt: bool = True) -> None:
        self.calls.append(f"{self.role}.void")
        self.doubt = reason if doubt else ""

    def follow(self) -> None:
        self.do("follow")

    def pause(self) -> None:
        self.do("pause")

    def lose(self) -> None:
        self.do("lose")

    def regain(self, reason: str) -> None:
        self.do("regain")

    def do(self, what: str) -> None:
        self.calls.append(f"{self.role}.{what}")
        if self.failing == what:
            self.doubt = self.doubt_after
            raise errors.CorruptData(f"{self.role}: tile 3")


class Rank:
    """Rank 0 of two; ``peer`` says what the other one votes in turn: what about, or why not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *peer: str) -> None:
        self.calls: list[str] = []
        self.peer = list(peer)
        self.peers_doubt = ""
        self.timeouts: list[float] = []
        self.registers: dict[str, str] = {}
        manager = types.SimpleNamespace(tp_cpu_group=None, offload_tags=set(), _session=None)
        self.updates = RankUpdates(manager, Settings(("trainer:7070",)))
        self.receivers = {role: FakeReceiver(self.calls, role) for role in ("target", "draft")}
        self.updates.targets = [Target(role, None, receiver) for role, receiver in self.receivers.items()]  # type: ignore
        self.group = Timed(self, 0, 2)
        monkeypatch.setattr(sglang_rank, "parallel_refusal", lambda: None)
        monkeypatch.setattr(self.updates, "_group", lambda: self.group)

    # The store of the group.

    def check(self, keys: list[str]) -> bool:
        return all(key in self.registers for key in keys)

    def get(self, key: str) -> bytes:
        return self.registers[key].encode()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if key.endswith("/vote/0"):
            at = key.removesuffix("/vote/0")
            self.calls.append(f"vote {at}")
            other = self.peer.pop(0)
            if other == LOST:
                raise RuntimeError(LOST)
            vote = {"reason": other} if other.startswith("rank 1") else {"reason": None, "subject": other}
            self.registers[f"{at}/vote/1"] = json.dumps(vote | {"doubt": self.peers_doubt})
        return self.registers.setdefault(key, value).encode()

    def update(self, version: str | None = "2", **options: Any) -> tuple[bool, str]:
        return self.updates.update(version, {"deltasync": options} if options else None)


class Timed(Group):
    """Notes for how long it would wait in each round."""

    def _vote(self, end: float, lacks: Lacks) -> None:
        self._store.timeouts.append(end - time.monotonic())
        super()._vote(end, lacks)


STAGED = "version 2 of trainer 1"
WRITTEN, ROLLED_BACK, LOST = f"{STAGED} is written", f"{STAGED} is rolled back", "connection reset by peer"
PREPARED = ["target.prepare", "draft.prepare", "vote 1/staged"]
COMMITTED = ["target.commit", "draft.commit", "vote 1/written"]
FOLLOWED = ["target.follow", "draft.follow"]
BACK = ["draft.rollback", "target.rollback", "vote 1/rolled back"]


def test_all_are_staged_everywhere_before_any_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN)
    success, message = rank.update()
    assert (
        success
        and "version 2 of trainer 1 on 2 rank(s) (target: delta, placed 1 of 1, draft: delta, placed 1 of 1)" in message
    )
    assert rank.calls == PREPARED + COMMITTED + FOLLOWED
    assert all(receiver.verified for receiver in rank.receivers.values())


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


def test_a_peer_that_cannot_write_has_this_rank_roll_back_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: device lost", ROLLED_BACK)
    success, message = rank.update()
    assert not success and "all was rolled back" in message and "rank 1: device lost" in message
    assert rank.calls == [*PREPARED, *COMMITTED, *BACK, *FOLLOWED]


def test_a_draft_that_cannot_be_written_has_the_target_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN, ROLLED_BACK)
    rank.receivers["draft"].failing = "commit"
    success, message = rank.update()
    assert not success and "all was rolled back" in message
    assert rank.calls == [*PREPARED, *COMMITTED, "target.rollback", "vote 1/rolled back", *FOLLOWED]


def assert_not_as_before(answer: tuple[bool, str]) -> None:
    success, message = answer
    assert not success and "NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE" in message
    assert "do not resume before an update has succeeded" in message
    assert "as before" not in message and "all was rolled back" not in message


def test_a_peer_that_cannot_roll_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: loader broke", "rank 1: the weights of w are of no version: loader broke")
    answer = rank.update()
    assert_not_as_before(answer)
    assert "rank 1: the weights of w" in answer[1]


def test_a_peer_whose_rollback_is_not_heard_of_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: device lost", LOST)
    _, message = rank.update()
    assert "PERHAPS NOT ALL RANKS" in message and "as before" not in message


def test_what_this_ranks_loader_has_done_cannot_be_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: device lost", ROLLED_BACK)
    for receiver in rank.receivers.values():
        receiver.mode = "loaded"
    answer = rank.update()
    assert_not_as_before(answer)
    assert "rank 0: the weights of target are of no version: its first load was rolled back" in answer[1]


def test_a_loader_that_broke_half_way_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN, ROLLED_BACK, "rank 1: no space")
    target = rank.receivers["target"]
    target.failing, target.doubt_after = "commit", "the loader broke in version 2"
    answer = rank.update()
    assert_not_as_before(answer)
    assert "the weights of target are of no version: the loader broke in version 2" in answer[1]
    # A later one that writes nothing does not make them good.
    success, message = rank.update()
    assert not success and "nothing was written" in message and "the loader broke in version 2" in message


def test_a_rollback_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, "rank 1: device lost", ROLLED_BACK)
    draft = rank.receivers["draft"]
    draft.failing, draft.doubt_after = "rollback", "a rollback failed"
    answer = rank.update()
    assert_not_as_before(answer)
    assert "the weights of draft are of no version" in answer[1]
    assert "target.rollback" in rank.calls


def test_who_does_not_know_how_the_commit_ended_has_weights_of_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, LOST)
    success, message = rank.update()
    assert not success and "THE OUTCOME IS UNKNOWN" in message and LOST in message
    for role in ("target", "draft"):
        why = f"the weights of {role} are of no version: whether the other ranks keep {STAGED} is unknown"
        assert why in message and rank.receivers[role].doubt
    assert "do not resume" in message and "as before" not in message
    assert rank.calls == [*PREPARED, *COMMITTED, "target.void", "draft.void", *FOLLOWED]


def test_an_interrupt_amid_the_vote_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED)
    write = rank.compare_set

    def interrupted(key: str, expected: str, value: str) -> bytes:
        if key.startswith("1/written/"):
            raise KeyboardInterrupt
        return write(key, expected, value)

    monkeypatch.setattr(rank, "compare_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank.update()
    assert all(receiver.doubt for receiver in rank.receivers.values())


def test_an_interrupt_amid_the_commit_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED)

    def interrupted(*_: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank.receivers["draft"], "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank.update()
    assert rank.receivers["target"].doubt and not rank.receivers["draft"].doubt


def test_who_does_not_know_how_staging_ended_has_written_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, LOST)
    success, message = rank.update()
    assert not success and "THE OUTCOME IS UNKNOWN" in message and LOST in message
    assert "this rank has written nothing, others may have" in message and "as before" not in message
    assert rank.calls == PREPARED + FOLLOWED


def test_each_request_has_rounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, LOST, STAGED, WRITTEN)
    rank.update()  # the others may have gone on to the vote about the commit, this rank has not
    assert rank.update()[0]
    assert [call for call in rank.calls if "vote" in call] == ["vote 1/staged", "vote 2/staged", "vote 2/written"]


def test_without_a_store_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)

    def lost() -> Group:
        raise ValueError("no default store")

    monkeypatch.setattr(rank.updates, "_group", lost)
    success, message = rank.update()
    assert not success and "nothing was written: no default store" in message
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


def test_an_update_that_comes_while_the_weights_sleep_wakes_no_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN, STAGED)
    assert rank.update()[0]
    rank.updates.manager.offload_tags = {"weights"}
    rank.calls.clear()
    success, message = rank.update()
    assert not success and "released" in message
    assert rank.calls == ["vote 2/staged"]


def test_settings_of_environment_and_request(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret of many bytes\n")
    (tmp_path / "token").chmod(0o600)
    environment = {"DELTASYNC_ENDPOINTS": "relay:7071, trainer:7070", "DELTASYNC_TOKEN_FILE": str(tmp_path / "token")}
    settings = Settings.from_environment(environment)
    assert settings == Settings(("relay:7071", "trainer:7070"), "secret of many bytes", 60.0, True)
    assert not Settings.from_environment(environment | {"DELTASYNC_VERIFY": "0"}).verify
    assert not settings.with_request({"deltasync": {"verify": False}}).verify
    other = settings.with_request({"deltasync": {"endpoints": ["other:1"], "timeout": 5}})
    assert other == Settings(("other:1",), "secret of many bytes", 5, True)
    assert settings.with_request(None) == settings.with_request({"else": 1}) == settings
    assert Settings.from_environment(environment | {"DELTASYNC_IGNORE": "mtp.*, *.k_scale"}).ignore == (
        "mtp.*",
        "*.k_scale",
    )
    assert Settings.from_environment(environment | {"DELTASYNC_KEEP_DRAFT": "1"}).keep_draft and not settings.keep_draft
    assert Settings.from_environment(environment | {"DELTASYNC_SHADOW": "1"}).shadow and not settings.shadow
    assert settings.with_request({"deltasync": {"shadow": True}}).shadow
    other = settings.with_request({"deltasync": {"ignore": ["mtp.*"], "keep_draft": True}})
    assert other.ignore == ("mtp.*",) and other.keep_draft
    tls = {"DELTASYNC_TLS_CA": "ca.pem", "DELTASYNC_TLS_CERT": "a.pem", "DELTASYNC_TLS_KEY": "a.key"}
    assert Settings.from_environment(environment | tls).tls == Tls("a.pem", "a.key", "ca.pem")
    asked = settings.with_request({"deltasync": {"tls": {"ca": "ca.pem", "name": "x"}}})
    assert asked.tls == Tls(ca="ca.pem", name="x")
    with pytest.raises(errors.InvalidArgument, match="manifest.deltasync.tls: there is no option 'file'"):
        settings.with_request({"deltasync": {"tls": {"file": "ca.pem"}}})
    with pytest.raises(errors.InvalidArgument, match="colour"):
        settings.with_request({"deltasync": {"colour": "red"}})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DELTASYNC_TIMEOUT", "1m"),
        ("DELTASYNC_TIMEOUT", "nan"),
        ("DELTASYNC_TIMEOUT", "0"),
        ("DELTASYNC_VERIFY", "false"),
        ("DELTASYNC_SHADOW", "true"),
        ("DELTASYNC_KEEP_DRAFT", "yes"),
        ("DELTASYNC_TOKEN_FILE", "/nowhere/token"),
    ],
)
def test_a_wrong_variable_ends_the_start_and_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update would be too late: what it raises ends a server that has requests."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(errors.Error, match=value) as caught:
        sglang_plugin.after_start(lambda manager: None, types.SimpleNamespace())
    assert variable in str(caught.value) or "token_file" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout", "60"),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", True),
        ("verify", "no"),
        ("endpoints", "trainer:7070"),
        ("ignore", "mtp.*"),
        ("ignore", [""]),
        ("keep_draft", 1),
        ("shadow", 1),
        ("token", 7),
    ],
)
def test_a_bad_option_is_an_answer_and_does_not_stay(option: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, STAGED, WRITTEN)
    success, message = rank.update(**{option: value})
    assert not success and f"manifest.deltasync: {option} cannot be" in message
    assert "target.prepare" not in rank.calls
    assert rank.update()[0]


def test_options_are_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED, WRITTEN, STAGED, WRITTEN)
    assert rank.update(verify=False, timeout=500)[0]
    assert not any(receiver.verified for receiver in rank.receivers.values())
    assert rank.timeouts[0] > 400
    assert rank.update()[0]
    assert all(receiver.verified for receiver in rank.receivers.values())
    assert rank.timeouts[2] < 100


class Started:
    """An EngineReceiver that is only made."""

    state = "placed"

    def __init__(self, model: Any, loader: Any, endpoints: list[str], **options: Any) -> None:
        self.endpoints, self.options, self.closed = endpoints, options, False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("peers", [False, True])
def test_what_models_and_ranks_share_and_what_may_be_left_over(monkeypatch: pytest.MonkeyPatch, peers: bool) -> None:
    runners = [
        (role, types.SimpleNamespace(weight_updater=types.SimpleNamespace(tp_rank=0, get_model=lambda role=role: role)))
        for role in ("target", "draft")
    ]
    manager = types.SimpleNamespace(_select_runners=lambda: runners)
    monkeypatch.setattr(sglang_rank, "EngineReceiver", Started)
    updates = RankUpdates(manager, Settings(("trainer:7070",)))
    monkeypatch.setattr(updates, "_group", lambda: types.SimpleNamespace(ranks=1 + peers))
    updates.start()
    first = [target.receiver for target in updates.targets]
    assert [(target.role, target.receiver.options["shared"]) for target in updates.targets] == [
        ("target", True),
        ("draft", True),
    ]
    assert [receiver.options["beside"] for receiver in first] == [None, "target"]
    settings = updates.settings.with_request({"deltasync": {"keep_draft": True, "ignore": ["mtp.*"], "timeout": 5}})
    updates._configure(settings)
    assert all(receiver.closed for receiver in first)
    (target,) = updates.targets
    assert target.role == "target" and target.receiver.options["shared"] is peers
    assert target.receiver.options["ignore"] == ("mtp.*",) and target.receiver.options["timeout"] == 60
    # It stays so for requests that do not say.
    updates._configure(updates.settings.with_request({"deltasync": {"timeout": 7}}))
    assert updates.targets == [target] and not target.receiver.closed


def test_a_tensor_that_no_model_of_this_rank_takes_is_voted_about(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED)
    specs = [types.SimpleNamespace(name=name) for name in ("a", "b", "c")]
    for receiver, untaken in zip(rank.receivers.values(), ("ab", "bc"), strict=True):
        receiver.trace.specs, receiver.trace.weights = specs, ("w",)
        receiver.untaken = dict.fromkeys(untaken, "skipped")
    given: list[Lacks] = []
    update = rank.group.update

    def record(reason: str | None, work: Any, *, lacks: Lacks, **options: Any) -> Ending:
        given.append(lacks)
        return update(reason, work, lacks=lacks, **options)

    monkeypatch.setattr(rank.group, "update", record)
    rank.peer = ["rank 1: no space"]
    rank.update()
    (lacks,) = given
    assert lacks.bits == 0b010 and "1 tensor(s) of the trainer have no place: b (skipped)" in lacks.words(0b010)


def test_another_ranks_weights_of_no_version_are_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, STAGED)
    rank.receivers["target"].failing = "prepare"
    rank.peers_doubt = "the weights of sglang-target-tp1 are of no version: asleep"
    success, message = rank.update()
    assert not success and rank.peers_doubt in message and "do not resume before" in message


def test_only_what_does_not_come_back_by_itself_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.updates.sleeps(lambda role: role == "target")
    rank.updates.woke(lambda role: role == "target")
    assert rank.calls == ["target.pause", "draft.lose", "target.follow", "draft.regain"]


def test_a_pull_that_does_not_end_keeps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.receivers["target"].failing = "pause"
    with pytest.raises(errors.CorruptData):
        rank.updates.sleeps(lambda role: True)


@pytest.mark.parametrize("failing", ["lose", "release", "half of it"])
def test_weights_that_were_not_released_are_awake(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    manager, asked = rank.updates.manager, types.SimpleNamespace(tags=[])
    rank.receivers["draft"].failing = failing
    monkeypatch.setattr(sglang_plugin, "_is_backed_up", lambda role: False)
    monkeypatch.setitem(sglang_plugin._ranks, id(manager), rank.updates)

    def release(*_: Any) -> None:
        if failing == "half of it":
            manager.offload_tags = {"weights"}
        raise errors.CorruptData("SGLang is not idle")

    with pytest.raises(errors.CorruptData):
        sglang_plugin.release_memory(release, manager, asked)
    woke = [] if failing == "half of it" else ["target.regain", "draft.regain"]
    assert rank.calls == ["target.lose", "draft.lose", *woke]


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
    early, late = (Group(store, rank, 2) for rank in (1, 0))
    said = early.vote("no space", timeout=0.1, at="1/staged")
    assert not said.yes and said.reason.startswith("rank 1: no space")
    assert late.vote(None, timeout=30, at="1/staged") == said
    said = late.vote("broken", timeout=0.1, at="2/staged")
    assert said.reason.startswith("rank 0: broken")
    assert early.vote(None, timeout=30, at="2/staged") == said
