"""`data_parallel` and `zero` in a config: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from gt.config.load import load
from gt.config.schema import BUCKET_BYTES
from gt.dispatcher.sharding.groups import Groups
from gt.errors import ConfigError

STAGED = "a: {workers: [0]}\nb: {workers: [1]}\n"
TENSOR = "s: {workers: [0, 1]}\ns_colpar: {workers: [0, 1]}\n"

REFUSED = [
    ("gt: {zero: 4}", "gt (f.yaml:1): zero is 4, want 0, 1, 2 or 3"),
    ("gt: {zero: true}", "gt (f.yaml:1): zero is 'true', want 0, 1, 2 or 3"),
    ("gt:\n  data_parallel: [0, 1]\n  zeros: 1", "gt (f.yaml:3): unknown key 'zeros' in gt; did you mean 'zero'?"),
    ("gt: {zero: 1}", "no group has several workers that split data"),
    (STAGED + "gt: {zero: 2}", "no group has several workers that split data"),
    (TENSOR + "gt: {zero: 3}", "no group has several workers that split data"),
    ("gt: {data_parallel: tp}", "data_parallel is 'tp', want a list of worker numbers, null for all, or dp"),
    ("gt: {data_parallel: []}", "workers is an empty list"),
    ("gt: {data_parallel: [0, 0]}", "worker 0 is named twice"),
    ("gt: {data_parallel: [[0, 1], [2, 3]]}", "data_parallel is a list of lists"),
    ("data_parallel: {workers: [0]}\ngt: {data_parallel: [0, 1]}", "line 1 has one: rename that"),
    ("gt: {precision: int8}", "precision is 'int8', want fp32, bf16 or fp16"),
    ("gt: {precision: {reduce: bf16}}", "precision has no compute"),
    ("gt: {precision: {compute: bf16, reduce: fp16}}", "reduce is fp16 with compute bf16"),
    ("gt: {precision: {compute: fp16, reduce: fp16}}", "sums of scaled gradients overflow"),
    ("gt: {precision: {compute: bf16, sum: fp32}}", "unknown key 'sum' in precision"),
    ("gt: {activation_checkpoint: {}}", "activation_checkpoint has no modules"),
    ("gt: {activation_checkpoint: {modules: []}}", "modules is an empty list"),
    ("gt: {bucket: 12 parsecs}", "bucket is '12 parsecs', want bytes of gradients, as 25MiB"),
    ("gt: {bucket: 0MiB}", "bucket is '0MiB', want bytes of gradients"),
    (f"gt: {{bucket: {'9' * 400}MiB}}", "bucket is '99999"),
    ("gt: {bucket: [1]}", "bucket is a list, want bytes of gradients"),
    ("gt: {activation_checkpoint: [a]}", "activation_checkpoint is a list, want a mapping"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_a_setting_that_makes_no_sense_is_refused(text, said):
    with pytest.raises(ConfigError) as raised:
        load(text, "f.yaml")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "gt: {data_parallel: [0, 1], zero: 3}",
        "gt: {data_parallel: [0], zero: 1}",
        "gt: {data_parallel: null, zero: 2, offload: {optimizer: cpu}}",
        "s: {workers: [[0, 1], [2, 3]]}\ns_colpar: {workers: [[0, 1], [2, 3]]}\ngt: {zero: 2}",
        "s: {workers: [0, 1]}\ngt: {data_parallel: dp, zero: 1, schedule: 1f1b}",
        "s: {workers: [0, 1]}\ngt: {zero: 3, schedule: 1f1b}",
    ],
)
def test_a_stage_of_zero_needs_an_axis_of_data(text):
    assert load(text).zero > 0


def test_ops_outside_of_groups_run_on_the_data_parallel_workers():
    groups = Groups(load("gt: {data_parallel: [2, 3]}\nother: {workers: [0]}"))
    assert [groups.find(path)[0].mesh.workers for path in ("", "other", "unknown")] == [(2, 3), (0,), (2, 3)]
    assert groups.find("unknown")[1] == ["unknown"]
    assert Groups(load("other: {workers: [0]}")).find("")[0] is None


def test_a_bucket_is_a_number_of_bytes():
    assert load("gt: {bucket: 25MiB}").bucket == 25 << 20
    assert load("gt: {bucket: 1 B}").bucket == 1
    assert load("gt: {data_parallel: [0, 1]}").bucket == BUCKET_BYTES


def test_where_an_offloaded_step_is_computed():
    text = "gt: {data_parallel: null, offload: {optimizer: cpu, step: STEP}}"
    assert [load(text.replace("STEP", step)).offload.step for step in ("auto", "host", "device")] == ["auto", "host", "device"]
    assert load("gt: {data_parallel: null, offload: {optimizer: cpu}}").offload.step == "auto"
    with pytest.raises(ConfigError, match="step is 'gpu', want auto, host or device"):
        load(text.replace("STEP", "gpu"))


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("relative", r"path is 'relative', want the absolute path of a folder, of printable characters"),
        ('"/a\\0b"', r"path is '/a\\x00b', want the absolute path"),
        ('"/a\\e[2J\\nERROR"', r"path is '/a\\x1b\[2J\\nERROR', want the absolute path"),
        ("/" + "a/" * 1000, "path has 2001 characters, at most 1024 are taken"),  # makedirs recurses by parts of a path
    ],
)
def test_a_folder_that_workers_could_not_make_is_refused(path, fault):
    with pytest.raises(ConfigError, match=fault):
        load(f"gt: {{offload: {{optimizer: nvme, path: {path}}}}}")
