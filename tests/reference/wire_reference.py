"""Both clients of an agent, written from wire_protocol.md and trainer_protocol.md alone: a receiver over TCP and a
trainer over the Unix socket. They wait for everything that they ask for, and check all that the pages let them check."""

import ctypes
import hashlib
import hmac
import os
import socket
import struct

from delta_reference import Reader, ZSTD, need, xxh3_64, xxh3_128

HELLO, AUTH, WELCOME, ERROR, END = 1, 2, 3, 4, 5
GET_LAYOUT, LAYOUT, PLAN, PLAN_REPLY, GET_DIGESTS, DIGESTS, GET_EXTENT, EXTENT = range(10, 18)
GET_FRAMES, FRAME, GET_RAW_TILES, RELEASE, WATCH, VERSION_READY = range(18, 24)
SUBSCRIBE, CHECK_TILES, TILES_CHECKED, REPORT, GET_LAG, LAG = range(24, 30)
TRAINER_HELLO, TRAINER_WELCOME, TRAINER_PLAN, TRAINER_PLAN_OK, TRAINER_NOTIFY, TRAINER_WAIT, TRAINER_READY = range(40, 47)
CONTROL, DATA, WATCHER = 1, 2, 3
NEWEST, NEWER, NUMBER, LABEL = 1, 2, 3, 4
UP_TO_DATE, DELTA, FULL = 1, 2, 3
INVALID_ARGUMENT, OUT_OF_RANGE, LAYOUT_MISMATCH, GONE, LEASE_REVOKED, TIMED_OUT = 0, 1, 4, 7, 8, 9
VERSION_CONFLICT, PROTOCOL, UNAUTHENTICATED, ALREADY_EXISTS = 5, 14, 15, 16
NOTHING = bytes(16)


class AgentError(Exception):
    def __init__(self, request, code, message):
        super().__init__(f"{code}: {message}")
        self.request, self.code = request, code


def string(text):
    return struct.pack("<I", len(text.encode())) + text.encode()


def varint(value):
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def ranges(pairs):
    out, end = varint(len(pairs)), 0
    for first, stop in pairs:
        out += varint(first - end) + varint(stop - first)
        end = stop
    return out


def read_string(r):
    return r.take(r.unpack("I")[0]).decode()


def read_version(r):
    return r.unpack("QQ"), read_string(r)


def zstd(data):
    ZSTD.ZSTD_compressBound.restype = ZSTD.ZSTD_compress.restype = ctypes.c_size_t
    ZSTD.ZSTD_compressBound.argtypes = [ctypes.c_size_t]
    ZSTD.ZSTD_compress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    bound = ZSTD.ZSTD_compressBound(len(data))
    out = ctypes.create_string_buffer(bound)
    size = ZSTD.ZSTD_compress(out, bound, data, len(data), 1)
    return out.raw[:size]


def unzstd(data, size):
    out = ctypes.create_string_buffer(max(size, 1))
    need(ZSTD.ZSTD_findFrameCompressedSize(data, len(data)) == len(data), "bytes after a zstd frame")
    need(ZSTD.ZSTD_decompress(out, size, data, len(data)) == size, "a zstd frame of another size")
    return out.raw[:size]


def pack_layout(layout, sidecar):
    parts = [zstd(layout), zstd(sidecar)]
    return struct.pack("<QQ", len(layout), len(sidecar)) + b"".join(struct.pack("<Q", len(p)) + p for p in parts)


def unpack_layout(payload):
    r = Reader(payload)
    sizes = r.unpack("QQ")
    parts = [unzstd(bytes(r.take(r.unpack("Q")[0])), size) for size in sizes]
    need(r.done(), "bytes after a packed layout")
    return parts


class Stream:
    """Messages over a connected socket."""

    def __init__(self, sock, deadline_s):
        self.sock = sock
        self.sock.settimeout(deadline_s)
        self.requests = 0
        self.files = []

    def greet(self, *options):
        """The first messages; without them there is no conversation."""
        try:
            self.shake_hands(*options)
        except BaseException:
            self.close()
            raise

    def close(self):
        self.sock.close()
        for fd in self.files:
            os.close(fd)

    def send(self, kind, payload=b"", request=None):
        if request is None:
            self.requests += 1
            request = self.requests
        header = struct.pack("<4sHHQQQQ", b"DSW1", kind, 0, len(payload), request, xxh3_64(payload), 0)
        self.sock.sendall(header + struct.pack("<Q", xxh3_64(header)) + payload)
        return request

    def take(self, count):
        data = bytearray()
        while len(data) < count:
            piece, files, _, _ = socket.recv_fds(self.sock, count - len(data), 1)
            self.files += files
            if not piece:
                raise EOFError("the peer closed")
            data += piece
        return bytes(data)

    def receive(self):
        """(type, request, payload)"""
        header = self.take(48)
        magic, kind, flags, size, request, payload_hash, reserved, header_hash = struct.unpack("<4sHHQQQQQ", header)
        need(magic == b"DSW1" and header_hash == xxh3_64(header[:40]), "message header")
        need(flags == 0 and reserved == 0, "reserved fields")
        payload = self.take(size)
        need(payload_hash == (0 if kind == EXTENT else xxh3_64(payload)), "payload hash")
        if kind == ERROR:
            raise AgentError(request, payload[0], read_string(Reader(payload[1:])))
        return kind, request, payload

    def ask(self, kind, payload=b"", answer=None):
        request = self.send(kind, payload)
        got, of, reply = self.receive()
        need(got == answer and of == request, f"type {got} for request {of} in answer to {kind}")
        return reply

    def ask_many(self, kind, payload, answer):
        """The payloads up to the end."""
        request, out = self.send(kind, payload), []
        while True:
            got, of, reply = self.receive()
            need(of == request and got in (answer, END), f"type {got} for request {of}")
            if got == END:
                need(reply == b"", "an end with a payload")
                return out
            out.append(reply)


class Receiver(Stream):
    def __init__(self, endpoint, token, role, deadline_s, protocol=5):
        host, port = endpoint.rsplit(":", 1)
        super().__init__(socket.create_connection((host, int(port)), deadline_s), deadline_s)
        self.greet(token, role, protocol)

    def shake_hands(self, token, role, protocol):
        kind, newest, payload = self.receive()
        need(kind == HELLO and newest == 5, "hello")
        r = Reader(payload)
        oldest, auth_required, self.instance = r.unpack("HBQ")
        server_nonce = r.take(32)
        need(r.done() and oldest == 4 and auth_required == (1 if token else 0), "hello's fields")
        nonce = os.urandom(32)
        proof = hmac.digest(token, b"deltasync-client-1" + server_nonce + nonce + bytes([role]), hashlib.sha256)
        reply = self.ask(AUTH, struct.pack("<HB", protocol, role) + nonce + proof + string("reference"), WELCOME)
        r = Reader(reply)
        need(r.take(32) == hmac.digest(token, b"deltasync-server-1" + nonce + server_nonce, hashlib.sha256), "proof")
        (self.has_layout,) = r.unpack("B")
        self.layout_digest = r.take(16)
        self.clock, (self.clock_ns,) = r.take(16), r.unpack("Q")
        need(r.done(), "bytes after a welcome")

    def get_layout(self):
        layout, sidecar = unpack_layout(self.ask(GET_LAYOUT, b"", LAYOUT))
        return layout, sidecar

    def subscribe(self, layout_digest, pairs):
        """The subscription's name."""
        payload = layout_digest + ranges(pairs)
        need(self.ask(SUBSCRIBE, payload, END) == b"", "an end with a payload")
        return xxh3_128(payload)

    def plan(self, layout_digest, base=(0, 0), base_root=NOTHING, want=NEWEST, number=0, label="", wait_ms=0, partial=0,
             full_only=0, subscription=NOTHING, compact=0, epoch=0):
        payload = layout_digest + struct.pack("<QQ", *base) + base_root + struct.pack("<BQ", want, number)
        payload += string(label) + struct.pack("<QBB", wait_ms, partial, full_only) + subscription
        r = Reader(self.ask(PLAN, payload + struct.pack("<BQ", compact, epoch), PLAN_REPLY))
        out = {}
        out["mode"], out["plan"] = r.unpack("BQ")
        out["target"], out["label"] = read_version(r)
        out["root"] = r.take(16)
        out["full_bytes"], out["pack_threads"], count = r.unpack("QIQ")
        out["steps"] = []
        for _ in range(count):
            step = {"from": r.unpack("QQ"), "to": r.unpack("QQ"), "root": r.take(16)}
            step["frames"], step["bytes"], step["changed"] = r.unpack("QQQ")
            out["steps"].append(step)
        need(r.done(), "bytes after a plan_reply")
        return out

    def digests(self, plan):
        payload = self.ask(GET_DIGESTS, struct.pack("<Q", plan), DIGESTS)
        return list(struct.unpack("<%dQ" % (len(payload) // 8), payload))

    def extent(self, plan, first, end):
        return b"".join(self.ask_many(GET_EXTENT, struct.pack("<QQQ", plan, first, end), EXTENT))

    def frames(self, plan, step, pairs):
        return self.ask_many(GET_FRAMES, struct.pack("<QI", plan, step) + ranges(pairs), FRAME)

    def raw_tiles(self, plan, form, pairs):
        return self.ask_many(GET_RAW_TILES, struct.pack("<QB", plan, form) + ranges(pairs), FRAME)

    def check_tiles(self, plan, pairs):
        return self.ask(CHECK_TILES, struct.pack("<Q", plan) + ranges(pairs), TILES_CHECKED)

    def release(self, plan):
        need(self.ask(RELEASE, struct.pack("<Q", plan), END) == b"", "an end with a payload")

    def report(self, receiver, version, label, error=""):
        self.send(REPORT, struct.pack("<QQQ", receiver, *version) + string(label) + string(error))

    def lag(self, held):
        r = Reader(self.ask(GET_LAG, struct.pack("<QQ", *held), LAG))
        newest, label = read_version(r)
        versions, behind_ns, age_ns, cut_off_ns = r.unpack("QQQQ")
        need(r.done(), "bytes after a lag")
        return newest, label, versions, behind_ns, age_ns, cut_off_ns


class Trainer(Stream):
    """The only writer of its job."""

    def __init__(self, path, layout, sidecar, deadline_s):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(deadline_s)
        sock.connect(str(path))
        super().__init__(sock, deadline_s)
        self.greet(layout, sidecar)

    def shake_hands(self, layout, sidecar):
        hello = struct.pack("<HIIi", 5, 0, 1, os.getpid()) + string("reference") + pack_layout(layout, sidecar)
        r = Reader(self.ask(TRAINER_HELLO, hello, TRAINER_WELCOME))
        self.segment_name, self.directory = read_string(r), read_string(r)
        (self.generation,) = r.unpack("Q")
        self.newest, (self.epoch, self.instance) = r.unpack("QQ"), r.unpack("QQ")
        need(r.done(), "bytes after a trainer_welcome")
        need(len(self.files) == 1, "no descriptor")

    def plan(self, rectangles, deadline_ms, agreed=0):
        payload = struct.pack("<Q", deadline_ms) + varint(len(rectangles))
        payload += b"".join(varint(x) for rectangle in rectangles for x in rectangle) + bytes([agreed])
        need(self.ask(TRAINER_PLAN, payload, TRAINER_PLAN_OK) == b"", "a trainer_plan_ok with a payload")

    def notify(self):
        self.send(TRAINER_NOTIFY, struct.pack("<QQ", 1, 0))

    def wait(self, version, deadline_ms):
        """(version served, delta bytes, changed elements, encoding µs)"""
        r = Reader(self.ask(TRAINER_WAIT, struct.pack("<QQQ", *version, deadline_ms), TRAINER_READY))
        served, rest = r.unpack("QQ"), r.unpack("QQQ")
        need(r.done(), "bytes after a trainer_ready")
        return served, *rest

    def end(self):
        need(self.ask(END, b"", END) == b"", "an end with a payload")
