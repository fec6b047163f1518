#!/usr/bin/env python3
"""A slow decoder of deltas, written from docs/delta_format.md and docs/layout_format.md alone.

  delta_reference.py LAYOUT BEFORE DELTA AFTER        decode one delta; write the half after it
  delta_reference.py --check MAKE_CASES_TOOL DIR      run the tool, decode all of its cases, compare byte for byte,
                                                      and expect damaged copies to be refused

Exit code 77: numpy or the xxHash library is missing.
"""

import ctypes
import ctypes.util
import os
import random
import shutil
import struct
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    print("SKIPPED: numpy is missing")
    sys.exit(77)


class Refused(Exception):
    """The input breaks a rule of the format."""


def need(condition, what):
    if not condition:
        raise Refused(what)


# ---- xxHash: the library's C functions; its algorithm is not ours to specify ------------------------------------------


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def load_xxhash():
    for name in (ctypes.util.find_library("xxhash"), "libxxhash.so.0", "libxxhash.so"):
        try:
            library = ctypes.CDLL(name) if name else None
        except OSError:
            library = None
        if library is not None:
            library.XXH3_64bits.restype = ctypes.c_uint64
            library.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
            library.XXH3_128bits.restype = _Hash128
            library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
            return library
    print("SKIPPED: the xxHash library (libxxhash.so) is missing")
    sys.exit(77)


XXHASH = load_xxhash()


def xxh3_64(data):
    return XXHASH.XXH3_64bits(bytes(data), len(data))


def xxh3_128(data):
    h = XXHASH.XXH3_128bits(bytes(data), len(data))
    return struct.pack(">QQ", h.high, h.low)


# ---- reading ----------------------------------------------------------------------------------------------------------


class Reader:
    def __init__(self, data):
        self.data = data
        self.at = 0

    def take(self, count):
        need(count <= len(self.data) - self.at, "truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def varint(self):
        value = 0
        for group in range(10):
            (byte,) = self.unpack("B")
            value |= (byte & 127) << (7 * group)
            if byte < 128:
                need(group == 0 or byte != 0, "a varint that is not the shortest")
                need(value < 1 << 64, "a varint above 64 bits")
                return value
        raise Refused("a varint of more than 10 bytes")

    def done(self):
        return self.at == len(self.data)


# ---- layout and tiling --------------------------------------------------------------------------------------------------

DTYPE_BYTES = {1: 8, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 8, 8: 4, 9: 2, 10: 1, 11: 1, 12: 1, 13: 2, 14: 4, 15: 8}
FLOATS = {1, 2, 3, 4, 5, 6}
TILE_ELEMENTS = 65536


def ceil(a, b):
    return -(-a // b)


def segments(length, cuts):
    edges = [0] + cuts + [length]
    return [(a, b - a) for a, b in zip(edges, edges[1:])]


class Tensor:
    def __init__(self, name, dtype, shape, row_cuts, col_cuts):
        self.name, self.width, self.is_float = name, DTYPE_BYTES[dtype], dtype in FLOATS
        self.rows, self.cols = 1, 1
        if shape:
            self.cols = shape[-1]
            for d in shape[:-1]:
                self.rows *= d
        if self.rows * self.cols == 0:
            self.rows = self.cols = 0
        self.row_cuts, self.col_cuts = row_cuts, col_cuts
        self.offset = 0

    def tiles(self):
        """(row, col, rows, cols) of each tile, in order."""
        if self.rows == 0:
            return
        panels = []
        for start, w in segments(self.cols, self.col_cuts):
            n = ceil(w, TILE_ELEMENTS)
            p = ceil(ceil(w, n), 8) * 8
            panels += [(start + at, min(p, w - at)) for at in range(0, w, p)]
        band = max(1, TILE_ELEMENTS // max(w for _, w in panels))
        for start, h in segments(self.rows, self.row_cuts):
            for at in range(0, h, band):
                for col, w in panels:
                    yield start + at, col, min(band, h - at), w


class Tile:
    def __init__(self, tensor, row, col, rows, cols):
        self.tensor, self.rows, self.cols = tensor, rows, cols
        self.elements = rows * cols
        self.width = tensor.width
        self.stride = tensor.cols * tensor.width
        self.offset = tensor.offset + row * self.stride + col * tensor.width

    def read(self, half):
        """The rows, packed, as a (rows, row bytes) array."""
        n = self.cols * self.width
        return np.stack([half[self.offset + r * self.stride :][:n] for r in range(self.rows)])

    def write(self, half, rows):
        n = self.cols * self.width
        for r in range(self.rows):
            half[self.offset + r * self.stride :][:n] = rows[r]


def read_layout(data):
    r = Reader(data)
    need(r.take(8) == b"DSLAYOUT", "layout: magic")
    version, count = r.unpack("IQ")
    need(version == 1, "layout: version")
    tensors, at = [], 0
    for _ in range(count):
        name = r.take(r.unpack("I")[0]).decode()
        dtype, ndim = r.unpack("BB")
        shape = list(r.unpack("%dQ" % ndim))
        row_cuts = list(r.unpack("%dQ" % r.unpack("I")[0]))
        col_cuts = list(r.unpack("%dQ" % r.unpack("I")[0]))
        tensor = Tensor(name, dtype, shape, row_cuts, col_cuts)
        tensor.offset = at
        at = ceil(at + tensor.rows * tensor.cols * tensor.width, 64) * 64
        tensors.append(tensor)
    need(r.done(), "layout: bytes behind its end")
    tiles = [Tile(t, *rect) for t in tensors for rect in t.tiles()]
    return tiles, at, xxh3_128(data)


# ---- digests ------------------------------------------------------------------------------------------------------------

U64 = np.uint64


def mix(x):
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def tile_digest(rows):
    words_per_row = ceil(rows.shape[1], 8)
    padded = np.zeros((rows.shape[0], words_per_row * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    words = padded.reshape(-1).view("<u8").astype(U64)
    index = np.arange(len(words), dtype=U64)
    return int(mix(words + (index + U64(1)) * U64(0x9E3779B97F4A7C15)).sum(dtype=U64))


def root(digests):
    return xxh3_128(struct.pack("<%dQ" % len(digests), *digests))


# ---- payloads -----------------------------------------------------------------------------------------------------------


class Planes:
    """Cuts a payload into planes of bits."""

    def __init__(self, payload):
        self.bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
        self.at = 0

    def next(self, count):
        size = ceil(count, 8) * 8
        need(size <= len(self.bits) - self.at, "a plane behind the payload's end")
        plane = self.bits[self.at : self.at + size]
        need(not plane[count:].any(), "bits behind a plane's end")
        self.at += size
        return plane[:count]

    def unary(self, count, zeros):
        """The numbers of zeros before each of `count` ones."""
        plane = self.next(count + zeros)
        ones = np.flatnonzero(plane)
        need(len(ones) == count and ones[-1] == count + zeros - 1, "a unary plane that does not end with its data")
        return np.diff(ones, prepend=-1) - 1


def number(bits):
    return sum(int(b) << i for i, b in enumerate(bits))


def decode_rice(tile, old, record):
    n, k, w = record["n"], record["k"], tile.width * 8
    planes = Planes(record["payload"])
    low = planes.next(n * k).reshape(n, k)
    quotients = planes.unary(n, record["Q"])
    gaps = [int(q) << k | number(bits) for q, bits in zip(quotients, low)]
    positions = np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1
    need(positions[-1] < tile.elements, "a position outside of the tile")

    elements = old.reshape(-1).view("<u%d" % tile.width).copy()
    if record["codec"] == 2:
        values = np.packbits(planes.next(n * w), bitorder="little").view("<u%d" % tile.width)
        elements[positions] = values
    else:
        signs = planes.next(n)
        lengths = planes.unary(n, record["E"])
        low = planes.next(record["E"])
        at = 0
        for position, negative, length in zip(positions, signs, lengths):
            need(length < w, "a magnitude of too many bits")
            m = 1 << int(length) | number(low[at : at + length])
            at += length
            need(length < w - 1 or (negative and m == 1 << (w - 1)), "a magnitude above half of the range")
            x = int(elements[position])
            new = ulp(ulp(x, w, tile.tensor.is_float) + (-m if negative else m), w, tile.tensor.is_float)
            elements[position] = new
    need(planes.at == len(planes.bits), "bytes behind the last plane")
    return elements.view(np.uint8).reshape(old.shape)


def ulp(x, w, is_float):
    x %= 1 << w
    return x ^ ((1 << (w - 1)) - 1) if is_float and x >> (w - 1) else x


# ---- frames and container -----------------------------------------------------------------------------------------------


def read_records(tiles, first_tile, count, table, payloads):
    table, payloads = Reader(table), Reader(payloads)
    previous = first_tile - 1
    for i in range(count):
        gap = table.varint()
        need(i > 0 or gap == 0, "the first record is not the first tile")
        index = previous = previous + 1 + gap
        need(index < len(tiles), "a tile outside of the layout")
        tile = tiles[index]
        w, raw_bytes = tile.width * 8, tile.elements * tile.width
        (byte,) = table.unpack("B")
        r = {"tile": index, "codec": byte & 15, "k": byte >> 4}
        r["n"] = table.varint()
        size = table.varint()
        need(r["codec"] in (1, 2, 3), "an unknown codec")
        r["Q"] = table.varint() if r["codec"] != 1 else 0
        r["E"] = table.varint() if r["codec"] == 3 else 0
        (r["digest"],) = table.unpack("Q")
        n, k, q, e = r["n"], r["k"], r["Q"], r["E"]
        need(1 <= n <= tile.elements, "number of changed elements")
        need(r["codec"] != 1 or (n == tile.elements and k == 0), "a raw record")
        need(q <= (tile.elements - n) >> k, "gap quotients")
        need(e <= n * (w - 1), "magnitude bits")
        rice = ceil(n * k, 8) + ceil(n + q, 8)
        expected = {1: raw_bytes, 2: rice + n * tile.width, 3: rice + ceil(n, 8) + ceil(n + e, 8) + ceil(e, 8)}
        need(size == expected[r["codec"]] and size <= raw_bytes, "payload size")
        r["payload"] = payloads.take(size)
        yield r
    need(table.done() and payloads.done(), "bytes behind the last record")


def read_frame(data, tiles):
    """Reads one frame from the start of `data`: its records, the elements changed, its size."""
    need(len(data) >= 64, "frame: truncated header")
    magic, version, flags, first, count, table_bytes, changed, body_bytes, body_hash, reserved, header_hash = (
        struct.unpack("<4sHHQIIQQQQQ", data[:64])
    )
    need(magic == b"DSF1" and header_hash == xxh3_64(data[:56]), "frame: header")
    need(version == 1 and flags == 0 and reserved == 0, "frame: version or reserved fields")
    need(count >= 1 and table_bytes <= body_bytes and table_bytes >= 12 * count, "frame: sizes")
    need(body_bytes <= len(data) - 64, "frame: truncated")
    body = data[64 : 64 + body_bytes]
    need(body_hash == xxh3_64(body), "frame: body hash")
    records = list(read_records(tiles, first, count, body[:table_bytes], body[table_bytes:]))
    need(sum(r["n"] for r in records) == changed, "frame: changed")
    return records, changed, 64 + body_bytes


def apply_container(data, layout_bytes, half):
    """The half after the delta."""
    tiles, half_bytes, layout_digest = read_layout(layout_bytes)
    need(len(half) == half_bytes, "the half is not of this layout")
    need(len(data) >= 136, "container: truncated header")
    magic, version, flags, layout = struct.unpack("<8sII16s", data[:32])
    from_root, to_root, frames, frame_bytes, changed, reserved, header_hash = struct.unpack("<16s16sQQQQQ", data[64:136])
    need(magic == b"DSDELTA1" and header_hash == xxh3_64(data[:128]), "container: header")
    need(version == 1 and flags == 0 and reserved == 0, "container: version or reserved fields")
    need(layout == layout_digest, "container: of another layout")
    need(frame_bytes == len(data) - 136, "container: size")

    half = np.frombuffer(half, np.uint8).copy()
    digests = [tile_digest(t.read(half)) for t in tiles]
    need(root(digests) == from_root, "the half is not the base")
    at, seen_frames, seen_changed, last_tile = 136, 0, 0, -1
    while at < len(data):
        records, frame_changed, size = read_frame(data[at:], tiles)
        need(records[0]["tile"] > last_tile, "frames out of order")
        last_tile = records[-1]["tile"]
        for record in records:
            tile = tiles[record["tile"]]
            old = tile.read(half)
            if record["codec"] == 1:
                new = np.frombuffer(record["payload"], np.uint8).reshape(old.shape)
            else:
                new = decode_rice(tile, old, record)
            digests[record["tile"]] = tile_digest(new)
            need(digests[record["tile"]] == record["digest"], "tile %d: digest" % record["tile"])
            tile.write(half, new)
        at, seen_frames, seen_changed = at + size, seen_frames + 1, seen_changed + frame_changed
    need(seen_frames == frames and seen_changed == changed, "container: sums")
    need(root(digests) == to_root, "the root after it differs")
    return half.tobytes()


# ---- command line -------------------------------------------------------------------------------------------------------


def read(path):
    with open(path, "rb") as f:
        return f.read()


def check_known_values():
    need(tile_digest(np.zeros((1, 8), np.uint8)) == 0xE220A8397B1DCDAF, "known digest of zeros")
    ramp = np.arange(65536, dtype="<u2").view(np.uint8).reshape(256, 512)
    need(tile_digest(ramp) == 0x17ADA262799C1C7A, "known digest of the ramp")


def expect_refusals(delta, layout, before, trials):
    generator = random.Random(1)
    for _ in range(trials):
        damaged = bytearray(delta)
        damaged[generator.randrange(len(delta))] ^= 1 << generator.randrange(8)
        try:
            # The versions' names are not needed to decode, but the header's hash covers them.
            apply_container(bytes(damaged), layout, before)
        except Refused:
            continue
        raise SystemExit("FAILED: a damaged delta was accepted")


def check(tool, directory):
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([tool, directory], check=True, timeout=60)
    check_known_values()
    cases = sorted(os.listdir(directory))
    codecs = set()
    for name in cases:
        layout, before, after, delta = (
            read(os.path.join(directory, name, part)) for part in ("layout", "before", "after", "delta")
        )
        try:
            decoded = apply_container(delta, layout, before)
        except Refused as error:
            raise SystemExit("FAILED: %s: %s" % (name, error))
        if decoded != after:
            raise SystemExit("FAILED: %s: the decoded half differs" % name)
        tiles = read_layout(layout)[0]
        at = 136
        while at < len(delta):
            records, _, size = read_frame(delta[at:], tiles)
            codecs |= {r["codec"] for r in records}
            at += size
        print("%-24s %8d bytes of delta" % (name, len(delta)))
        if name.startswith("patterns"):
            expect_refusals(delta, layout, before, 30)
    if codecs != {1, 2, 3}:
        raise SystemExit("FAILED: the cases use only the codecs %s" % sorted(codecs))
    print("%d cases decoded" % len(cases))


def main(argv):
    np.seterr(over="ignore")  # digests wrap
    if len(argv) == 4 and argv[1] == "--check":
        check(argv[2], argv[3])
    elif len(argv) == 5:
        layout, before, delta = (read(path) for path in argv[1:4])
        try:
            half = apply_container(delta, layout, before)
        except Refused as error:
            raise SystemExit("refused: %s" % error)
        with open(argv[4], "wb") as f:
            f.write(half)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv)
