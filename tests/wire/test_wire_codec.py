"""The codec: every message survives the wire, and no bytes whatever raise anything but a ProtocolError."""

import contextlib
import re
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.errors import ProtocolError
from gt.ir.instr import KINDS, Define
from gt.wire import codec, messages
from gt.wire.messages import CODES, Ack, Fetch, Goodbye, Ops, Run, Stats

ATOMS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
PLAIN = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
BY_TYPE = {
    "int": st.integers(-(2**63), 2**64 - 1),
    "str": st.text(max_size=20),
    "list": st.lists(PLAIN, max_size=6),
    "dict": st.dictionaries(st.text(max_size=4), PLAIN, max_size=4),
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False),
    "Numbers": st.lists(st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.booleans(), max_size=6),
}


@st.composite
def any_message(draw):
    cls = draw(st.sampled_from(CODES))
    return cls(*(draw(BY_TYPE[field.type]) for field in fields(cls)))


@given(any_message())
@settings(max_examples=300, deadline=None)
def test_every_message_survives_the_wire(message):
    assert codec.unpack(codec.pack(message)) == message


@given(st.binary(max_size=300))
@settings(max_examples=1000, deadline=None)
def test_random_bytes_raise_nothing_but_protocol_error(body):
    with contextlib.suppress(ProtocolError):
        codec.unpack(body)


@given(any_message(), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_raise_nothing_but_protocol_error(message, data):
    body = bytearray(codec.pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        codec.unpack(bytes(body))


@given(PLAIN)
@settings(max_examples=300, deadline=None)
def test_well_formed_msgpack_of_another_kind_is_refused_or_a_message(value):
    with contextlib.suppress(ProtocolError):
        codec.unpack(msgpack.packb(value))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([CODES.index(Fetch), 1], "Fetch has 1 fields, want 3"),
        ([CODES.index(Fetch), 1, "x", -1], "Fetch.tensor is a str, want int"),
        ([CODES.index(Fetch), True, 1, -1], "Fetch.request is a bool, want int"),
        ([CODES.index(Ops), 0, [], {}, [], []], "Ops.origins is a dict, want list"),
        ([99], "unknown message code 99"),
        (["x"], "unknown message code 'x'"),
        ({}, "want a list"),
        ([], "want a list"),
        ([CODES.index(Ack), msgpack.ExtType(5, b"x")], "extension type 5"),
        ([CODES.index(Ack), msgpack.Timestamp(1)], "Ack.seq is a Timestamp"),
        ([CODES.index(Ops), 0, [], [], [1, msgpack.Timestamp(1)], []], "Ops.code holds a Timestamp"),
    ],
)
def test_the_error_names_message_and_field(row, says):
    with pytest.raises(ProtocolError, match=re.escape(says).replace("[", r"\[")):
        codec.unpack(msgpack.packb(row))


def test_map_keys_are_strings():
    with pytest.raises(ProtocolError, match="not msgpack"):
        codec.unpack(msgpack.packb([CODES.index(messages.Report), 1, {1: 2}]))


def test_nesting_is_bounded():
    deep: list = []
    for _ in range(codec.MAX_DEPTH):
        deep = [deep]
    with pytest.raises(ProtocolError, match=r"FinishCapture\.carried is nested"):
        codec.unpack(codec.pack(messages.FinishCapture(0, 0, "", "", deep, 0, 0, 0)))
    with pytest.raises(ProtocolError, match=r"Hello\.info is nested"):
        codec.unpack(codec.pack(messages.Hello(1, "", "", "", "", {}, {"a": {"b": deep}})))
    with pytest.raises(ProtocolError, match=r"Ops\.code holds a list"):
        codec.unpack(codec.pack(Ops(0, [], [], [1, []])))
    with pytest.raises(ProtocolError):
        codec.unpack(b"\x91" * 5000)


def test_an_unpackable_value_names_its_field():
    with pytest.raises(ProtocolError, match=r"Ops\.code cannot be sent"):
        codec.pack(Ops(0, [], [], [object()]))
    with pytest.raises(ProtocolError, match=r"Fetch\.tensor cannot be sent"):
        codec.pack(Fetch(0, 1 << 70))
    assert codec.unpack(codec.pack(Stats(3))) == Stats(3)  # the packer is whole again
    assert codec.unpack(codec.pack(Goodbye())) == Goodbye()


def test_characters_without_a_form_in_utf_8_are_sent_as_escapes():
    """As of a folder whose name is no UTF-8. Before, the first message with such a text ended its link."""
    assert codec.unpack(codec.pack(Goodbye("/b\udcff\n/é"))) == Goodbye(r"/b\udcff" + "\n/é")
    assert codec.unpack(codec.pack(Ops(0, [["\ud800"]], [], []))) == Ops(0, [[r"\ud800"]], [], [])
    assert codec.unpack(codec.pack(Goodbye("é"))) == Goodbye("é")
    with pytest.raises(ProtocolError, match=r"Ops\.code cannot be sent"):
        codec.pack(Ops(0, [["\ud800"]], [], [object()]))
    assert codec.unpack(codec.pack(Stats(3))) == Stats(3)


def test_bodies_are_bounded(monkeypatch):
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 100)
    with pytest.raises(ProtocolError, match="at most 100"):
        codec.pack(Ops(0, [], [], [0] * 200))
    with pytest.raises(ProtocolError, match="at most 100"):
        codec.unpack(bytes(200))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (messages.Hello(1, "", "", "", "", {f"{n:08}": n for n in range(20_000)}, {}), "Hello.switches has "),
        (messages.Metrics(1, {"a": ["x"] * 70_000}), "Metrics.values has 140008 bytes, at most"),
        (messages.Describe(1, [1] * 800_000), "Describe.tensors has 800005 bytes, at most"),
        (Ops(0, [["x"] * 400_000], [], []), "Ops.templates has 800006 bytes, at most"),
        (Ops(0, [], [], [1] * (codec.MAX_STREAM_NUMBERS + 1)), "Ops.code has 262145 numbers, at most 262144"),
    ],
)
def test_what_takes_long_is_refused_before_it_is_unpacked(message, says):
    with pytest.raises(ProtocolError, match=re.escape(says)):
        codec.weigh(codec.pack(message))


def test_as_many_numbers_as_a_batch_may_have_are_taken():
    codec.weigh(codec.pack(Ops(0, [], [], [1 << 20] * codec.MAX_STREAM_NUMBERS)))
    codec.weigh(codec.pack(messages.FinishCapture(0, 0, "", "", [[1 << 20, 1 << 30]] * 50_000, 0, 0, 0)))


@pytest.mark.parametrize("number", [0x8080, 0x9F9F, 0x80_8080])
def test_ids_whose_bytes_look_like_lists_are_taken(number: int) -> None:
    """Most bytes of these numbers are first bytes of lists too: a session ended when its tensors' ids came there."""
    for count in (200, 32_000):
        codec.weigh(codec.pack(Ops(0, [["x" * codec.SMALL_BYTES]], [], [number] * count)))
    with pytest.raises(ProtocolError, match=r"Ops\.code has about 10000\d lists, more than are taken"):
        codec.weigh(codec.pack(Ops(0, [], [], [[]] * 100_000)))


def test_a_program_that_is_packed_ahead_gives_the_same_body():
    small, program = {"op": "aten.neg.default", "args": [{"t": 0}]}, {"code": [*range(70_000)], "text": "é", "none": None}
    defines = [[3, "op", small], [4, "program", program], [5, "program", {}]]
    ahead = [[3, "op", small], [4, "program", codec.packed_payload(program)], [5, "program", codec.packed_payload({})]]
    body = codec.pack(Run(7, 8, ahead, [4, 0, 1], True))
    assert body == codec.pack(Run(7, 8, defines, [4, 0, 1], True))
    assert codec.unpack(body) == Run(7, 8, defines, [4, 0, 1], True)
    keys = {key: [1, [2]] for key in KINDS["program"][1]}
    assert Define(4, "program", codec.packed_payload(keys)).weight == Define(4, "program", keys).weight > len(keys)


@pytest.mark.parametrize("head", [b"\x92", b"\x93\x05\xa1x", b"\x92\xd1\xff\x00"])
def test_what_no_message_has_is_refused_before_it_is_built(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the code, or behind the last field, a body of empty lists would become a million objects."""
    count = codec.MAX_ASKED_BYTES - 64
    built: list[bytes] = []
    monkeypatch.setattr(codec.msgpack, "unpackb", lambda body, **options: built.append(body) or 0)
    with pytest.raises(ProtocolError, match="is no message: its code or its number"):
        codec.weigh(head + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count)
    assert all(len(body) <= codec.MAX_CODE_BYTES for body in built)
