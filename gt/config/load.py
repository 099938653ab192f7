"""YAML text -> Config. Every fault is a ConfigError that names group, key, file and line.

The text is composed to nodes, not to values, because only nodes have lines and show duplicate keys. The author may be hostile,
and aliases expand a short text, so values are counted as they are read.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

import yaml

from gt.config.schema import (
    CHECKPOINT_KEYS,
    DATA_AXIS,
    DATA_PARALLEL,
    DTYPES,
    GROUP_KEYS,
    GT_KEYS,
    MAX_AXIS,
    MAX_FUSED_PARTS,
    OFFLOAD_KEYS,
    OFFLOAD_PATH,
    PRECISION_KEYS,
    RESERVED,
    RULE_KEYS,
    SHARD_KEYS,
    SPACES,
    STAGES,
    STEPS,
    SUFFIX_AXIS,
    Config,
    Group,
    Offloaded,
    Precision,
    Rule,
    fault_of_folder,
    fault_of_name,
)
from gt.errors import ConfigError
from gt.ir.schedules import NAMES, asked
from gt.ir.text import in_bytes

MAX_CONFIG_VALUES = 8192  # keys and values of a config, with aliases expanded
MAX_NESTING_LEVELS = 16  # lists and mappings within one another, and signs of nesting in a line
MAX_HINT_CHARACTERS, MAX_HINT_NAMES = 64, 64  # characters of a name, and names, among which `hint` looks for a similar one
TOO_DEEP = f"nested too deep: more than {MAX_NESTING_LEVELS} lists and mappings within one another"
MAX_COMPARED_NAMES = 3  # names that `hint` compares by difflib, which takes 0.5 ms for each of 64 characters
MAX_SHOWN_NAMES, MAX_SHOWN_CHARACTERS = 20, 80  # names in an error, characters of a value in an error
_NESTED = re.compile(rf"(?:[-?:][ \t]+){{{MAX_NESTING_LEVELS}}}")  # libyaml reads each by a call within a call
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
WORKERS = "write workers: [0, 1], or workers: null for all"
OTHER_NAMES = {name: "workers" for name in ("devices", "gpus", "ranks", "hosts", "nodes")}  # keys of other tools, and GT's
DEGREES = ("tp", "pp", "dp", "tensor_parallel", "pipeline_parallel", "data_parallel_size")  # other tools' keys
MAX_INTEGER = (1 << 63) - 1  # of any number in a config
EXAMPLES = {"the config": ", such as `stage0: {workers: [0, 1]}`", "the group": ", such as `workers: [0, 1]`"}
LAYOUTS = "; ready configs have such layouts, as gt:llama/tp2"
BROKEN = "check the indentation (spaces, no tabs) and the brackets there and above, and the space after each colon"


def load(text: str, path: str = "") -> Config:
    """The config of a YAML text. An empty text has no groups. path: for messages."""
    reader = _Reader(path)
    root = reader.compose(text)
    if root is None:
        return Config(path=path, text=text)
    # 1. Groups, in the order of the file. `gt:` names groups, so it is read last, wherever it is written.
    groups: dict[str, Group] = {}
    reserved: yaml.Node | None = None
    for name, key, value in reader.entries(root, "the config"):
        if name == RESERVED:
            reserved = value
        else:
            if name in GT_KEYS and not _may_be_group(value):
                shown = value.value[:MAX_SHOWN_CHARACTERS] if isinstance(value, yaml.ScalarNode) else "..."
                reader.fail("", _line(key), f"{name} is no group: write it as a key of gt, `gt: {{{name}: {shown}}}`")
            groups[name] = reader.group(name, key, value)

    # 2. Names of groups within groups, then the settings.
    for group in groups.values():
        if group.backward is not None and group.backward not in groups:
            unknown = f"{group.backward[:MAX_SHOWN_CHARACTERS]!r}{hint(group.backward, groups)}"
            reader.fail(group.name, group.line, f"backward: no group {unknown}")
    settings = reader.reserved(reserved, groups) if reserved is not None else {}
    return Config(groups, **settings, path=path, text=text)


def resolve(config: Config, workers: Iterable[int]) -> Config:
    """The config in a session of these workers, which the groups of `workers: null` name all."""
    if not any(group.everyone for group in config.groups.values()):
        return config
    rows = (tuple(workers),)
    groups = {n: replace(g, workers=rows, everyone=False) if g.everyone else g for n, g in config.groups.items()}
    return replace(config, groups=groups)


def check_workers(config: Config, names: list[str]) -> None:
    """Raise ConfigError for the first group with a worker that is not in `names`."""
    for group in config.groups.values():
        for worker in group.flat:
            if worker >= len(names):
                have = f"there are {len(names)}: {', '.join(names)}" if names else "there is none"
                raise ConfigError(
                    f"{config.where(group.name)} names worker {worker}, but {have}; workers are counted from 0: "
                    "start more, or name fewer"
                )


def hint(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'workers'?`, or the known names where none is similar."""
    # difflib takes time with the square of the lengths, and a hostile config has many long names. So long names are left out,
    # the rest is ranked by a cheap similarity, and only the best few are compared.
    names = list(islice(known, MAX_HINT_NAMES))
    near = [name for name in names if len(name) <= MAX_HINT_CHARACTERS] if len(word) <= MAX_HINT_CHARACTERS else []
    likely = sorted(near, key=lambda name: common_letters(word, name) / (len(word) + len(name) or 1), reverse=True)
    close = difflib.get_close_matches(word, likely[:MAX_COMPARED_NAMES], 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    more = ", ..." if len(names) > MAX_SHOWN_NAMES else ""
    return f"; known: {', '.join(f'{name:.64}' for name in names[:MAX_SHOWN_NAMES])}{more}" if names else ""


def common_letters(a: str, b: str) -> int:
    """Length of the longest common subsequence, all letters of `a` at once (Hyyro 2004): difflib finds no longer one."""
    # Bit-parallel dynamic programming over the columns of the usual table. A 0 in `rest` is a step by one in its column, so the
    # number of zeros is the length.
    places: dict[str, int] = {}
    for place, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << place
    whole = (1 << len(a)) - 1
    rest = whole  # bits of letters that are not in the subsequence
    for letter in b:
        both = rest & places.get(letter, 0)
        rest = ((rest + both) | (rest - both)) & whole
    return len(a) - rest.bit_count()


class _Reader:
    """Converts nodes to values. Has the file's name for messages."""

    def __init__(self, path: str) -> None:
        self.file = path or "config"
        self.scalars = yaml.constructor.SafeConstructor()
        self.count = 0  # keys and values read so far

    def fail(self, group: str, line: int, message: str) -> NoReturn:
        file = self.file[-200:]
        where = f"{group:.80} ({file}:{line})" if group else f"{file}:{line}"
        raise ConfigError(f"{where}: {message}")

    def count_entry(self, node: yaml.Node) -> None:
        """Count one more key or value."""
        self.count += 1
        if self.count > MAX_CONFIG_VALUES:
            self.fail("", _line(node), f"the config has more than {MAX_CONFIG_VALUES} keys and values: write it shorter")

    def compose(self, text: str) -> yaml.Node | None:
        # Three guards before anything recursive: dashes in one line, the depth event by event, and then the count of values.
        if deep := _NESTED.search(text):
            line = text.count("\n", 0, deep.start()) + 1
            self.fail("", line, f"nested too deep: {MAX_NESTING_LEVELS} dashes within one another in one line")
        try:
            self.check_depth(text)
            return yaml.compose(text, Loader=LOADER)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            # PyYAML has its own limit since 6.0.4, which brackets meet before the first event
            if "nesting depth" in str(error.problem):
                self.fail("", line, TOO_DEEP)
            self.fail("", line, f"not YAML: {error.problem or error.context!s:.200}; {BROKEN}")
        except UnicodeEncodeError as error:  # half a surrogate pair
            line = text.count("\n", 0, error.start) + 1
            self.fail("", line, f"not YAML: the character {text[error.start]!a} is not allowed; remove it")
        except yaml.reader.ReaderError as error:
            line, character = text.count("\n", 0, error.position) + 1, text[error.position : error.position + 1]
            self.fail("", line, f"not YAML: the character {character!r} is not allowed; remove it")
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.file}: not YAML: {' '.join(str(error).split()):.200}; {BROKEN}") from error

    def check_depth(self, text: str) -> None:
        """Refuse deep nesting, event by event: libyaml's time grows with the square of the depth, and composing needs stack."""
        depth = 0
        for event in yaml.parse(text, Loader=LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_NESTING_LEVELS:
                self.fail("", _line(event), TOO_DEEP)

    def entries(self, node: yaml.Node, what: str, group: str = "") -> list[tuple[str, yaml.Node, yaml.Node]]:
        """(key, its node, the value's node) for each entry of a mapping with distinct names as keys."""
        if not isinstance(node, yaml.MappingNode):
            shown = self.show(node)
            space = ", with a space after the colon" if ":" in shown and ": " not in shown else ""
            ready = LAYOUTS if group in DEGREES else ""
            self.fail(group, _line(node), f"{what} is {shown}, want a mapping{EXAMPLES.get(what, '')}{space}{ready}")
        # YAML takes the last of two equal keys silently; here that is an
        # error. A merge key (<<) has another tag, and is refused too.
        seen: dict[str, int] = {}
        rows: list[tuple[str, yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            self.count_entry(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                self.fail(group, _line(key), f"{what} has the key {self.show(key)}, want a name")
            if key.value in seen:
                first = f"first in line {seen[key.value]}"
                self.fail(group, _line(key), f"{what} has {key.value[:MAX_SHOWN_CHARACTERS]!r} twice, {first}: keep one")
            seen[key.value] = _line(key)
            rows.append((key.value, key, value))
        return rows

    def known(self, node: yaml.Node, keys: dict[str, str], what: str, group: str = "") -> dict[str, yaml.Node]:
        """The values of a mapping, which may have only these keys."""
        values = {}
        for name, key, value in self.entries(node, what, group):
            # The most helpful advice first: a key of another tool, a similar key of ours, or a key of `shard`.
            if name not in keys:
                ready = LAYOUTS if name in DEGREES else ""
                other = OTHER_NAMES.get(name)
                advice = f"; did you mean {other!r}?" if other in keys else hint(name, keys)
                if keys is GROUP_KEYS and name in SHARD_KEYS:
                    advice = f": it is a key of shard; write shard: {{{name}: ..., workers: ...}}"
                self.fail(group, _line(key), f"unknown key {name[:MAX_SHOWN_CHARACTERS]!r} in {what}{advice}{ready}")
            values[name] = value
        return values

    def value(self, node: yaml.Node, kind: type, key: str, want: str, group: str = "") -> Any:
        """A scalar of exactly this type: true is not 1."""
        value = None
        self.count_entry(node)
        # Most values are small numbers, which need no constructor.
        if kind is int and _plain_number(node):
            return int(node.value)
        if isinstance(node, yaml.ScalarNode):
            with contextlib.suppress(ValueError, OverflowError, yaml.YAMLError):  # the text does not fit its tag
                value = self.scalars.construct_object(node)
        # Longer numbers may have no decimal text, which errors want
        if type(value) is not kind or (isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER):
            self.fail(group, _line(node), f"{key} is {self.show(node)}, want {want}")
        return value

    def show(self, node: yaml.Node) -> str:
        """The text of a value in an error."""
        if isinstance(node, yaml.ScalarNode):
            return repr(node.value[:MAX_SHOWN_CHARACTERS]) if node.value else "empty"
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

    def group(self, name: str, key: yaml.Node, node: yaml.Node) -> Group:
        line = _line(key)
        if fault := fault_of_name(name):
            self.fail("", line, f"the group {name[:MAX_SHOWN_CHARACTERS]!a} {fault}")
        if isinstance(node, yaml.ScalarNode) and not node.value:
            self.fail(name, line, f"the group is empty, want a mapping: {WORKERS}")
        keys = self.known(node, GROUP_KEYS, "the group", name)

        # `shard` may have keys of the group itself: either form is one mapping from here on.
        axis, shard = None, self.known(keys["shard"], SHARD_KEYS, "shard", name) if "shard" in keys else {}
        for both in keys.keys() & shard.keys():
            self.fail(name, _line(keys[both]), f"{both} both in the group and in its shard; keep one")
        if "shard" in keys and "workers" not in shard and "workers" not in keys:
            self.fail(name, _line(keys["shard"]), f"shard has no workers; {WORKERS}")
        if "axis" in shard:
            axis = self.value(shard["axis"], int, "axis", SHARD_KEYS["axis"], name)
        keys = {**keys, **shard}

        # A group without workers places nothing, which makes sense only for `compile`.
        workers, backward = keys.get("workers"), keys.get("backward")
        compiled, replicated = (
            key in keys and self.value(keys[key], bool, key, GROUP_KEYS[key], name) for key in ("compile", "replicated")
        )
        if workers is None and (replicated or not compiled):
            self.fail(name, line, f"the group has no workers; {WORKERS}")
        everyone = workers is not None and _everyone(workers)
        rows, nested = ((), False) if workers is None or everyone else self.workers(name, workers)
        if replicated and name.endswith(tuple(SUFFIX_AXIS)):
            self.fail(name, line, f"replicated, but a group named *_{name.rpartition('_')[2]} splits weights: keep one of them")
        return Group(
            name,
            self.axis(name, line, axis),
            rows,
            nested,
            None if backward is None else self.value(backward, str, "backward", GROUP_KEYS["backward"], name),
            compiled,
            line,
            everyone,
            replicated,
        )

    def axis(self, name: str, line: int, axis: int | None) -> int:
        """The axis, which has to agree with the group's suffix; by default the suffix's axis, else 0."""
        if axis is not None and not 0 <= axis <= MAX_AXIS:
            self.fail(
                name,
                line,
                f"axis is {axis}, want a dim from 0 to {MAX_AXIS}: 0 splits a batch over the workers, which is the default; "
                "a _colpar group has 1, a _rowpar group 0",
            )
        # The suffix decides; a written axis may only agree with it.
        for suffix, want in SUFFIX_AXIS.items():
            if name.endswith(suffix):
                if axis is not None and axis != want:
                    clash = f"axis is {axis}, but a group named *{suffix} has axis {want}"
                    self.fail(name, line, f"{clash}: leave axis out, or rename the group")
                return want
        return 0 if axis is None else axis

    def workers(self, name: str, node: yaml.Node) -> tuple[tuple[tuple[int, ...], ...], bool]:
        """[0, 1] -> ((0, 1),), False; [[0, 1], [2, 3]] -> ((0, 1), (2, 3)), True."""
        want = "a list of worker numbers such as [0, 1], a list of such lists of one length, or null for all workers"
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            shown = "an empty list" if isinstance(node, yaml.SequenceNode) else self.show(node)
            self.fail(name, _line(node), f"workers is {shown}, want {want}")
        nested = isinstance(node.value[0], yaml.SequenceNode)
        rows = [node.value]
        if nested:
            rows = [row.value if isinstance(row, yaml.SequenceNode) else [] for row in node.value]
        if any(not row for row in rows) or len({len(row) for row in rows}) > 1:
            self.fail(name, _line(node), f"workers has rows of different lengths, want {want}")
        numbers = [[self.value(item, int, "a worker", "a number from 0, as in [0, 1]", name) for item in row] for row in rows]

        # A worker twice would hold two pieces of one tensor under one id.
        seen: set[int] = set()
        for number in (number for row in numbers for number in row):
            if number < 0:
                self.fail(name, _line(node), f"worker {number} is negative: workers are counted from 0")
            if number in seen:
                self.fail(name, _line(node), f"worker {number} is named twice: name it once")
            seen.add(number)
        return tuple(tuple(row) for row in numbers), nested

    def reserved(self, node: yaml.Node, groups: dict[str, Group]) -> dict[str, Any]:
        """The settings under `gt:`, as fields of a Config. `data_parallel` adds its group to `groups`."""
        # data_parallel first, since it makes a group that modules may name and ZeRO may need.
        keys = self.known(node, GT_KEYS, RESERVED, RESERVED)
        schedule, rules = keys.get("schedule"), tuple[Rule, ...]()
        if "data_parallel" in keys:
            self.data_parallel(keys["data_parallel"], groups)
        if "modules" in keys:
            rules = tuple(
                self.rule(pattern, key, value, groups)
                for pattern, key, value in self.entries(keys["modules"], "modules", RESERVED)
            )
        name = None if schedule is None else self.value(schedule, str, "schedule", GT_KEYS["schedule"], RESERVED)
        try:
            asked(name or NAMES[0])
        except ValueError as error:
            self.fail(RESERVED, _line(schedule or node), str(error))
        zero = self.zero(keys["zero"], groups) if "zero" in keys else 0
        settings = {"modules": rules, "schedule": name, "zero": zero}
        if "precision" in keys:
            settings["precision"] = self.precision(keys["precision"])
        if "activation_checkpoint" in keys:
            settings["checkpointed"] = self.checkpointed(keys["activation_checkpoint"])
        if "offload" in keys:
            settings["offload"] = self.offload(keys["offload"], zero)
        if "bucket" in keys:
            settings["bucket"] = self.bucket(keys["bucket"])
        return settings

    def bucket(self, node: yaml.Node) -> int:
        """Bytes of gradients that are reduced together."""
        text = self.value(node, str, "bucket", GT_KEYS["bucket"], RESERVED)
        nbytes = in_bytes(text)
        if nbytes is None or nbytes < 1:
            self.fail(RESERVED, _line(node), f"bucket is {self.show(node)}, want {GT_KEYS['bucket']}")
        return int(nbytes)

    def precision(self, node: yaml.Node) -> Precision:
        """One dtype, in which modules compute, or a mapping."""
        if not isinstance(node, yaml.MappingNode):
            return Precision(self.dtype(node, "precision", GT_KEYS["precision"]))
        keys = self.known(node, PRECISION_KEYS, "precision", RESERVED)
        if "compute" not in keys:
            self.fail(RESERVED, _line(node), "precision has no compute, want the dtype in which modules compute")
        settings = {key: self.dtype(value, key, PRECISION_KEYS[key]) for key, value in keys.items()}

        # Sums in less than the compute dtype would lose what compute had; fp16 sums overflow under loss scaling.
        compute, reduce = settings["compute"], settings.get("reduce", "fp32")
        if reduce not in ("fp32", compute):
            self.fail(
                RESERVED,
                _line(keys["reduce"]),
                f"reduce is {reduce} with compute {compute}: gradients are added up in fp32 or as they are computed; "
                f"write reduce: {'fp32' if compute == 'fp16' else compute}, or leave reduce out",
            )
        if reduce == "fp16":
            self.fail(RESERVED, _line(keys["reduce"]), "reduce is fp16: sums of scaled gradients overflow; leave reduce out")
        return Precision(**settings)

    def offload(self, node: yaml.Node, zero: int) -> Offloaded:
        """Spaces in which optimizer state and parameters rest."""
        keys = self.known(node, OFFLOAD_KEYS, "offload", RESERVED)
        settings = {key: self.value(value, str, key, OFFLOAD_KEYS[key], RESERVED) for key, value in keys.items()}
        for key in ("optimizer", "params"):
            if settings.get(key, "none") not in SPACES:
                self.fail(RESERVED, _line(keys[key]), f"{key} is {self.show(keys[key])}, want {OFFLOAD_KEYS[key]}")
        path, step = settings.pop("path", OFFLOAD_PATH), settings.pop("step", STEPS[0])
        if step not in STEPS:
            self.fail(RESERVED, _line(keys["step"]), f"step is {self.show(keys['step'])}, want {OFFLOAD_KEYS['step']}")
        fault = fault_of_folder(path)
        if fault:
            self.fail(RESERVED, _line(keys["path"]), f"path {fault}")

        # Below stage 3 each worker keeps whole parameters for its use, so moving them out would save nothing.
        spaces = {key: None if space == "none" else space for key, space in settings.items()}
        if spaces.get("params") and zero < STAGES[-1]:
            self.fail(
                RESERVED,
                _line(keys["params"]),
                f"params rest in {spaces['params']} with zero {zero}, which keeps whole copies on the device: write zero: 3",
            )
        return Offloaded(**spaces, path=path, step=step)

    def dtype(self, node: yaml.Node, key: str, want: str) -> str:
        name = self.value(node, str, key, want, RESERVED)
        if name not in DTYPES:
            self.fail(RESERVED, _line(node), f"{key} is {self.show(node)}, want {want}")
        return str(name)

    def checkpointed(self, node: yaml.Node) -> tuple[str, ...]:
        """Patterns of modules whose activations backward computes again."""
        found = self.known(node, CHECKPOINT_KEYS, "activation_checkpoint", RESERVED)
        named, want = found.get("modules"), CHECKPOINT_KEYS["modules"]
        if named is None:
            self.fail(RESERVED, _line(node), f"activation_checkpoint has no modules, want {want}")
        patterns = named.value if isinstance(named, yaml.SequenceNode) else [named]
        if not patterns:
            self.fail(RESERVED, _line(named), f"modules is an empty list, want {want}")
        return tuple(self.value(pattern, str, "modules", want, RESERVED) for pattern in patterns)

    def data_parallel(self, node: yaml.Node, groups: dict[str, Group]) -> None:
        """Workers, which become a group of that name, or the axis that groups split data along: there is only one."""
        line, everyone = _line(node), _everyone(node)
        if isinstance(node, yaml.ScalarNode) and not everyone:
            if self.value(node, str, DATA_PARALLEL, GT_KEYS[DATA_PARALLEL], RESERVED) != DATA_AXIS:
                self.fail(RESERVED, line, f"{DATA_PARALLEL} is {self.show(node)}, want {GT_KEYS[DATA_PARALLEL]}")
            return
        if DATA_PARALLEL in groups:
            other = groups[DATA_PARALLEL].line
            self.fail(RESERVED, line, f"{DATA_PARALLEL} makes a group of this name, and line {other} has one: rename that")
        rows, nested = ((), False) if everyone else self.workers(RESERVED, node)
        if nested:
            self.fail(RESERVED, line, f"{DATA_PARALLEL} is a list of lists, want a list such as [0, 1]: it has one axis")
        groups[DATA_PARALLEL] = Group(DATA_PARALLEL, 0, rows, line=line, everyone=everyone)

    def zero(self, node: yaml.Node, groups: dict[str, Group]) -> int:
        """The stage of ZeRO. Above 0, some group has a data-parallel axis, be it of the one worker of `data_parallel`."""
        stage = self.value(node, int, "zero", GT_KEYS["zero"], RESERVED)
        if stage not in STAGES:
            self.fail(RESERVED, _line(node), f"zero is {stage}, want {GT_KEYS['zero']}")
        # An axis of data: `data_parallel`, several rows of workers, or one row that is not split by a suffix.
        split = DATA_PARALLEL in groups or any(
            len(group.workers) > 1 or _splits_data(group, groups) for group in groups.values()
        )
        if stage and not split:
            self.fail(
                RESERVED,
                _line(node),
                f"zero is {stage}, and no group has several workers that split data, over which weights could be sharded: "
                "write data_parallel: [0, 1], or the workers of a group as [[0], [1]]",
            )
        return int(stage)

    def rule(self, pattern: str, key: yaml.Node, node: yaml.Node, groups: dict[str, Group]) -> Rule:
        """One entry of modules: a group's name, a suffix, a list of groups, or {group, parts} with one of them."""
        where, parts, named = f"{RESERVED} modules {pattern[:MAX_SHOWN_CHARACTERS]!r}", 1, node
        if isinstance(node, yaml.MappingNode):
            keys = self.known(node, RULE_KEYS, "the rule", where)
            if "group" not in keys:
                self.fail(where, _line(key), "the rule has no group")
            named = keys["group"]
            if "parts" in keys:
                parts = self.value(keys["parts"], int, "parts", RULE_KEYS["parts"], where)
                if not 1 <= parts <= MAX_FUSED_PARTS:
                    self.fail(where, _line(keys["parts"]), f"parts is {parts}, want {RULE_KEYS['parts']}")

        # A list of stages, a suffix (the group of the stage around the module), or the name of one group.
        if isinstance(named, yaml.SequenceNode):
            stages = tuple(self.named(node, where, groups) for node in named.value)
            if not stages:
                self.fail(where, _line(named), "the list of groups is empty")
            return Rule(pattern, "", parts, _line(key), stages)
        if isinstance(named, yaml.ScalarNode) and named.value in SUFFIX_AXIS:
            if not any(group.endswith(named.value) for group in groups):
                self.fail(where, _line(named), f"no group ends in {named.value}{hint(named.value, groups)}")
            return Rule(pattern, named.value, parts, _line(key))
        return Rule(pattern, self.named(named, where, groups), parts, _line(key))

    def named(self, node: yaml.Node, where: str, groups: dict[str, Group]) -> str:
        """The name of an existing group."""
        group = self.value(node, str, "group", RULE_KEYS["group"], where)
        if group not in groups:
            self.fail(where, _line(node), f"no group {group[:MAX_SHOWN_CHARACTERS]!r}{hint(group, groups)}")
        return str(group)


def _may_be_group(node: yaml.Node) -> bool:
    """True for a mapping that is empty, or has a key of groups or a merge of others."""
    if not isinstance(node, yaml.MappingNode):
        return False
    names = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
    return not node.value or not names.isdisjoint({*GROUP_KEYS, "<<"})


def _everyone(node: yaml.Node) -> bool:
    """True for null, as it is written; an empty value is a mistake more often."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null" and bool(node.value)


def _plain_number(node: yaml.Node) -> bool:
    """True for a plain number from 0 to 9999, as most values of a large config are."""
    if node.tag != "tag:yaml.org,2002:int" or len(node.value) > 4:
        return False
    return node.value.isdecimal() and node.value.isascii() and (node.value[0] != "0" or len(node.value) == 1)


def _splits_data(group: Group, groups: dict[str, Group]) -> bool:
    """True for a group whose one list of workers is an axis of data, not of tensor parallelism."""
    tensor = any(group.name.endswith(suffix) or group.name + suffix in groups for suffix in SUFFIX_AXIS)
    return (group.everyone or len(group.flat) > 1) and not tensor


def _line(node: yaml.Node | yaml.Event) -> int:
    return int(node.start_mark.line) + 1  # type: ignore[union-attr]
