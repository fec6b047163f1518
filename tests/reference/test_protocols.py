"""The pages against a real agent: a trainer and receivers that were written from them alone."""

import os
import pathlib
import struct
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]

from delta_reference import (  # noqa: E402  first: it skips where something is missing
    apply_container, apply_record, read_frame, read_layout, read_sidecar, root, xxh3_128,
)

import numpy as np  # noqa: E402
import segment_reference as segment  # noqa: E402
import wire_reference as wire  # noqa: E402
from cli_support import BIN, DEADLINE_S, Agent, Child, CliTest  # noqa: E402

TOKEN = b"a token of more than sixteen bytes"
EPOCH = 1 << 32 | 7
DTYPES = {"F32": 2, "BF16": 4, "I64": 7}
DEADLINE_MS = int(DEADLINE_S * 1000)

# Tiles of one band and of several, panels, a cut, an empty tensor, rows that are no whole words.
TENSORS = [
    ("embed", "BF16", [700, 512], [], [256]),
    ("wide", "BF16", [3, 70_000], [], []),
    ("odd", "F32", [33, 5], [], []),
    ("none", "F32", [0, 5], [], []),
    ("counter", "I64", [], [], []),
    ("model.language_model.layers.10.input_layernorm.weight", "BF16", [4096], [], []),
]


def encode_layout():
    out = b"DSLAYOUT" + struct.pack("<IQ", 1, len(TENSORS))
    for name, dtype, shape, row_cuts, col_cuts in TENSORS:
        out += wire.string(name) + struct.pack("<BB", DTYPES[dtype], len(shape)) + struct.pack("<%dQ" % len(shape), *shape)
        for cuts in (row_cuts, col_cuts):
            out += struct.pack("<I%dQ" % len(cuts), len(cuts), *cuts)
    return out


def random_half(tiles, half_bytes, seed):
    """Values like weights in all tiles, zeros between the tensors."""
    half = np.zeros(half_bytes, np.uint8)
    generator = np.random.default_rng(seed)
    for tile in tiles:
        words = (0x3C00 + generator.integers(0, 512, tile.elements)).astype("<u2")
        row = np.zeros((tile.elements, tile.width), np.uint8)
        row[:, -2:] = words.view(np.uint8).reshape(-1, 2)
        tile.write(half, row.reshape(tile.rows, -1))
    return half


def next_half(tiles, half, seed):
    """A few elements one step on."""
    half = half.copy()
    generator = np.random.default_rng(seed)
    for tile in tiles:
        rows = tile.read(half).reshape(-1)
        elements = rows.view("<u%d" % tile.width)
        elements[generator.random(len(elements)) < 0.03] += 1
        tile.write(half, rows.reshape(tile.rows, -1))
    return half


class ProtocolTest(CliTest):
    def setUp(self):
        super().setUp()
        token = self.tmp / "token"
        token.write_bytes(TOKEN)
        token.chmod(0o600)
        self.agent = Agent(self, BIN / "deltasync-agent", self.tmp / "agent", "--token-file", token)
        self.layout = encode_layout()
        self.tiles, self.half_bytes, self.digest = read_layout(self.layout)
        self.halves = [random_half(self.tiles, self.half_bytes, 1)]
        for number in range(2, 4):
            self.halves.append(next_half(self.tiles, self.halves[-1], number))

    def receiver(self, role, **options):
        stream = wire.Receiver(self.agent.endpoint, options.pop("token", TOKEN), role, DEADLINE_S, **options)
        self.addCleanup(stream.close)
        return stream

    def trainer(self):
        trainer = wire.Trainer(self.agent.socket, self.layout, b"", DEADLINE_S)
        self.addCleanup(trainer.close)
        mapped = segment.Segment(trainer.files[0])
        self.addCleanup(mapped.close)
        self.assertEqual(mapped.layout, self.layout)
        self.assertEqual(mapped.generation, trainer.generation)
        self.assertEqual(mapped.owner(0)[0], os.getpid())
        return trainer, mapped

    def offload(self, trainer, mapped, number):
        """What version `number` is served as."""
        end = time.monotonic() + DEADLINE_S
        while mapped.free_half() is None:
            self.assertLess(time.monotonic(), end, [mapped.state(h) for h in (0, 1)])
            time.sleep(0.005)
        half = mapped.offload((EPOCH, number), f"step {number}", self.halves[number - 1].tobytes())
        trainer.notify()
        ready = trainer.wait((EPOCH, number), DEADLINE_MS)
        self.assertEqual(ready[0], (EPOCH, number))
        self.assertEqual(mapped.state(half)[0], "ACTIVE")
        self.assertEqual(mapped.info(half), (EPOCH, number, 1, f"step {number}"))
        return ready

    def refused(self, code, call, *args, **options):
        with self.assertRaises(wire.AgentError) as caught:
            call(*args, **options)
        self.assertEqual(caught.exception.code, code, str(caught.exception))
        return caught.exception

    def apply(self, frames, half, digests):
        half, digests = half.copy(), list(digests)
        codecs = set()
        for frame in frames:
            records, _, size = read_frame(frame, self.tiles)
            self.assertEqual(size, len(frame))
            for record in records:
                codecs.add(record["codec"])
                apply_record(half, digests, self.tiles, record)
        return half, digests, codecs

    def raw_tiles(self, data, plan, form):
        """The codecs of version 1's tiles, which arrive bit for bit."""
        frames = data.raw_tiles(plan["plan"], form, self.everything())
        half, _, codecs = self.apply(frames, np.zeros(self.half_bytes, np.uint8), [0] * len(self.tiles))
        self.assertTrue((half == self.halves[0]).all())
        self.assertLessEqual(codecs, {1, 6})
        return codecs

    def everything(self):
        return [(0, len(self.tiles))]


class Full(ProtocolTest):
    def test_a_version_arrives_bit_for_bit(self):
        trainer, mapped = self.trainer()
        self.offload(trainer, mapped, 1)
        control, data = self.receiver(wire.CONTROL), self.receiver(wire.DATA)
        self.assertEqual((control.has_layout, control.layout_digest), (1, self.digest))
        self.assertEqual((control.instance, control.clock), (data.instance, data.clock))
        self.assertEqual(trainer.instance, control.instance)
        layout, sidecar = data.get_layout()
        self.assertEqual((layout, sidecar), (self.layout, b""))

        plan = control.plan(self.digest)
        self.assertEqual((plan["mode"], plan["target"], plan["label"]), (wire.FULL, (EPOCH, 1), "step 1"))
        self.assertEqual(plan["full_bytes"], self.half_bytes)
        digests = data.digests(plan["plan"])
        self.assertEqual(plan["root"], root(digests))
        self.assertEqual(digests, segment.half_digests(self.tiles, self.halves[0]))
        pulled = data.extent(plan["plan"], 0, len(self.tiles))
        self.assertEqual(pulled + bytes(self.half_bytes - len(pulled)), self.halves[0].tobytes())
        band = [t for t in self.tiles if t.band == 256 and t.tensor is self.tiles[0].tensor]
        first = self.tiles.index(band[0])
        at, size = band[0].offset, band[0].rows * band[0].stride
        self.assertEqual(data.extent(plan["plan"], first, first + len(band)), self.halves[0].tobytes()[at : at + size])
        self.assertEqual(self.raw_tiles(data, plan, form=0), {1})
        # A frame whose packing took too long comes raw.
        end = time.monotonic() + DEADLINE_S
        while plan["pack_threads"] != 0 and 6 not in (codecs := self.raw_tiles(data, plan, form=1)):
            self.assertLess(time.monotonic(), end, codecs)
        self.assertEqual(control.check_tiles(plan["plan"], self.everything()), b"\0")
        control.release(plan["plan"])
        control.release(plan["plan"])  # an end as well

    def test_a_subset_has_roots_and_sizes_of_its_own(self):
        trainer, mapped = self.trainer()
        self.offload(trainer, mapped, 1)
        control = self.receiver(wire.CONTROL)
        pairs = [(0, 2), (5, 6)]
        kept = [0, 1, 5]
        name = control.subscribe(self.digest, pairs)
        plan = control.plan(self.digest, subscription=name)
        whole = segment.half_digests(self.tiles, self.halves[0])
        self.assertEqual(control.digests(plan["plan"]), [whole[t] for t in kept])
        base = root([whole[t] for t in kept])
        self.assertEqual(plan["root"], base)
        self.assertEqual(plan["full_bytes"], sum(self.tiles[t].elements * self.tiles[t].width for t in kept))
        control.release(plan["plan"])
        self.offload(trainer, mapped, 2)
        step = control.plan(self.digest, (EPOCH, 1), base, subscription=name)
        self.assertEqual(step["mode"], wire.DELTA)
        frames = control.frames(step["plan"], 0, self.everything())
        self.assertEqual(step["steps"][0]["bytes"], sum(map(len, frames)))
        self.assertEqual(step["steps"][0]["frames"], len(frames))
        _, digests, _ = self.apply(frames, self.halves[0], whole)
        self.assertEqual(step["root"], root([digests[t] for t in kept]))
        self.assertEqual([d for t, d in enumerate(digests) if t not in kept], [d for t, d in enumerate(whole) if t not in kept])


    def test_a_directory_can_be_written_again(self):
        model = self.model("step_0")
        publisher = Child(self, [BIN / "deltasync", "publish", "--agent", self.agent.socket, "--json", "--model", model])
        self.assertEqual(publisher.line()["event"], "published")
        control = self.receiver(wire.CONTROL)
        layout, sidecar = control.get_layout()
        tensors = list(dict.fromkeys(tile.tensor for tile in read_layout(layout)[0]))
        plan = control.plan(control.layout_digest)
        half = control.extent(plan["plan"], 0, len(read_layout(layout)[0]))
        weights, others = read_sidecar(sidecar, len(tensors))
        for name, header, indices in weights:
            pieces = [half[t.offset : t.offset + t.rows * t.cols * t.width] for t in (tensors[i] for i in indices)]
            self.assertEqual(bytes(header) + b"".join(pieces), (model / name).read_bytes())
        self.assertEqual({name: bytes(contents) for name, contents in others},
                         {"config.json": (model / "config.json").read_bytes()})
        self.assertEqual([name for name, _, _ in weights], ["model.safetensors"])


class Delta(ProtocolTest):
    def test_steps_lead_from_base_to_target(self):
        trainer, mapped = self.trainer()
        self.offload(trainer, mapped, 1)
        control = self.receiver(wire.CONTROL)
        base = segment.half_digests(self.tiles, self.halves[0])
        self.assertEqual(control.plan(self.digest, (EPOCH, 1), root(base))["mode"], wire.UP_TO_DATE)
        self.refused(wire.TIMED_OUT, control.plan, self.digest, (EPOCH, 1), root(base), want=wire.NEWER, wait_ms=1)
        _, delta_bytes, changed, _ = self.offload(trainer, mapped, 2)
        self.offload(trainer, mapped, 3)

        self.assertEqual(control.lag((EPOCH, 1))[:3], ((EPOCH, 3), "step 3", 2))
        past = control.plan(self.digest, (EPOCH, 1), root(base), want=wire.LABEL, label="step 2")
        self.assertEqual((past["mode"], past["target"], past["steps"][0]["changed"]), (wire.DELTA, (EPOCH, 2), changed))
        self.assertEqual(past["steps"][0]["bytes"], delta_bytes)
        for compact, wait_ms in ((0, 0), (0, DEADLINE_MS), (1, DEADLINE_MS)):  # as they are, merged, in exponent classes
            plan = control.plan(self.digest, (EPOCH, 1), root(base), want=wire.NUMBER, number=3, compact=compact,
                                wait_ms=wait_ms)
            self.assertEqual(plan["mode"], wire.DELTA)
            half, digests, used = self.halves[0], base, set()
            for i, step in enumerate(plan["steps"]):
                frames = control.frames(plan["plan"], i, self.everything())
                self.assertEqual((step["frames"], step["bytes"]), (len(frames), sum(map(len, frames))))
                half, digests, codecs = self.apply(frames, half, digests)
                self.assertEqual(step["root"], root(digests))
                used |= codecs
            self.assertEqual((plan["root"], root(digests)), (root(digests), plan["steps"][-1]["root"]))
            self.assertTrue((half == self.halves[2]).all())
            self.assertEqual(4 in used, compact == 1)
            control.release(plan["plan"])
        self.refused(wire.GONE, control.plan, self.digest, want=wire.NUMBER, number=2)
        self.refused(wire.INVALID_ARGUMENT, control.digests, past["plan"])

    def test_what_is_kept_beside_the_segment(self):
        trainer, mapped = self.trainer()
        for number in (1, 2):
            self.offload(trainer, mapped, number)
        kept = pathlib.Path(trainer.directory) / (trainer.segment_name + ".d1")
        end = time.monotonic() + DEADLINE_S
        while True:  # it is there before it is whole
            try:
                old, new, before, container = segment.read_kept_delta(kept.read_bytes(), self.tiles)
                half = apply_container(container, self.layout, self.halves[0].tobytes())
                break
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        self.assertEqual((old, new), ("step 1", "step 2"))
        self.assertEqual(half, self.halves[1].tobytes())
        first = segment.half_digests(self.tiles, self.halves[0])
        second = segment.half_digests(self.tiles, self.halves[1])
        self.assertEqual(before, {t: d for t, d in enumerate(first) if d != second[t]})


class Refusals(ProtocolTest):
    def test_requests_that_cannot_be_met(self):
        trainer, mapped = self.trainer()
        self.offload(trainer, mapped, 1)
        control = self.receiver(wire.CONTROL)
        plan = control.plan(self.digest)["plan"]
        self.refused(wire.LEASE_REVOKED, control.digests, plan ^ 1)
        self.refused(wire.INVALID_ARGUMENT, control.extent, plan, 1, len(self.tiles))
        self.refused(wire.OUT_OF_RANGE, control.extent, plan, 0, len(self.tiles) + 1)
        self.refused(wire.OUT_OF_RANGE, control.raw_tiles, plan, 0, [(0, len(self.tiles) + 1)])
        self.refused(wire.OUT_OF_RANGE, control.frames, plan, 0, self.everything())
        self.refused(wire.LAYOUT_MISMATCH, control.plan, bytes(16))
        self.refused(wire.INVALID_ARGUMENT, control.plan, self.digest, want=wire.LABEL)
        self.refused(wire.INVALID_ARGUMENT, control.plan, self.digest, subscription=xxh3_128(b""))
        self.refused(wire.INVALID_ARGUMENT, control.subscribe, self.digest, self.everything())
        self.refused(wire.INVALID_ARGUMENT, control.subscribe, self.digest, [])
        self.assertEqual(control.plan(self.digest)["mode"], wire.FULL)  # all of them leave the connection usable

    def test_what_ends_a_connection(self):
        wrong = self.refused(wire.UNAUTHENTICATED, self.receiver, wire.CONTROL, token=TOKEN + b"?")
        self.assertEqual(wrong.request, 0)
        data = self.receiver(wire.DATA)
        error = self.refused(wire.PROTOCOL, data.plan, bytes(16))
        self.assertEqual(error.request, 0)
        self.assertRaises(EOFError, data.take, 1)

    def test_two_trainers_and_a_version_that_is_past(self):
        trainer, mapped = self.trainer()
        self.refused(wire.ALREADY_EXISTS, wire.Trainer, self.agent.socket, self.layout, b"", DEADLINE_S)
        whole = [(i, 0, 0, *rectangle) for i, rectangle in enumerate([(700, 512), (3, 70_000), (33, 5), (0, 0), (1, 1)])]
        whole.append((5, 0, 0, 1, 4096))
        trainer.plan([r for r in whole if r[3]], DEADLINE_MS)
        self.offload(trainer, mapped, 1)
        self.refused(wire.TIMED_OUT, trainer.wait, (EPOCH, 9), 1)
        self.refused(wire.VERSION_CONFLICT, trainer.wait, (EPOCH - 1, 1), DEADLINE_MS)
        trainer.end()
        again, _ = self.trainer()
        self.assertEqual((again.newest, again.epoch), ((EPOCH, 1), EPOCH))


if __name__ == "__main__":
    np.seterr(over="ignore")
    unittest.main(verbosity=2)
