"""Tensors put together of what ranks have: of a trainer that is cut as Megatron's are (fake_trainer.py), over gloo."""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from deltasync import _carriers, _gather_plan, _gathering, _programs, megatron  # noqa: E402
from deltasync._gather_plan import Share, Whole, for_homes  # noqa: E402
from fake_trainer import Fake, same_bits  # noqa: E402
from gathered_support import LONG_S, plan_of  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 40_000, 1 << 30])
def test_each_rank_gets_each_tensor(fake: Fake, tmp_path: Path, size: int, bucket: int) -> None:
    expected = fake.expected()

    def export(rank: int) -> tuple[list[str], list[str], list[str]]:
        plan, _ = plan_of(fake, rank, size)
        got = megatron.export_hf_named_params(plan, bucket_bytes=bucket, timeout=LONG_S)
        wrong, names = [], []
        for name, tensor in got:
            names.append(name)
            if not same_bits(tensor, expected[name]):
                wrong.append(name)
        return names, wrong, plan.layout.names()

    for names, wrong, wanted in run_ranks(size, export, tmp_path):
        assert names == wanted
        assert sorted(names) == sorted(expected)
        assert not wrong


def resident_bytes(which: str) -> int:
    """Of this process: VmRSS, or VmHWM, the most that it was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which + ":"))


@pytest.mark.parametrize("bucket", [4 << 20, 12 << 20])
def test_two_buckets_are_alive_at_most(tmp_path: Path, bucket: int) -> None:
    fake = Fake(tmp_path, layers=20, width=512, apart=0)

    def export(rank: int) -> tuple[int, int, int]:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
        plan, _ = plan_of(fake, rank, 2)
        for _ in megatron.export_hf_named_params(plan, bucket_bytes=bucket, timeout=LONG_S):
            pass  # warm
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again from what there is
        before = resident_bytes("VmRSS")
        got = megatron.export_hf_named_params(plan, bucket_bytes=bucket, timeout=LONG_S)
        count = sum(1 for _ in got)
        return got.temporary_bytes_max, resident_bytes("VmHWM") - before, count

    total = sum(tensor.nbytes for tensor in fake.expected().values())
    assert total > 12 * (4 << 20)
    for counted, real, count in run_ranks(2, export, tmp_path):
        assert count == len(fake.expected())
        assert bucket / 2 < counted <= 2 * bucket
        assert real <= counted + (3 << 20)


def test_a_tensor_of_more_than_a_bucket_travels_alone(fake: Fake, tmp_path: Path) -> None:
    large = fake.expected()["model.0.apart"].nbytes
    plan, _ = plan_of(fake, 0, 1)
    wholes = _gather_plan.wholes_of(plan.layout, plan._made.copies, plan._made.constants, {})
    buckets = _gather_plan.for_all(wholes, large // 8)
    alone = [bucket.wholes for bucket in buckets if bucket.cost > large // 8]
    assert [[whole.nbytes for whole in bucket] for bucket in alone] == [[large]]
    assert max(len(bucket.wholes) for bucket in buckets) > 3
    assert [whole.index for bucket in buckets for whole in bucket.wholes] == [whole.index for whole in wholes]

    def export(rank: int) -> int:
        plan, _ = plan_of(fake, rank, 2)
        got = megatron.export_hf_named_params(plan, bucket_bytes=large // 8, timeout=LONG_S)
        assert sum(1 for _ in got) == len(fake.expected())
        return got.temporary_bytes_max

    for counted in run_ranks(2, export, tmp_path):
        assert 2 * large <= counted <= 2 * large + large // 4


def test_tensors_that_no_step_changes_are_named(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    plan_of(fake, 0, 1)
    assert "1 tensor(s), which stay as" in caplog.text and "model.inv_freq" in caplog.text


@pytest.mark.parametrize("size", [1, 2])
def test_a_proof_says_which_tensors_prove_nothing(fake: Fake, tmp_path: Path, size: int) -> None:
    fake.whole["norm.1"].fill_(0.5)
    fake.whole["rows.2"].zero_()
    half = fake.whole["rows.3"]
    half.zero_()[half.shape[0] // 2 :] = 1  # in each of two ranks all alike
    save_file(fake.expected(), fake.directory / "model.safetensors")

    def prove(rank: int) -> Any:
        proof = megatron.prove(plan_of(fake, rank, size)[0], fake.directory)
        return bool(proof), sorted(proof.unproved), str(proof)

    for identical, unproved, said in run_ranks(size, prove, tmp_path):
        assert identical and unproved == ["model.1.norm", "model.2.rows"]
        assert "2 tensors prove nothing" in said and "model.2.rows" in said


def watched(fake: Fake, room: int, bucket: int) -> list[tuple[str, int]]:
    """What a gathering of one process does: begins a bucket, gives a tensor; with the bytes that it reserves then."""
    plan, _ = plan_of(fake, 0, 1)
    wholes = _gather_plan.wholes_of(plan.layout, plan._made.copies, (), {})
    seen: list[tuple[str, int]] = []

    class Watched(_gathering.Gathering):
        def _begin(self, bucket: Any) -> None:
            super()._begin(bucket)
            seen.append((f"begin {bucket.wholes[0].index}", self._reserved))

    class Alone(_carriers.ToAll):
        def send(self) -> list[Any]:
            return []

    def carrier(bucket: Any) -> Any:
        return Alone(plan._group, bucket.wholes, "cpu")

    def elements() -> Any:
        return _carriers.Elements(plan._pieces.views(), plan._constant)

    buckets = _gather_plan.for_all(wholes, bucket)
    gathering = Watched(plan._group, buckets, carrier, elements, room, lambda: LONG_S)
    for index, _ in gathering.tensors():
        seen.append((f"take {index}", gathering._reserved))
    assert gathering._temporary <= room
    return seen


def test_buckets_begin_in_order_as_soon_as_there_is_room(fake: Fake) -> None:
    large = fake.expected()["model.0.apart"].nbytes
    seen = watched(fake, 2 * 50_000, 50_000)
    begun = [int(what.split()[1]) for what, _ in seen if what.startswith("begin")]
    assert begun == sorted(begun)
    assert all(reserved <= 100_000 or reserved >= large for _, reserved in seen)
    # A bucket begins while tensors of the one before are still to be taken.
    order = [what for what, _ in seen]
    first = {f"begin {index}": f"take {index}" for index in begun}
    ahead = [what for what, following in itertools.pairwise(order) if what in first and following != first[what]]
    assert len(begun) > 4
    assert len(ahead) >= len(begun) - 3  # but for the first, the large one, and the one after it
    # The one that is larger than all room begins too, when nothing else is alive.
    at = next(number for number, (what, reserved) in enumerate(seen) if what.startswith("begin") and reserved > 100_000)
    assert seen[at][1] <= large + 50_000
    assert order[at + 1] == order[at].replace("begin", "take")


def test_a_form_is_made_of_the_whole_tensor(fake: Fake, tmp_path: Path) -> None:
    expected = fake.expected()
    form_of, scale = "model.1.rows", "model.1.norm"

    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        index, other = (plan.layout.find(name) for name in (form_of, scale))
        plan._forms[index] = _gather_plan.Form("F32", (index, other), lambda whole: [whole.t(), whole[0]])
        made = dict(megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S))
        return same_bits(made[form_of], expected[form_of].t()), same_bits(made[scale], expected[form_of][0]), len(made)

    assert run_ranks(2, export, tmp_path) == [(True, True, len(expected))] * 2


def test_ranks_that_share_nothing_gather_side_by_side() -> None:
    def tensors(first: int, *ranks: int) -> list[Whole]:
        shares = tuple(Share(rank, (), 512) for rank in ranks)
        return [Whole(first + number, (256,), "F32", 1024, shares, None, 0) for number in range(8)]

    dense, experts = tensors(0, 0, 1), tensors(8, 2, 3)
    alone, both = (for_homes(some, 4096, 0) for some in (dense, dense + experts))
    assert len(alone) == len(both) > 1  # no step more for what other ranks have
    for bucket in both:
        assert {share.rank for whole in bucket.wholes for share in whole.shares} == {0, 1, 2, 3}


def test_the_program_makes_the_same_plan_of_what_a_rank_says_it_holds(fake: Fake, tmp_path: Path) -> None:
    made, _ = plan_of(fake, 0, 1)
    shards, written = tmp_path / "rank0.json", tmp_path / "plan.json"
    shards.write_text(made.shards_json())
    subprocess.run(
        [_programs.find("deltasync"), "export-plan", "--hf", fake.directory, "--family", fake.page]
        + ["--shards", shards, "--json", written],
        check=True,
    )
    assert json.loads(written.read_text()) == json.loads(made.to_json())
