"""engines/session.py with a hand-written engine: what a vLLM or SGLang plug-in builds on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from deltasync import errors

torch = pytest.importorskip("torch")

from deltasync.engines import session  # noqa: E402
from deltasync.engines.session import LOADING, PLACED, EngineReceiver  # noqa: E402
from deltasync.prepared import Prepared  # noqa: E402
from engine_rig import WAIT, Rig, update  # noqa: E402
from engine_support import Engine, Loader, assert_bits, bits  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2])
def test_versions_are_the_loaders_bit_by_bit(rig: Rig, ranks: int) -> None:
    engines = [rig.engine(rank, ranks) for rank in range(ranks)]
    for number in range(1, 9):
        if number > 1:
            rig.publish(number)
        for engine, loader, receiver in engines:
            report = update(receiver, number)
            assert report.version.number == number and receiver.version == report.version
            assert_bits(engine, engine.expected(rig.weights))
            if number == 1:
                assert report.mode == "loaded" and receiver.state == PLACED
                assert set(receiver.trace.reload) == {"mlp.down.weight"}
                assert report.unattested == 1
            else:
                # What is permuted goes through the loader, and nothing else does.
                # The first one is full if the pull of what is there already was not finished.
                assert report.mode == "delta" or (number == 2 and report.mode == "full")
                assert (report.direct, report.reloaded) == (7, 1)
                assert loader.reloaded[-1] == ["mlp.down.weight"]


def test_what_verify_does_not_see_is_named_and_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A loader that skips a tensor looks like one that keeps it in a form of its own."""
    engine, loader, receiver = rig.engine(permutes=False)
    load_weights = engine.load_weights
    skipping = lambda weights: load_weights(pair for pair in weights if pair[0] != "norm.weight")  # noqa: E731
    reload = loader.reload

    def skips(weights: Any) -> None:
        engine.load_weights = skipping
        try:
            reload(weights)
        finally:
            engine.load_weights = load_weights

    loader.reload = skips
    report = update(receiver, 1)
    assert (report.mode, report.placed) == ("loaded", "placed 8 of 8, 1 unattested")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "1 tensor(s)" in warning and "norm.weight" in warning
    rig.publish(2)
    assert update(receiver, 2).unattested == 1
    rig.publish(3)
    assert update(receiver, 3, verify=False).unattested == 8


def test_a_doubt_stays_until_an_update(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    receiver.void("asleep")
    receiver.void("something else tried to write", doubt=False)
    assert receiver.doubt == "asleep"
    update(receiver, 1)
    assert receiver.doubt == ""
    assert_bits(engine, engine.expected(rig.weights))


def test_an_interrupt_at_the_end_of_the_first_load(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, receiver = rig.engine()
    staging = receiver.prepare(1, timeout=WAIT)
    staging.wait(WAIT)
    places, calls = session.places, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:  # the first is before the live memory is bound, this one behind it
            raise KeyboardInterrupt
        return places(*args)

    monkeypatch.setattr(session, "places", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.commit(staging)
    monkeypatch.setattr(session, "places", places)
    assert receiver.state == LOADING and receiver.doubt
    gc.collect()
    rig.publish(2)
    receiver.follow()
    assert update(receiver, 2).mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))


def test_an_interrupt_behind_a_commit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    rig.publish(2)
    update(receiver, 2)
    rig.publish(3)
    staging = receiver.prepare(3, timeout=WAIT)
    staging.wait(WAIT)
    commit = Prepared.commit

    def interrupted(*args: Any, **options: Any) -> None:
        commit(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Prepared, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            receiver.commit(staging)
    assert receiver.version is None and "interrupted" in receiver.doubt
    rig.publish(4)
    assert update(receiver, 4).mode == "loaded" and receiver.doubt == ""
    assert_bits(engine, engine.expected(rig.weights))


def test_a_timeout_without_an_end(rig: Rig) -> None:
    engine = Engine(0, 1)
    receiver = EngineReceiver(engine, Loader(engine), rig.manager.endpoint, name="endless", timeout=float("inf"))
    rig.receivers.append(receiver)
    staging = receiver.prepare(1)
    staging.wait(WAIT)
    assert receiver.commit(staging).version.number == 1
    receiver.void("asleep")
    assert receiver.state == LOADING


@pytest.mark.parametrize("asked", [1, 2, 3, None])
def test_a_base_of_another_epoch_is_replaced_in_full(rig: Rig, asked: int | None) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    rig.publish(3)
    receiver._following.wait(WAIT)  # staged, not committed
    epoch = receiver.version.epoch
    rig.restart(100)
    for number in range(2, (asked or 2) + 1):
        rig.publish(number)
    report = update(receiver, asked)
    assert (report.version.number, report.mode) == (asked or 2, "full") and report.version.epoch != epoch
    assert_bits(engine, engine.expected(rig.weights))
    rig.publish(4)
    assert update(receiver, 4).mode == "delta"
    assert_bits(engine, engine.expected(rig.weights))


def test_a_base_that_the_trainer_has_no_more_is_replaced_in_full(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    receiver.pause()
    for number in range(3, 60):  # more than the ring of deltas holds
        rig.publish(number)
    report = update(receiver, 59)
    assert (report.version.number, report.mode) == (59, "full")
    assert_bits(engine, engine.expected(rig.weights))


def test_what_is_staged_is_taken_as_it_is_while_the_trainer_means_it(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    for number, asked in ((3, 3), (4, "step-4")):
        rig.publish(number)
        following = receiver._following
        following.wait(WAIT)
        assert following.is_current(asked) and not following.is_current(number + 1, timeout=WAIT)
        staging = receiver.prepare(asked)
        staging.wait(WAIT)
        assert staging.prepared is following
        receiver.commit(staging)
        receiver.follow()
        assert_bits(engine, engine.expected(rig.weights))


def test_prepare_returns_at_once_and_writes_nothing(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    before = bits(engine)
    staging = receiver.prepare(2, timeout=WAIT)  # not yet published
    assert not staging.done
    with pytest.raises(errors.InvalidArgument, match="nothing is staged"):
        receiver.commit(staging)
    rig.publish(2)
    assert staging.wait(WAIT).number == 2
    assert_bits(engine, before)
    receiver.commit(staging)
    assert_bits(engine, engine.expected(rig.weights))


def test_a_deadline_leaves_the_version_before(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    before = bits(engine)
    staging = receiver.prepare(7, timeout=0.2)
    with pytest.raises(errors.DeadlinePassed, match="7"):
        staging.wait(WAIT)
    with pytest.raises(errors.DeadlinePassed):
        receiver.commit(staging)
    assert receiver.version.number == 1
    assert_bits(engine, before)
    rig.publish(2)
    assert update(receiver, 2).version.number == 2
    assert_bits(engine, engine.expected(rig.weights))


def test_labels_and_the_newest(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    assert update(receiver, "step-1").version.number == 1
    rig.publish(2)
    rig.publish(3)
    assert update(receiver, None).version.label == "step-3"
    assert update(receiver, None).mode == "up_to_date"
    assert update(receiver, "step-3").mode == "up_to_date"
    assert_bits(engine, engine.expected(rig.weights))


def test_rollback_brings_back_direct_and_reloaded_bits(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    before = bits(engine)
    rig.publish(3)
    staging = receiver.prepare(3)
    staging.wait(WAIT)
    receiver.commit(staging)
    assert receiver.version.number == 3
    receiver.rollback()
    assert receiver.version.number == 2
    assert_bits(engine, before)
    update(receiver, 3)
    assert_bits(engine, engine.expected(rig.weights))


def test_a_loader_that_fails_amid_an_update_changes_nothing(rig: Rig) -> None:
    engine, loader, receiver = rig.engine()
    rig.reach(receiver, 2)
    before = bits(engine)
    rig.publish(3)
    staging = receiver.prepare(3)
    staging.wait(WAIT)
    loader.fail = True
    with pytest.raises(RuntimeError, match="told to fail"):
        receiver.commit(staging)
    assert receiver.version.number == 2 and receiver.state == PLACED
    assert_bits(engine, before)
    update(receiver, 3)
    assert_bits(engine, engine.expected(rig.weights))


def test_a_first_load_that_fails_is_repeated(rig: Rig) -> None:
    engine, loader, receiver = rig.engine()
    loader.fail = True
    staging = receiver.prepare(1)
    staging.wait(WAIT)
    with pytest.raises(RuntimeError, match="told to fail"):
        receiver.commit(staging)
    assert receiver.version is None and receiver.state == LOADING
    assert update(receiver, 1).mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))


def test_a_refusal_comes_before_anything_is_pulled(rig: Rig) -> None:
    engine, loader, receiver = rig.engine()
    loader.refuse = "the weights sleep: wake them first"
    with pytest.raises(errors.Unsupported, match="wake them first"):
        receiver.prepare(1)
    loader.refuse = ""
    update(receiver, 1)
    rig.publish(2)
    staging = receiver.prepare(2)
    staging.wait(WAIT)
    before = bits(engine)
    loader.refuse = "the weights sleep: wake them first"
    with pytest.raises(errors.Unsupported):
        receiver.commit(staging)
    assert_bits(engine, before)


def test_bytes_that_others_wrote_are_found(rig: Rig) -> None:
    engine, _, receiver = rig.engine(permutes=False)
    rig.reach(receiver, 2)
    engine.norm.weight.data.view(torch.int16)[3] ^= 1
    rig.publish(3)
    # The delta does not lead from these bytes to the version's digest.
    assert update(receiver, 3).mode == "full"
    assert_bits(engine, engine.expected(rig.weights))


def test_what_an_attestation_finds_wrong_is_of_no_version(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    rig.publish(3)
    with monkeypatch.context() as patch:
        patch.setattr(receiver._receiver, "attest", lambda timeout: [(5, "norm.weight", "norm.weight")])
        with pytest.raises(errors.CorruptData, match=r"norm\.weight: tile 5 of version 3"):
            update(receiver, 3)
    assert receiver.version is None and receiver.state == LOADING and "norm.weight: tile 5" in receiver.doubt
    assert update(receiver, 3).mode == "loaded" and not receiver.doubt
    assert_bits(engine, engine.expected(rig.weights))


def test_a_commit_that_cannot_be_attested_is_rolled_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    before = bits(engine)
    rig.publish(3)

    def late(timeout: float) -> None:
        raise errors.DeadlinePassed("attest: not done")

    with monkeypatch.context() as patch:
        patch.setattr(receiver._receiver, "attest", late)
        with pytest.raises(errors.DeadlinePassed):
            update(receiver, 3)
    assert receiver.version.number == 2 and not receiver.doubt
    assert_bits(engine, before)
    update(receiver, 3)
    assert_bits(engine, engine.expected(rig.weights))


def test_a_void_that_finds_no_memory_writes_nothing_before_the_next_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)

    def full(*_: object, **__: object) -> None:
        raise errors.NoSpace("no host memory")

    with monkeypatch.context() as patch:
        patch.setattr(receiver._receiver, "rebind", full)
        receiver.void("level-2 sleep")
        receiver.follow()
        assert receiver._following is None  # it would be staged for the engine's memory
        with pytest.raises(errors.NoSpace):
            receiver.prepare(2)
    before = bits(engine)
    rig.publish(3)
    staging = receiver.prepare(3)
    staging.wait(WAIT)
    assert_bits(engine, before)
    assert receiver.commit(staging).mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))


def test_a_doubt_is_the_models(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    update(receiver, 1)
    receiver.void("a test has written it")
    receiver.close()
    again = EngineReceiver(engine, Loader(engine), rig.manager.endpoint, name="again", timeout=WAIT)
    rig.receivers.append(again)
    assert (again.version, again.doubt) == (None, "a test has written it")
    assert update(again, 1).mode == "loaded" and not again.doubt
    assert_bits(engine, engine.expected(rig.weights))
    assert not rig.engine()[2].doubt


def test_no_agent_is_an_error_with_its_address() -> None:
    engine = Engine()
    receiver = EngineReceiver(engine, Loader(engine), "127.0.0.1:9", name="rank0", timeout=0.3)
    with pytest.raises(errors.Error, match=r"127\.0\.0\.1:9"):
        receiver.prepare(1)
    receiver.close()


def test_what_two_models_share_is_written_by_one_of_them(rig: Rig) -> None:
    target, _, first = rig.engine()
    draft = Engine()
    draft.embed = target.embed
    second = EngineReceiver(draft, Loader(draft), rig.manager.endpoint, beside=target, name="draft", timeout=WAIT)
    rig.receivers.append(second)
    for number in (1, 2, 3):
        if number > 1:
            rig.publish(number)
        update(first, number)
        # Its base would be wrong if it wrote, or read, the target's embedding: then this would be a full update.
        report = update(second, number)
        assert report.mode == "delta" or number < 3
        assert_bits(target, target.expected(rig.weights))
        assert_bits(draft, draft.expected(rig.weights))
    assert "embed.weight" in first.trace.placed and "embed.weight" in second.trace.unplaced


def test_a_first_load_that_is_rolled_back_is_done_again(rig: Rig) -> None:
    engine, loader, receiver = rig.engine()
    for _ in range(2):
        staging = receiver.prepare(1)
        staging.wait(WAIT)
        receiver.commit(staging)
        receiver.rollback()
        assert receiver.version is None and receiver.state == LOADING
    assert update(receiver, 1).mode == "loaded"
    assert_bits(engine, engine.expected(rig.weights))
    assert len(loader.reloaded) == 3


def test_what_is_staged_and_not_committed_is_kept(rig: Rig) -> None:
    engine, _, receiver = rig.engine()
    rig.reach(receiver, 2)
    before = bits(engine)
    rig.publish(3)
    staging = receiver.prepare(3)
    staging.wait(WAIT)
    kept = staging.prepared
    receiver.follow()  # another rank could not stage it
    assert_bits(engine, before)
    again = receiver.prepare(3)
    again.wait(WAIT)
    assert again.prepared is kept
    receiver.commit(again)
    assert_bits(engine, engine.expected(rig.weights))
