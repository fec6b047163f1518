#!/usr/bin/env python3
"""A slow decoder of deltas, written from delta_format.md and layout_format.md alone.

  delta_reference.py LAYOUT BEFORE DELTA AFTER        decode one delta; write the half after it
  delta_reference.py --check MAKE_CASES_TOOL DIR      run the tool, decode all of its cases, compare byte for byte,
                                                      and expect damaged copies to be refused

Exit code 77: numpy, the xxHash library or the zstd library is missing.
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


# ---- zstd: the library's C functions, as RFC 8878 has them ---------------------------------------------------------------


def load_zstd():
    for name in (ctypes.util.find_library("zstd"), "libzstd.so.1", "libzstd.so"):
        try:
            library = ctypes.CDLL(name) if name else None
        except OSError:
            library = None
        if library is not None:
            for function in (library.ZSTD_decompress, library.ZSTD_findFrameCompressedSize):
                function.restype = ctypes.c_size_t
            library.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
            library.ZSTD_findFrameCompressedSize.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
            return library
    print("SKIPPED: the zstd library (libzstd.so) is missing")
    sys.exit(77)


ZSTD = load_zstd()


def unzstd(data, size):
    """What one frame holds: exactly `size` bytes."""
    data = bytes(data)
    need(data[:4] == bytes.fromhex("28b52ffd"), "no zstd frame")
    need(ZSTD.ZSTD_findFrameCompressedSize(data, len(data)) == len(data), "a zstd frame that ends elsewhere")
    out = ctypes.create_string_buffer(size)
    need(ZSTD.ZSTD_decompress(out, size, data, len(data)) == size, "a zstd frame of another size")
    return out.raw


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
DTYPE_BYTES |= {16: 1, 17: 1, 18: 1, 19: 8, 20: 1}
PACKED = {20: 2}
FLOATS = {1, 2, 3, 4, 5, 6, 17, 18}
MANTISSA_BITS = {1: 52, 2: 23, 3: 10, 4: 7, 5: 3, 6: 2, 17: 3, 18: 2}
TILE_ELEMENTS = 65536


def ceil(a, b):
    return -(-a // b)


def segments(length, cuts):
    edges = [0] + cuts + [length]
    return [(a, b - a) for a, b in zip(edges, edges[1:])]


class Tensor:
    def __init__(self, name, dtype, shape, row_cuts, col_cuts):
        self.name, self.width, self.is_float = name, DTYPE_BYTES[dtype], dtype in FLOATS
        self.mantissa_bits = MANTISSA_BITS.get(dtype)
        self.rows, self.cols = 1, 1
        if shape:
            need(shape[-1] % PACKED.get(dtype, 1) == 0, "layout: half a byte at the end of a row")
            self.cols = shape[-1] // PACKED.get(dtype, 1)
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
        self.tensor, self.rows, self.cols, self.band = tensor, rows, cols, row
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


def read_sidecar(data, tensors):
    """([(name, header, tensor indices)], [(name, contents)]) of a layout of that many tensors."""
    r = Reader(data)
    need(r.take(8) == b"DSSIDCAR", "sidecar: magic")
    version, weights, others = r.unpack("III")
    need(version == 1, "sidecar: version")
    weight_files = []
    for _ in range(weights):
        name, header = r.take(r.unpack("I")[0]).decode(), r.take(r.unpack("Q")[0])
        weight_files.append((name, header, r.unpack("%dI" % r.unpack("I")[0])))
    other_files = [(r.take(r.unpack("I")[0]).decode(), r.take(r.unpack("Q")[0])) for _ in range(others)]
    listed = [index for _, _, indices in weight_files for index in indices]
    need(r.done() and len(set(listed)) == len(listed) and all(index < tensors for index in listed), "sidecar: tensors")
    return weight_files, other_files


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


def decode_dense(tile, old, record):
    k, w = record["k"], tile.width * 8
    planes = Planes(record["payload"])
    low = planes.next(tile.elements * k).reshape(tile.elements, k)
    quotients = planes.unary(tile.elements, record["Q"])
    need(all(q <= 16 for q in quotients), "a quotient above 16")
    need(sum(q == 16 for q in quotients) == record["E"], "number of escapes")
    high = planes.next(record["E"] * (w - k)).reshape(record["E"], w - k)
    need(planes.at == len(planes.bits), "bytes behind the last plane")
    elements = old.reshape(-1).view("<u%d" % tile.width).copy()
    escapes = 0
    changed = 0
    for i in range(tile.elements):
        q = int(quotients[i])
        if q == 16:
            q = number(high[escapes])
            need(q >= 16, "an escape that is none")
            escapes += 1
        z = q << k | number(low[i])
        need(z >> w == 0, "a number longer than the element")
        changed += z != 0
        difference = -(z + 1) // 2 if z % 2 else z // 2
        elements[i] = ulp(ulp(int(elements[i]), w, tile.tensor.is_float) + difference, w, tile.tensor.is_float)
    need(changed == record["n"], "number of changed elements")
    return elements.view(np.uint8).reshape(old.shape)


class BitString:
    """Bits that are read one part after the other."""

    def __init__(self, payload):
        self.bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
        self.at = 0

    def take(self, count):
        need(count <= len(self.bits) - self.at, "a part behind the payload's end")
        self.at += count
        return self.bits[self.at - count : self.at]

    def number(self, count):
        return number(self.take(count))

    def unary(self):
        zeros = 0
        while not self.take(1)[0]:
            zeros += 1
        return zeros

    def finish(self):
        need(len(self.bits) - self.at < 8 and not self.bits[self.at :].any(), "bits behind the payload's end")


def read_class_header(payload, n, tensor):
    """(C, s, t, the k(c), the n(c), exceptions), and the bytes behind them."""
    r = Reader(payload)
    (first,) = r.unpack("B")
    classes, shift = first & 15, first >> 4
    need(classes >= 1 and shift < 4, "number of classes")
    top = r.varint()
    need(top < 1 << (tensor.width * 8 - 1 - tensor.mantissa_bits), "an exponent that the dtype does not have")
    nibbles = [half for byte in r.take(ceil(classes, 2)) for half in (byte & 15, byte >> 4)]
    need(not any(nibbles[classes:]), "a parameter of no class")
    counts = [r.varint() for _ in range(classes - 1)]
    need(sum(counts) <= n, "numbers of changed elements of the classes")
    exceptions = r.varint()
    need(exceptions <= n, "number of exceptions")
    return (classes, shift, top, nibbles[:classes], [n - sum(counts)] + counts, exceptions), payload[r.at :]


def class_differences(record, tensor):
    """The header, the gaps by class, and the differences in the order of the classes."""
    n, k, w = record["n"], record["k"], tensor.width * 8
    header, rest = read_class_header(record["payload"], n, tensor)
    parameters, counts, exceptions = header[3:]
    need(exceptions > 0 or k == 0, "a Rice parameter without exceptions")
    bits = BitString(rest)
    low = [[bits.number(k_c) for _ in range(count)] for k_c, count in zip(parameters, counts)]
    differences = [-1 if negative else 1 for negative in bits.take(n)]
    low_exceptions = [bits.number(k) for _ in range(exceptions)]
    gaps = [[bits.unary() << k_c | x for x in of_class] for k_c, of_class in zip(parameters, low)]
    numbers = np.cumsum([1 + (bits.unary() << k | x) for x in low_exceptions], dtype=object) - 1
    need(exceptions == 0 or numbers[-1] < n, "an exception behind the changed elements")
    lengths = [bits.unary() for _ in range(exceptions)]
    for i, length in zip(numbers, lengths):
        need(length <= w - 2, "a magnitude of too many bits")
        m = (1 << length | bits.number(length)) + 1
        need(m < 1 << (w - 1) or differences[i] < 0, "a magnitude above half of the range")
        differences[i] *= m
    bits.finish()
    return header, gaps, differences


def decode_classes(tile, old, record):
    tensor, w = tile.tensor, tile.width * 8
    (classes, shift, top, _, _, _), gaps, differences = class_differences(record, tensor)
    elements = old.reshape(-1).view("<u%d" % tile.width).copy()
    exponents = ((elements & elements.dtype.type((1 << (w - 1)) - 1)) >> tensor.mantissa_bits).astype(np.int64)
    class_of = np.maximum(0, classes - 1 - ((top - exponents) >> shift))
    at = 0
    for c in range(classes):
        members = np.flatnonzero((class_of == c) & (exponents <= top))
        rank = -1
        for gap in gaps[c]:
            rank += 1 + gap
            need(gap < TILE_ELEMENTS and rank < len(members), "a position behind the last element of its class")
            position = members[rank]
            x = int(elements[position])
            elements[position] = ulp(ulp(x, w, True) + differences[at], w, True)
            at += 1
    return elements.view(np.uint8).reshape(old.shape)


def decode_planes(tile, record):
    width, n, tensor = tile.width, tile.elements, tile.tensor
    r = Reader(record["payload"])
    (forms,) = r.unpack("B")
    need(forms < 1 << width, "more planes than bytes")
    packed = [forms >> p & 1 for p in range(width)]
    sizes = [r.varint() if packed[p] else n for p in range(width)]
    need(all(size < n for size, p in zip(sizes, packed) if p), "a packed plane that is not smaller")
    planes = [r.take(size) for size in sizes]
    need(r.done(), "bytes behind the planes")
    planes = [unzstd(plane, n) if p else plane for plane, p in zip(planes, packed)]
    y = np.zeros(n, np.uint64)
    for p, plane in enumerate(planes):
        y |= np.frombuffer(plane, np.uint8).astype(np.uint64) << np.uint64(8 * p)
    if tensor.is_float and width > 1:
        b, w = tensor.mantissa_bits, width * 8
        mantissa, sign, exponent = y & ((1 << b) - 1), y >> np.uint64(b) & 1, y >> np.uint64(b + 1)
        y = sign << np.uint64(w - 1) | exponent << np.uint64(b) | mantissa
    return y.astype("<u%d" % width).view(np.uint8)


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
        need(r["codec"] in (1, 2, 3, 4, 5, 6), "an unknown codec")
        need(r["codec"] != 4 or tile.tensor.is_float, "exponent classes in a tensor without exponents")
        r["Q"] = table.varint() if r["codec"] in (2, 3, 5) else 0
        r["E"] = table.varint() if r["codec"] in (3, 5) else 0
        if r["codec"] == 5:
            need(r["k"] == 0, "the parameter of a dense record in the wrong place")
            (r["k"],) = table.unpack("B")
        (r["digest"],) = table.unpack("Q")
        n, k, q, e = r["n"], r["k"], r["Q"], r["E"]
        need(1 <= n <= tile.elements, "number of changed elements")
        need(r["codec"] not in (1, 6) or (n == tile.elements and k == 0), "a raw record")
        need(r["codec"] != 6 or size < raw_bytes, "a packed tile that is not smaller")
        if r["codec"] == 5:
            need(k < w and 16 * e <= q <= 16 * tile.elements, "dense sums")
        else:
            need(q <= (tile.elements - n) >> k, "gap quotients")
            need(e <= n * (w - 1), "magnitude bits")
        rice = ceil(n * k, 8) + ceil(n + q, 8)
        expected = {1: raw_bytes, 2: rice + n * tile.width, 3: rice + ceil(n, 8) + ceil(n + e, 8) + ceil(e, 8)}
        expected[5] = ceil(tile.elements * k, 8) + ceil(tile.elements + q, 8) + ceil(e * (w - k), 8)
        need(size == expected.get(r["codec"], size) and size <= raw_bytes, "payload size")
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


def apply_record(half, digests, tiles, record):
    """Writes the new contents of one tile into `half`, once they are what the record's digest says."""
    tile = tiles[record["tile"]]
    old = tile.read(half)
    if record["codec"] == 1:
        new = np.frombuffer(record["payload"], np.uint8).reshape(old.shape)
    elif record["codec"] == 6:
        new = decode_planes(tile, record).reshape(old.shape)
    elif record["codec"] == 4:
        new = decode_classes(tile, old, record)
    elif record["codec"] == 5:
        new = decode_dense(tile, old, record)
    else:
        new = decode_rice(tile, old, record)
    digests[record["tile"]] = tile_digest(new)
    need(digests[record["tile"]] == record["digest"], "tile %d: digest" % record["tile"])
    tile.write(half, new)


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
            apply_record(half, digests, tiles, record)
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
            if name.startswith("classes") and name.endswith("-compact") and {r["codec"] for r in records} != {4}:
                raise SystemExit("FAILED: %s: not in exponent classes" % name)
            if name.startswith("dense") and {r["codec"] for r in records} != {5}:
                raise SystemExit("FAILED: %s: not dense" % name)
            at += size
        print("%-24s %8d bytes of delta" % (name, len(delta)))
        if name.startswith(("patterns", "classes", "dense", "packed")):
            expect_refusals(delta, layout, before, 30)
    if codecs != {1, 2, 3, 4, 5, 6}:
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
