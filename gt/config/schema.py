"""Schema of a config: each key, and the class that its value becomes. Knows nothing about YAML or files.

A group's `axis` is a dim: of a weight stored [in, out], or of activations that enter a data-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RESERVED = "gt"  # the one top-level key that is not a group

# key -> its value's form, as errors state it
GROUP_KEYS = {
    "shard": "a mapping with axis and workers",
    "workers": "a list of worker numbers",
    "replicated": "true or false",
    "backward": "the name of a group",
    "compile": "true or false",
}
SHARD_KEYS = {"axis": "a whole number", "workers": "a list of worker numbers", "replicated": "true or false"}
GT_KEYS = {
    "modules": "a mapping from module pattern to group",
    "schedule": "the name of a schedule",
    "data_parallel": "a list of worker numbers, null for all, or dp: the outer lists of groups' workers",
    "zero": "0, 1, 2 or 3",
    "precision": "fp32, bf16 or fp16, or a mapping with compute, reduce and output",
    "activation_checkpoint": "a mapping with modules",
    "offload": "a mapping with optimizer, params, path and step",
    "bucket": "bytes of gradients, as 25MiB",
}
PRECISION_KEYS = {key: "fp32, bf16 or fp16" for key in ("compute", "reduce", "output")}
OFFLOAD_KEYS = {
    "optimizer": "cpu, nvme or none",
    "params": "cpu, nvme or none",
    "path": "the absolute path of a folder",
    "step": "auto, host or device",
}
CHECKPOINT_KEYS = {"modules": "a module pattern, or a list of them"}
RULE_KEYS = {"group": "the name of a group, a suffix, or a list of groups", "parts": "a whole number from 1 to 999"}

DATA_PARALLEL = "data_parallel"  # the group of all ops that are in no other group
DATA_AXIS = "dp"  # the axis of a mesh along which data is split
STAGES = (0, 1, 2, 3)  # stages of ZeRO
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # values of `precision`, and torch's names
SPACES = ("cpu", "nvme", "none")  # places for offloaded tensors, in `offload`
STEPS = ("auto", "host", "device")  # where the optimizer of offloaded state computes, in `offload`
OFFLOAD_PATH = "/tmp/nvme_offload"
MAX_FOLDER_CHARACTERS = 1024  # characters of `path` in `offload`
BUCKET_BYTES = 12 << 20  # of gradients that are reduced together; on two H200s 64 MiB made a step 2% longer
SUFFIX_AXIS = {"_colpar": 1, "_rowpar": 0}  # suffix of a group's name -> its axis
MAX_GROUP_CHARACTERS = 255  # characters of a group's name
MAX_PATH_CHARACTERS = 4096  # characters of the names of groups within one another
MAX_NESTED_GROUPS = 32  # groups within one another
MAX_FUSED_PARTS = 999  # weights that are fused in one, as RULE_KEYS says: each costs a box on every worker
NO_NAME = "/#"  # characters that no group's name has: they divide names within one another, and a name from its parts
MAX_AXIS = 4  # the last dim of a batch of volumes, [N, C, D, H, W]


# Examples, as YAML and as (axis, workers, nested):
#   mlp_colpar: {workers: [0, 1]}        (1, ((0, 1),), False)        weights are split by columns over workers 0 and 1
#   stage0: {workers: [[0, 1], [2, 3]]}  (0, ((0, 1), (2, 3)), True)  two replicas, which split the batch, of two workers each
#   head: {workers: null}                (0, (), False), everyone     `resolve` writes the session's workers
@dataclass(frozen=True, slots=True)
class Group:
    """One signal group. workers: the outer tuple is data parallel, the inner ones are split along `axis`.

    `nested` tells `[[0, 1]]` from `[0, 1]`. everyone: all workers of the session, which `load.resolve` writes into `workers`.
    A group without workers places nothing. replicated: activations that enter are whole on each worker.
    """

    name: str
    axis: int
    workers: tuple[tuple[int, ...], ...]
    nested: bool = False
    backward: str | None = None
    compile: bool = False
    line: int = 0
    everyone: bool = False
    replicated: bool = False

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(worker for row in self.workers for worker in row)


# Examples of `modules`:
#   "head": stage1                              Rule("head", "stage1")
#   "*.c_attn": {group: _colpar, parts: 3}      Rule("*.c_attn", "_colpar", 3): q, k and v are one weight, and each is split
#   "transformer.h.*": [stage0, stage1]         Rule("transformer.h.*", "", stages=("stage0", "stage1"))
@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose name matches `pattern` run in `group`. parts: number of weights that are fused in one.

    group may be a suffix such as `_colpar`: that group of the stage around the module. `stages` replaces group: the modules
    are divided in order, into one run for each stage, of about equal length.
    """

    pattern: str
    group: str
    parts: int = 1
    line: int = 0
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Precision:
    """Keys of DTYPES: modules compute in `compute`, gradients are added up in `reduce`. output: None for as computed."""

    compute: str = "fp32"
    reduce: str = "fp32"
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Spaces in which optimizer state and parameters rest, None for on the device.

    path: the folder of files. step: one of STEPS.
    """

    optimizer: str | None = None
    params: str | None = None
    path: str = OFFLOAD_PATH
    step: str = STEPS[0]


@dataclass(frozen=True, slots=True)
class Config:
    """Groups in the order of the file. path: for messages. text: the form that is sent.

    A group named DATA_PARALLEL is that of `gt: data_parallel`. zero: the stage of ZeRO. checkpointed: patterns of modules
    whose activations backward computes again.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    modules: tuple[Rule, ...] = ()
    schedule: str | None = None
    zero: int = 0
    precision: Precision = Precision()
    checkpointed: tuple[str, ...] = ()
    offload: Offloaded = Offloaded()
    bucket: int = BUCKET_BYTES
    path: str = ""
    text: str = ""

    def where(self, name: str) -> str:
        """`pp_stage3 (sharding.yaml:14)`: a group in an error."""
        return f"{name} ({self.path or 'config'}:{self.groups[name].line})"


def fault_of_folder(path: str) -> str:
    """The reason why a text cannot be `path` in `offload`, "" if it can. Workers make this folder."""
    if len(path) > MAX_FOLDER_CHARACTERS:
        return f"has {len(path)} characters, at most {MAX_FOLDER_CHARACTERS} are taken"
    if not path.startswith("/") or not path.isprintable():
        return f"is {path[:80]!r}, want {OFFLOAD_KEYS['path']}, of printable characters"
    return ""


def fault_of_name(name: str) -> str:
    """The reason why a text cannot be the name of a group, "" if it can.

    A character without a glyph would make two names look alike in an error, or divide a line of a log.
    """
    if len(name) > MAX_GROUP_CHARACTERS:
        return f"has {len(name)} characters, at most {MAX_GROUP_CHARACTERS} are taken"
    odd = next((character for character in name if character in NO_NAME or not character.isprintable()), None)
    if odd is not None:
        return f"has the character {odd!a}, want printable characters other than {' and '.join(map(repr, NO_NAME))}"
    return "" if name.strip() else "is blank, want a name"
