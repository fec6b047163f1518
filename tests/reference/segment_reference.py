"""A reader and a writer of the shared segment, written from shm_protocol.md alone: the header, the words, one writer's
fill, and the deltas that are kept beside it. One writer and no other thread, so that a store stands for a
compare-and-swap."""

import mmap
import os
import struct

import numpy as np
from delta_reference import Reader, ceil, need, read_layout, tile_digest, xxh3_64, xxh3_128

STATES = {0x0F: "FREE", 0x33: "FILLING", 0x55: "SEALED", 0x69: "ACTIVE", 0x5A: "RETIRING", 0x3C: "QUARANTINED"}
FREE, FILLING, SEALED = 0x0F, 0x33, 0x55
IDLE, JOINED, COPYING, COMMITTED = 0x0F, 0x33, 0x55, 0x69
SEQUENCE = (1 << 56) - 1


def round_up(n, to):
    return ceil(n, to) * to


def batches(tiles):
    """(first tile, end tile) of each batch (delta_format.md "Which tiles share a frame")."""
    units, at = [], 0
    while at < len(tiles):
        end = at + 1
        while end < len(tiles) and tiles[end].tensor is tiles[at].tensor and tiles[end].band == tiles[at].band:
            end += 1
        size = sum(t.elements * t.width for t in tiles[at:end])
        whole = end - at == 1 or (tiles[at].rows > 1 and size <= 4194304 and end - at <= 4096)
        units += [(at, end)] if whole else [(t, t + 1) for t in range(at, end)]
        at = end
    out, size = [], 0
    for first, end in units:
        unit = sum(t.elements * t.width for t in tiles[first:end])
        if out and size + unit <= 4194304 and end - out[-1][0] <= 4096:
            out[-1] = (out[-1][0], end)
            size += unit
        else:
            out.append((first, end))
            size = unit
    return out


class Segment:
    def __init__(self, fd):
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        need(self.map[0x100:0x108] == b"YNCREADY", "ready word")
        need(self.map[:8] == b"DSYCSEG1", "magic")
        self.format, control_bytes = self.words("II", 8)
        need(self.format == 2 and control_bytes == 0x4600, "format")
        need(xxh3_64(self.map[:128]) == self.words("Q", 128)[0], "header hash")
        need(not any(self.map[136:256]), "reserved bytes")
        self.bytes, self.generation, self.half_bytes = self.words("QQQ", 16)
        self.half_offset = self.words("QQ", 40)
        layout_offset, layout_bytes, sidecar_offset, sidecar_bytes = self.words("QQQQ", 56)
        self.progress_offset, self.progress_words = self.words("QQ", 88)
        need(self.bytes == len(self.map), "segment bytes")
        need(layout_offset == 0x5000, "layout offset")
        need(sidecar_offset == layout_offset + round_up(layout_bytes, 64), "sidecar offset")
        need(self.progress_offset == round_up(sidecar_offset + sidecar_bytes, 4096), "progress offset")
        self.progress_table = round_up(8 * self.progress_words, 128)
        half = round_up(self.half_bytes, 2 << 20)
        need(self.half_offset[0] == round_up(self.progress_offset + 2 * self.progress_table, 2 << 20), "half 0")
        need(self.half_offset[1] == self.half_offset[0] + half, "half 1")
        need(self.bytes == self.half_offset[1] + half, "end")
        metadata = self.map[layout_offset : sidecar_offset + sidecar_bytes]
        need(xxh3_64(metadata) == self.words("Q", 120)[0], "metadata hash")
        self.layout = self.map[layout_offset : layout_offset + layout_bytes]
        self.sidecar = self.map[sidecar_offset : sidecar_offset + sidecar_bytes]
        need(self.map[104:120] == xxh3_128(self.layout), "layout digest")
        self.tiles, layout_half_bytes, _ = read_layout(self.layout)
        need(layout_half_bytes == self.half_bytes, "half bytes")
        self.batches = batches(self.tiles)
        need(len(self.batches) == self.progress_words, "progress words")

    def words(self, form, at):
        return struct.unpack_from("<" + form, self.map, at)

    def store(self, at, word):
        struct.pack_into("<Q", self.map, at, word)

    def state(self, half):
        """(name, sequence)"""
        (word,) = self.words("Q", 0x300 + 0x80 * half)
        return STATES[word >> 56], word & SEQUENCE

    def info(self, half):
        epoch, number, writers, label = self.words("QQQ128s", 0x400 + 0x100 * half)
        return epoch, number, writers, label[: label.index(0)].decode()

    def half(self, half):
        return self.map[self.half_offset[half] : self.half_offset[half] + self.half_bytes]

    def owner(self, slot):
        return self.words("QQ", 0x600 + 0x80 * slot)

    def progress(self, half):
        at = self.progress_offset + half * self.progress_table
        return self.words("%dQ" % self.progress_words, at)

    def close(self):
        self.map.close()

    # ---- the only writer, slot 0 of 1 -------------------------------------------------------------------------------

    def set_phase(self, code, sequence):
        self.store(0x2600, code << 56 | sequence)

    def set_state(self, half, code, sequence):
        self.store(0x300 + 0x80 * half, code << 56 | sequence)

    def free_half(self):
        return next((h for h in (0, 1) if self.state(h)[0] == "FREE"), None)

    def offload(self, version, label, data):
        """Claims a FREE half, fills and seals it."""
        half = self.free_half()
        sequence = max(self.state(h)[1] for h in (0, 1)) + 1
        info = struct.pack("<QQQ128s", *version, 1, label.encode())
        self.map[0x400 + 0x100 * half : 0x400 + 0x100 * half + len(info)] = info
        self.set_phase(JOINED, sequence)
        self.set_state(half, FILLING, sequence)
        self.set_phase(COPYING, sequence)
        need(self.state(half) == ("FILLING", sequence), "the fill was aborted")
        self.map[self.half_offset[half] : self.half_offset[half] + len(data)] = data
        for i, (first, end) in enumerate(self.batches):
            elements = sum(t.elements for t in self.tiles[first:end])
            word = (sequence % (1 << 40)) << 24 | elements
            self.store(self.progress_offset + half * self.progress_table + 8 * i, word)
        self.set_phase(JOINED, sequence)
        self.set_phase(COMMITTED, sequence)
        self.set_state(half, SEALED, sequence)
        self.set_phase(IDLE, 0)
        return half


def read_kept_delta(data, layout_tiles):
    """(label from, label to, {tile: digest before}, container)"""
    need(len(data) >= 48, "truncated header")
    magic, version, flags, list_bytes, list_hash, reserved, header_hash = struct.unpack("<8sIIQQQQ", data[:48])
    need(magic == b"DSKEPTD1" and header_hash == xxh3_64(data[:40]), "header")
    need((version, flags, reserved) == (1, 0, 0), "version or reserved fields")
    need(list_bytes <= len(data) - 48 and list_hash == xxh3_64(data[48 : 48 + list_bytes]), "list")
    r = Reader(data[48 : 48 + list_bytes])
    labels = [r.take(r.unpack("I")[0]).decode() for _ in range(2)]
    (count,) = r.unpack("Q")
    before = [r.unpack("QQ") for _ in range(count)]
    need(r.done() and before == sorted(before) and all(tile < len(layout_tiles) for tile, _ in before), "list")
    return labels[0], labels[1], dict(before), data[48 + list_bytes :]


def half_digests(tiles, half):
    array = np.frombuffer(half, np.uint8)
    return [tile_digest(t.read(array)) for t in tiles]
