"""Instructions for workers: numbered definitions, each sent once, and a flat stream of numbers that names them.

A stream is `[number, seq, *operands, number, seq, *operands, ...]`. seq is the op's sequence number less the message's base.
Operands are tensor ids, scalars and keys; the kind (for `op` the definition too) says how many. A number below FIRST is a
reserved instruction, which contains its own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gt.ir.layout import piece_shape
from gt.ir.template import weight

if TYPE_CHECKING:
    from gt.ir.template import Template

# Reserved numbers. The client's stream to the dispatcher has the same form: [template, origin, *ins, *values, *outs].

FREE = 0  # [FREE, n, ids...], to workers [FREE, seq, n, ids...]: these tensors are freed
PARAM = 1  # from the client: [PARAM, id], a leaf that requires grad
FORGET = 2  # to workers: [FORGET, seq, n, numbers...], definitions that are not named again
# from the client: [RECORD, slot, how, n, ids...], the ops that follow may become a program. ids: its inputs, and arguments of
# which the next such call has copies. how: 0 executes ops one by one. 1 executes them as one program with backend cudagraphs
# when the call returns. 2 and 3 do so and recompute cheap values, as 1 and 2 of FinishCapture.recompute. 4
# (COMPILED_LATER) does as 0, and their program will be compiled
RECORD = 3
COMPILED_LATER = 4
DISCARD = 4  # from the client: [DISCARD], the ops recorded since RECORD become no program
LAUNCH = 5  # from the client: [LAUNCH, program, seed, counter], replays a program
DROP = 6  # from the client: [DROP, program], a program that is not launched again
# from the client: [FRAGMENT, slot, call, backend, seed, counter, n, <n numbers of ops>, END_FRAGMENT, m, ids...], the ops
# between two reads of a value. They may be replayed as one program. m tensors are freed behind them. slot: the function; call:
# its call; backend: an index into BACKENDS; seed, counter: state of the random numbers before
FRAGMENT = 8
END_FRAGMENT = 9
FRAGMENT_HEADER = 7  # numbers of FRAGMENT before those of ops
END = 7  # to workers: [END, seq, 2, first, last], frees every tensor whose id is from first to below last
SHARDED = 10  # from the client: [SHARDED, id], a parameter that ZeRO shards
GRAD = 11  # from the client: [GRAD, parameter, gradient], autograd has added a term to the gradient
STATE = 12  # from the client: [STATE, id], state of an optimizer, which may rest elsewhere
FIRST = 16  # templates and definitions are numbered from here

# Numbers of each of the client's instructions about tensors, those of FREE without its ids
LENGTHS = {FREE: 2, PARAM: 2, DROP: 2, SHARDED: 2, GRAD: 3, STATE: 2}
OTHER_LENGTHS = {RECORD: 4, DISCARD: 1, LAUNCH: 4}  # numbers of RECORD before its ids

BASE_BITS = 40  # ids of one session's tensors: below this, and above it the session's number


def client_length(code: list, at: int) -> int:
    """Numbers of the row at this place of a client's stream, which is no op's and is in no fragment."""
    number = code[at]
    if number in LENGTHS:
        return LENGTHS[number] + (code[at + 1] if number == FREE else 0)
    return OTHER_LENGTHS[number] + (code[at + 3] if number == RECORD else 0)


def unchecked_length(code: Sequence, at: int) -> int:
    """Numbers of the row at this place of a client's stream that is not checked yet, if it may be in a fragment.

    0 for ops and other control codes, and for numbers that cannot be read.
    """
    number = code[at]
    if type(number) is not int or number not in LENGTHS or at + 1 >= len(code):
        return 0
    freed = code[at + 1] if number == FREE else 0
    return LENGTHS[number] + freed if type(freed) is int and freed >= 0 else 0


def client_ops(code: list, templates: Mapping[int, Template]) -> Iterator[tuple[Template, int]]:
    """Each op of a client's stream, as it is recorded: its template, and where it begins in `code`. Other rows are passed by.

    The stream is this process's own, and is not checked. KeyError for a number that is no template.
    """
    at = 0
    while at < len(code):
        number = code[at]
        if number >= FIRST:
            template = templates[number]
            yield template, at
            at += 2 + len(template.ins) + template.values + template.results
        else:
            at += client_length(code, at)


# kind -> (operands, keys of the definition's payload)
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # An ATen or gt op on local pieces. Operands: tensors, values, then one id for each `new` or `view` output.
    # outs: [kind, local spec, of] as ir.template.Out. writes: the tensors, by number, that the op changes in place, by the
    # table of ops. random: None or [global shape, [box, ...] of this worker]; the last two values are then seed and counter.
    "op": (("tensors", "values", "outs"), ("op", "args", "kwargs", "tensors", "values", "outs", "writes", "random")),
    # The same in host memory: operands that rest there are used where they rest, results rest there too. Of others the op uses
    # host copies, and what it writes goes back. fresh: operands, by number, whose host copies are of other values
    "host_op": (
        ("tensors", "values", "outs"),
        ("op", "args", "kwargs", "tensors", "values", "outs", "writes", "random", "fresh"),
    ),
    # team: {"id", "workers", "rank", "offset", "bytes"}: workers in rank order, this worker's rank, its heap region.
    "all_reduce": (("tensor",), ("team", "op")),  # in place
    "together": ((), ("count",)),  # in a program: one team has the next `count` collectives of one kind, and may do them as one
    # boxes[rank]: the boxes of `shape` that each rank holds, in local order
    "all_gather": (("src", "dst"), ("team", "shape", "dtype", "boxes")),
    # src has a term of all of `shape`; dst gets the sum of this rank's boxes
    "reduce_scatter": (("src", "dst"), ("team", "op", "shape", "dtype", "boxes")),
    # from the boxes in `have[rank]` to those in `want[rank]`
    "all_to_all": (("src", "dst"), ("team", "shape", "dtype", "have", "want")),
    # dst is a contiguous copy of the boxes (of src's local indices), concatenated into local `shape`
    "shard": (("src", "dst"), ("shape", "dtype", "boxes")),
    # Replicate -> Partial: dst is src on the rank that keeps the value, and zeros (or the op's identity) elsewhere
    "partial": (("src", "dst"), ("keep", "op")),
    # channel: {"peer", "offset", "bytes", "slots"}; boxes are of src's local indices, sent in order
    "send": (("src",), ("channel", "boxes")),
    # dst has local `shape`; parts: [[channel, [box, ...]], ...] are received in order, each box of dst's local indices
    "recv": (("dst",), ("shape", "dtype", "parts")),
    # as recv, after the boxes of `local`, [[box of src, box of dst], ...], are copied from src
    "merge": (("src", "dst"), ("shape", "dtype", "parts", "local")),
    "upload": (("dst", "key"), ("shape", "stride", "dtype")),  # waits for Data with this key
    "fetch": (("src", "key"), ()),  # answers Piece with this key
    "describe": (("src", "key"), ()),  # answers Described with this key
    "alias": (("src", "dst"), ()),  # dst names the same tensor
    # space: "cpu" or "nvme", where the tensor rests until it is used. Its next use waits for it; `restore` begins to bring it
    "evict": (("tensor",), ("space", "path")),
    "restore": (("tensor",), ()),
    "stale": (("tensor",), ()),  # its host copy is of another value: the next host_op makes it anew
    "fill": (("dst",), ("shape", "stride", "dtype")),  # a placeholder of zeros
    # A recorded stream; a long one is several. randoms: places in `code` of a seed and, after it, a counter relative to the
    # operand. actions: [place, name] where an action of a schedule begins, "" between two. backend: one of BACKENDS.
    # channels, with the first of several: [peer, offset, true if it sends] of all channels in use. once: no second launch
    "program": (("seed", "counter"), ("code", "randoms", "actions", "backend", "channels", "once")),
    # A program with parameters. Operands: seed, counter, the tensors that it reads, those that it makes, scalars. ins, outs:
    # names of these tensors in `code`. moved: numbers of the ins that it frees. values: places of the scalars in `code`.
    "fragment": (
        ("seed", "counter"),
        ("code", "randoms", "actions", "backend", "channels", "once", "ins", "outs", "moved", "values"),
    ),
}
OPS = frozenset({"op", "host_op"})  # kinds that execute an op
OFFLOAD = frozenset({"host_op", "evict", "restore"})  # kinds on tensors that rest in host memory or files
PROGRAMS = frozenset({"program", "fragment"})  # kinds that execute other instructions

# Kinds that move values between workers. All members of a team take part in a collective; a transfer has two ends.
COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
RECEIVES = frozenset({"recv", "merge"})
TRANSFERS = frozenset({"send"}) | RECEIVES
COMMUNICATION = COLLECTIVES | TRANSFERS

# Executors of a program: instructions one by one; segments between communications compiled; these in CUDA graphs
BACKENDS = ("eager", "inductor", "cudagraphs")

_OWN_BOXES = {"reduce_scatter": "boxes", "all_to_all": "want"}  # kind -> key of the boxes that each rank gets


@dataclass(frozen=True, slots=True)
class Effects:
    """Places among the operands of a definition that are tensors, and the def-use facts of data-flow analysis.

    reads: tensors that are read, or changed in place; the first operands of every kind that reads. makes: ids that are defined.
    writes: tensors whose memory is changed in place, by their number among `reads`. views: output -> tensor whose memory it
    shares, each by its number among `makes` and `reads`.
    """

    reads: slice
    makes: slice
    writes: tuple[int, ...] = ()
    views: dict[int, int] = field(default_factory=dict)


_CHANGES = frozenset({"all_reduce", "evict", "restore", "stale"})  # kinds that change their tensor, or where it is
_READS, _MAKES = frozenset({"src", "tensor"}), "dst"  # names of operands that are tensors


class PackedPayload(dict):
    """The payload of a program, with its weight and its packed form.

    Both take some 10 ms for 100,000 instructions. Whoever makes the program computes them where nobody waits; a launch, which
    sends the definition, would keep the dispatcher's loop for as long.
    """

    def __init__(self, payload: dict[str, Any], packed: bytes) -> None:
        super().__init__(payload)
        self.packed, self.weight = packed, weight(payload)


@dataclass(frozen=True, eq=False)
class Define:
    """One numbered definition; payload keys are those of KINDS."""

    number: int
    kind: str
    payload: dict[str, Any]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown instruction kind {self.kind!r}")
        if set(self.payload) != set(KINDS[self.kind][1]):
            raise ValueError(f"{self.kind} has {sorted(self.payload)}, want {sorted(KINDS[self.kind][1])}")

    def wire(self) -> list:
        return [self.number, self.kind, self.payload]

    @classmethod
    def from_wire(cls, row: list) -> Define:
        return cls(*row)

    @cached_property
    def weight(self) -> int:
        """Numbers and names of its payload, counted once for all workers that are told it."""
        return self.payload.weight if isinstance(self.payload, PackedPayload) else weight(self.payload)

    @cached_property
    def operands(self) -> int:
        """The count of numbers that follow number and seq in the stream."""
        if self.kind == "fragment":
            return 2 + sum(len(self.payload[key]) for key in ("ins", "outs", "values"))
        if self.kind not in OPS:
            return len(KINDS[self.kind][0])
        outs = sum(out[0] in ("new", "view") for out in self.payload["outs"])
        return self.payload["tensors"] + self.payload["values"] + outs

    @cached_property
    def effects(self) -> Effects:
        """The def-use facts of this definition, which all instructions that name it share."""
        payload = self.payload
        if self.kind in OPS:
            # Operands of an op: [tensors..., values..., ids of new and view outputs...].
            outs = [out for out in payload["outs"] if out[0] in ("new", "view")]
            first = payload["tensors"] + payload["values"]
            views = {n: out[2] for n, out in enumerate(outs) if out[0] == "view"}
            return Effects(slice(0, payload["tensors"]), slice(first, first + len(outs)), tuple(payload["writes"]), views)
        # Of a fragment: [seed, counter, ins..., outs..., scalars...].
        if self.kind == "fragment":
            first = 2 + len(payload["ins"])
            return Effects(slice(2, first), slice(first, first + len(payload["outs"])))
        # Of other kinds, by the names of their operands in KINDS: tensors that are read come first.
        names = KINDS[self.kind][0]
        reads = sum(name in _READS for name in names)
        first = names.index(_MAKES) if _MAKES in names else len(names)
        return Effects(
            slice(0, reads),
            slice(first, first + (_MAKES in names)),
            (0,) if self.kind in _CHANGES else (),
            {0: 0} if self.kind == "alias" else {},
        )

    @cached_property
    def result_shape(self) -> tuple[int, ...] | None:
        """Local shape of `dst`, None where it is the shape of `src`. Not of an `op`, whose outputs have specs."""
        if self.kind in _OWN_BOXES:
            return piece_shape(self.payload[_OWN_BOXES[self.kind]][self.payload["team"]["rank"]])
        return tuple(self.payload["shape"]) if "shape" in self.payload else None
