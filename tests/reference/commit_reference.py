"""A rank of a group and a reader of the coordinator's log, written from commit_protocol.md alone."""

import hashlib
import hmac
import os
import socket
import struct

from delta_reference import Reader, need, xxh3_64
from wire_reference import HELLO, NOTHING, Stream, read_string, read_version, string

RANK_JOIN, RANK_WELCOME, RANK_REPORT, RANK_ORDER = range(60, 64)
PAUSED, SERVING, PREPARED, COMMITTED_WAITING, IN_DOUBT = range(1, 6)
NONE, STAGING, STAGED, STAGE_FAILED, PREPARING, PREPARED_PHASE, COMMITTING, COMMITTED = range(8)
ORDERS = ["none", "stage", "prepare", "commit", "finish", "roll_back", "serve", "catch_up", "expel"]
RECORDS = ["start", "commit", "abort", "roll_back", "finish"]


class Rank(Stream):
    """One process of a rank. It pulls and writes nothing: what it says of that is made up."""

    def __init__(self, port, token, rank, ranks, deadline_s):
        super().__init__(socket.create_connection(("127.0.0.1", port), deadline_s), deadline_s)
        self.greet(token, rank, ranks)

    def shake_hands(self, token, rank, ranks):
        kind, request, payload = self.receive()
        need(kind == HELLO and request == 0, "hello")
        r = Reader(payload)
        protocol, auth_required, self.instance = r.unpack("HBQ")
        server_nonce = r.take(32)
        need(r.done() and protocol == 4 and auth_required == 1, "hello's fields")
        self.rank, self.incarnation = rank, 1 << 32 | int.from_bytes(os.urandom(4), "little")
        nonce, fields = os.urandom(32), struct.pack("<IIQ", rank, ranks, self.incarnation)
        proof = hmac.digest(token, b"deltasync-rank-1" + server_nonce + nonce + fields, hashlib.sha256)
        self.send(RANK_JOIN, struct.pack("<H", 4) + fields + nonce + proof + string("reference"), request=0)
        kind, request, payload = self.receive()
        need(kind == RANK_WELCOME and request == 0, "welcome")
        r = Reader(payload)
        proved = hmac.digest(token, b"deltasync-coordinator-1" + nonce + server_nonce, hashlib.sha256)
        need(r.take(32) == proved, "proof")
        self.log, self.term, latest = r.unpack("QQQ")
        need(r.done() and latest == self.incarnation and self.log == self.instance, "welcome's fields")
        self.step, self.state, self.phase = 1, PAUSED, NONE
        self.transaction, self.round, self.staged, self.holds, self.obeys = (0, 0), 0, ((0, 0), ""), (0, 0), 0

    def report(self):
        """The order that answers it."""
        payload = struct.pack("<IQQBBB", self.rank, self.incarnation, self.step, self.state, 0, self.phase)
        payload += struct.pack("<QQI", *self.transaction, self.round)
        payload += struct.pack("<QQ", *self.staged[0]) + string(self.staged[1]) + NOTHING + NOTHING
        payload += struct.pack("<QQB", *self.holds, 21) + string("") + struct.pack("<Q", self.obeys)
        r = Reader(self.ask(RANK_REPORT, payload, RANK_ORDER))
        order = dict(zip(("log", "term", "step", "incarnation", "kind"), r.unpack("QQQQB")))
        order["kind"] = ORDERS[order["kind"]]
        order["transaction"], (order["round"], order["want"]) = r.unpack("QQ"), r.unpack("IB")
        order["number"], order["epoch"] = r.unpack("QQ")
        order["label"], order["exact"] = read_string(r), r.unpack("QQ")
        order["version"] = read_version(r)
        need(r.done(), "bytes after an order")
        need(order["log"] == self.log and order["incarnation"] == self.incarnation, "an order for another")
        self.obeys = self.log
        return order

    def obey(self, order, newest):
        """Does what the page says of each order; `newest` is the version that a pull would bring."""
        kind = order["kind"]
        if kind == "stage":
            self.phase, self.transaction, self.round, self.staged = STAGED, order["transaction"], order["round"], newest
        elif kind == "prepare":
            need(order["version"] == self.staged, "prepare names what was staged")
            self.state, self.phase = PREPARED, PREPARED_PHASE
        elif kind == "commit":
            self.state, self.phase, self.holds = COMMITTED_WAITING, COMMITTED, self.staged[0]
        elif kind == "finish":
            need(order["version"][0] == self.holds, "finish names what was committed")
            self.state, self.phase, self.transaction, self.round, self.staged = SERVING, NONE, (0, 0), 0, ((0, 0), "")
        elif kind != "none":
            raise AssertionError(f"order {kind}")
        self.step += kind != "none"


def read_log(data):
    """(kind, log, term, transaction, version, label, ranks) of each record."""
    need(len(data) % 256 == 0, "a torn record")
    out = []
    for sequence, at in enumerate(range(0, len(data), 256)):
        record = data[at : at + 256]
        magic, kind, label_bytes, number, log, term = struct.unpack_from("<4sHHQQQ", record)
        *transaction, zero = struct.unpack_from("<QQQ", record, 32)
        version = struct.unpack_from("<QQ", record, 56)
        ranks, zero32 = struct.unpack_from("<II", record, 72)
        need(magic == b"DSC1" and struct.unpack_from("<Q", record, 248)[0] == xxh3_64(record[:248]), "record")
        need(number == sequence and zero == 0 and zero32 == 0 and not any(record[80 + label_bytes : 248]), "zeros")
        label = record[80 : 80 + label_bytes].decode()
        out.append((RECORDS[kind - 1], log, term, tuple(transaction), version, label, ranks))
    return out
