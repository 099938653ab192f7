"""gt.save and gt.load on workers: pieces go straight between workers and files, in any layout, and errors change nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gt
from gt.client import current_session
from gt.client.checkpoint import saving
from gt.client.checkpoint.folder import NewFolder
from gt.client.exchange.arenas import ClientArenas
from tests.helpers.limits import limit
from tests.helpers.serving import settled

DP4 = "gt: {data_parallel: [0, 1, 2, 3], zero: 3}"
TP4 = "a_colpar: {workers: [0, 1, 2, 3]}\nb_rowpar: {workers: [0, 1, 2, 3]}\n"


class Net(nn.Module):
    """Layers that groups may split."""

    def __init__(self, groups: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(48, 96), nn.Linear(96, 48), nn.BatchNorm1d(48)
        self.groups = groups

    def forward(self, x):
        if not self.groups:
            return self.norm(self.b(torch.relu(self.a(x))))
        with gt.signal.context("a_colpar"):
            x = torch.relu(self.a(x))
        with gt.signal.context("b_rowpar"):
            x = self.b(x)
        return self.norm(x)


def trained(groups=False, steps=2, seed=0):
    torch.manual_seed(seed)
    model = Net(groups).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        step(model, optimizer, schedule)
    return model, optimizer, schedule


def step(model, optimizer, schedule):
    loss = (model(torch.randn(16, 48, device="remote")) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.item()


def counted(key):
    return [worker[key] for worker in settled()["workers"]]


def relayed():
    return gt.stats()["dispatcher"]["tensor_bytes_relayed"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key].cpu(), b[key].cpu()) for key in a)


@pytest.mark.parametrize("config", ["", DP4, TP4])
def test_training_goes_on_bit_for_bit(session, tmp_path, plain_threads, config):
    session(config)
    groups = config is TP4
    parts = trained(groups)
    names = ("model", "optimizer", "schedule")
    gt.save({**dict(zip(names, parts)), "random": gt.RandomState(), "seen": [3, "x"]}, tmp_path / "c")
    losses = [step(*parts) for _ in range(4)]
    session(config)
    fresh = trained(groups, 0, 5)
    state = gt.load(tmp_path / "c", into={**dict(zip(names, fresh)), "random": gt.RandomState(), "seen": [0, ""]})
    assert state["seen"] == [3, "x"]
    assert [step(*fresh) for _ in range(4)] == losses


class Tied(nn.Module):
    """An embedding whose weight is the head's, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_norm_of_gradients_goes_on_bit_for_bit(session, tmp_path, stage):
    """The first norm of a session adds up gradients in the order of later ones."""
    config = f"gt: {{data_parallel: [0, 1], zero: {stage}}}"
    tokens = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(1))

    def parts(seed):
        torch.manual_seed(seed)
        model = Tied().to("remote")
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def norms(model, optimizer, steps):
        made = []
        for _ in range(steps):
            logits = model(tokens[:, :-1].to("remote")).flatten(0, 1)
            nn.functional.cross_entropy(logits, tokens[:, 1:].flatten().to("remote")).backward()
            made.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return made

    session(config)
    first = parts(0)
    norms(*first, 4)
    gt.save({**dict(zip(("model", "optimizer"), first)), "random": gt.RandomState()}, tmp_path / "c")
    want = norms(*first, 4)
    session(config)
    again = parts(9)
    gt.load(tmp_path / "c", into={**dict(zip(("model", "optimizer"), again)), "random": gt.RandomState()})
    assert norms(*again, 4) == want


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_the_loss_scale_goes_on(session, tmp_path, fused, captured):
    """Steps are left out until the scale is small enough. A new scale would leave out some more after the load."""
    config = "gt: {data_parallel: [0, 1], zero: 3, precision: fp16}"
    data = torch.randn(12, 16, 12, generator=torch.Generator().manual_seed(1))

    def parts(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 13), nn.Tanh(), nn.Linear(13, 12)).to("remote")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

        def step(batch):
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean() * 1000
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, gt.compile(step) if captured else step

    def losses(step, batches):
        return [step(batch.to("remote")).item() for batch in batches]

    session(config)
    model, optimizer, step = parts(0)
    losses(step, data[:8])
    save = gt.save({"model": model, "optimizer": optimizer}, tmp_path / "c", wait=False)
    want = losses(step, data[8:])
    save.wait()
    scale = float(current_session.Current.loss_scale["scale"])
    assert scale < 2.0**16 and len(set(want)) == 4
    session(config)
    model, optimizer, step = parts(9)
    gt.load(tmp_path / "c", into={"model": model, "optimizer": optimizer})
    assert losses(step, data[8:]) == want and float(current_session.Current.loss_scale["scale"]) == scale
    assert gt.load(tmp_path / "c").keys() == {"model", "optimizer"}
    # Into a model alone, nothing is trained on; without the key there is no scale
    gt.load(tmp_path / "c", into={"model": parts(1)[0]})
    session("")
    model, optimizer, step = parts(9)
    gt.load(tmp_path / "c", into={"model": model, "optimizer": optimizer})
    assert not current_session.Current.loss_scale


@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_state_of_another_shape_goes_on_bit_for_bit(session, tmp_path, stage):
    """Adafactor keeps sums of rows and columns, and takes norms. Loaded ones were split as data are."""
    data = torch.randn(8, 16, 12, generator=torch.Generator().manual_seed(1))

    def parts(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 13), nn.Tanh(), nn.Linear(13, 7)).to("remote")
        return model, torch.optim.Adafactor(model.parameters(), lr=0.01)

    def steps(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            model(batch.to("remote")).square().mean().backward()
            optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    session(f"gt: {{data_parallel: [0, 1], zero: {stage}}}")
    first, again = parts(0), parts(9)
    steps(*first, data[:4])
    gt.save(dict(zip(("model", "optimizer"), first)), tmp_path / "c")
    want = steps(*first, data[4:])
    gt.load(tmp_path / "c", into=dict(zip(("model", "optimizer"), again)))
    assert equal(steps(*again, data[4:]), want)
    layouts = [[gt.inspect(v)["layout"] for s in o.state.values() for v in s.values() if v.shape] for _, o in (first, again)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("before, after", [("", DP4), (DP4, ""), (DP4, TP4), (TP4, DP4), (TP4, "")])
def test_a_checkpoint_of_one_layout_is_read_in_another(session, tmp_path, before, after):
    session(before)
    parts = trained(before is TP4)
    gt.save({"model": parts[0], "optimizer": parts[1], "schedule": parts[2], "random": gt.RandomState()}, tmp_path / "c")
    losses = [step(*parts) for _ in range(4)]
    session(after)
    fresh = trained(after is TP4, 0, 5)
    into = {"model": fresh[0], "optimizer": fresh[1], "schedule": fresh[2], "random": gt.RandomState()}
    gt.load(tmp_path / "c", into=into)
    assert [step(*fresh) for _ in range(4)] == pytest.approx(losses, rel=1e-5)


def test_each_worker_writes_and_reads_its_own_pieces(session, tmp_path):
    session(DP4)
    parts = trained()
    written, read = counted("file_bytes_written"), counted("file_bytes_read")
    gt.save({"model": parts[0], "optimizer": parts[1]}, tmp_path / "c")
    mine = [b - a for a, b in zip(written, counted("file_bytes_written"))]
    rows = [load_file(path) for path in (tmp_path / "c").glob("*.safetensors")]
    total = sum(t.numel() * t.element_size() for row in rows for t in row.values() if t.dim())
    assert sum(mine) == pytest.approx(total, abs=100) and mine[4:] == [0] * 4
    assert all(n == pytest.approx(total / 4, rel=0.06) for n in mine[:4])
    fresh = trained(steps=0, seed=3)
    gt.load(tmp_path / "c", into={"model": fresh[0], "optimizer": fresh[1]})
    step(*fresh)
    mine = [b - a for a, b in zip(read, counted("file_bytes_read"))]
    assert sum(mine) < 1.3 * total and all(n == pytest.approx(total / 4, rel=0.3) for n in mine[:4])
    assert relayed() == 0


def test_plain_torch_and_the_library_read_it_and_theirs_is_read(one, tmp_path):
    model, _, _ = trained()
    gt.save(model, tmp_path / "c")
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    (file,) = set(index["weight_map"].values())
    plain = Net()
    plain.load_state_dict(load_file(tmp_path / "c" / file))
    assert equal(plain.state_dict(), model.state_dict())
    save_file(plain.state_dict(), tmp_path / "theirs.safetensors")
    other = Net().to("remote")
    gt.load(tmp_path / "theirs.safetensors", into=other)
    assert equal(plain.state_dict(), other.state_dict())
    loaded = gt.load(tmp_path / "theirs.safetensors")
    assert all(value.device.type == "remote" for value in loaded.values()) and equal(loaded, plain.state_dict())


def test_transformers_reads_it_and_its_folders_are_read(one, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config).to("remote")
    config.save_pretrained(tmp_path / "c")
    gt.save({"model": model, "step": 1}, tmp_path / "c")
    gt.save({"model": model, "step": 2}, tmp_path / "c")  # config.json stays
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "c")
    assert equal(theirs.state_dict(), model.state_dict())
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    with torch.no_grad():
        theirs.transformer.wte.weight.add_(1)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    gt.load(tmp_path / "theirs", into=model)
    assert equal(theirs.state_dict(), model.state_dict())
    with torch.device("meta"):
        empty = GPT2LMHeadModel(config)
    empty.tie_weights()
    gt.load(tmp_path / "theirs", into=empty)
    assert empty.lm_head.weight is empty.transformer.wte.weight and empty.lm_head.weight.device.type == "remote"
    assert equal(theirs.state_dict(), empty.state_dict())


def test_every_dtype_shape_and_place_survives(one, tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    remote = base.to("remote")
    state = {
        "cpu": base, "remote": remote, "view": remote[1:3, ::2], "transposed": remote.t(), "alias": remote,
        "scalar": torch.tensor(3, device="remote"), "empty": torch.empty(0, 3, device="remote"), "none": None,
        "bf16": remote.bfloat16(), "bool": remote > 3, "c64": (remote * 1j), "u8": [remote.to(torch.uint8)],
        "unused": torch.full((3,), 7.0, device="remote"), "conj": torch.tensor([1 + 2j]).conj(),
        "grad": torch.ones(3, device="remote", requires_grad=True), 5: {True: torch.tensor(1.5)}, "__metadata__": base + 1,
    }  # fmt: skip
    gt.save({"outer": state}, tmp_path / "c")
    made = gt.load(tmp_path / "c")["outer"]
    assert made.keys() == state.keys() and made["alias"] is made["remote"] and made["grad"].requires_grad
    flat = [(made[k], state[k]) for k in state if isinstance(state[k], torch.Tensor)]
    flat += [(made["u8"][0], state["u8"][0]), (made[5][True], state[5][True])]
    for a, b in flat:
        assert a.device == b.device and a.dtype == b.dtype and torch.equal(a.detach().cpu(), b.detach().cpu())


def test_a_state_without_remote_tensors_needs_no_session(tmp_path):
    gt.save({"model": {"w": torch.ones(3)}, "step": 1}, tmp_path / "c")
    assert current_session.Current.recorder is None
    assert gt.load(tmp_path / "c")["model"]["w"].tolist() == [1, 1, 1]
    assert current_session.Current.recorder is None


def test_a_model_of_several_files(one, tmp_path, monkeypatch):
    monkeypatch.setattr("gt.client.checkpoint.saving.FILE_BYTES", 10_000)
    model, _, _ = trained()
    gt.save(model, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 1
    fresh = Net().to("remote")
    gt.load(tmp_path / "c", into=fresh)
    assert equal(model.state_dict(), fresh.state_dict())


# ---- beside training


def test_training_goes_on_while_a_save_is_written(one, tmp_path):
    parts = trained()
    want = {key: value.cpu() for key, value in parts[0].state_dict().items()}
    handle = gt.save({"model": parts[0], "optimizer": parts[1]}, tmp_path / "c", wait=False)
    for _ in range(5):
        step(*parts)
    handle.wait()
    assert handle.done and equal(gt.load(tmp_path / "c")["model"], want)
    assert not equal(parts[0].state_dict(), want)
    second = gt.save(parts[0], tmp_path / "c", wait=False)
    third = gt.save(parts[0], tmp_path / "c", wait=False)  # waits for the second
    assert second.done
    third.wait()
    assert sorted(os.listdir(tmp_path)) == ["c"]


def test_the_end_of_a_session_waits_for_its_save(session, tmp_path):
    session()
    parts = trained()
    want = {key: value.cpu() for key, value in parts[0].state_dict().items()}
    gt.save(parts[0], tmp_path / "c", wait=False)
    session()
    assert equal(gt.load(tmp_path / "c"), want)


def test_shutdown_waits_for_a_save_of_a_session_that_began_before_the_import_of_gt_save(session, tmp_path, monkeypatch):
    monkeypatch.setattr(current_session, "on_connect", [])  # parts imported later were not there when the session began
    session()
    parts = trained()
    want = {key: value.cpu() for key, value in parts[0].state_dict().items()}
    handle = gt.save(parts[0], tmp_path / "c", wait=False)
    gt.shutdown()
    assert handle.done and equal(gt.load(tmp_path / "c", device="cpu"), want)


def test_workers_elsewhere_stream_their_pieces(session, tmp_path, monkeypatch):
    """Without a common disk the client writes what workers send, and sends what it reads."""
    monkeypatch.setattr(ClientArenas, "take", lambda self, nbytes: None)
    session(DP4)
    parts = trained()
    wide = torch.randn(700, 1000).to("remote")
    gt.save({"model": parts[0], "optimizer": parts[1], "wide": wide}, tmp_path / "c")
    handle = gt.save({"model": parts[0]}, tmp_path / "d", wait=False)
    want = {key: value.cpu() for key, value in parts[0].state_dict().items()}
    losses = [step(*parts) for _ in range(2)]
    handle.wait()
    before = counted("file_bytes_written"), counted("file_bytes_read")
    fresh = trained(steps=0, seed=4)
    state = gt.load(tmp_path / "c", into={"model": fresh[0], "optimizer": fresh[1]})
    assert torch.equal(state["wide"].cpu(), wide.cpu()) and equal(gt.load(tmp_path / "d")["model"], want)
    assert equal(fresh[0].state_dict(), want) and len(losses) == 2
    assert before == (counted("file_bytes_written"), counted("file_bytes_read"))


@pytest.mark.parametrize("left", [9000, 1_500_000])
def test_a_file_that_is_cut_after_the_load_is_an_error_of_its_tensors_alone(session, tmp_path, monkeypatch, left):
    """Before the first message of its values, or between two."""
    monkeypatch.setattr(ClientArenas, "take", lambda self, nbytes: None)
    session()
    gt.save({"model": {"w": torch.ones(500, 1000, device="remote")}}, tmp_path / "c")
    loaded = gt.load(tmp_path / "c")["model"]["w"]
    os.truncate(tmp_path / "c" / "model-00001-of-00001.safetensors", left)
    with pytest.raises(gt.OpFailed, match="the client cannot read its file: it was cut after it was opened"):
        loaded.sum().item()
    assert torch.ones(3, device="remote").sum().item() == 3


def test_ctrl_c_in_the_wait_for_an_earlier_save_lets_no_later_one_overtake_it(tmp_path, monkeypatch):
    allowed, commit = threading.Event(), NewFolder.commit

    def slow(self, manifest):
        assert allowed.wait(limit(30))
        commit(self, manifest)

    monkeypatch.setattr(NewFolder, "commit", slow)
    first = gt.save({"n": 1}, tmp_path / "c", wait=False)
    with monkeypatch.context() as patch:
        patch.setattr(first._ended, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gt.save({"n": 2}, tmp_path / "c")
    monkeypatch.setattr(NewFolder, "commit", commit)
    threading.Timer(0.05, allowed.set).start()
    gt.save({"n": 3}, tmp_path / "c")
    assert first.done and gt.load(tmp_path / "c") == {"n": 3}


def interrupted(*args):
    raise KeyboardInterrupt


class Turns:
    """A lock that says whenever somebody comes to it."""

    def __init__(self, lock, come):
        self._lock, self._come = lock, come

    def __enter__(self):
        self._come()
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


def test_saves_of_two_threads_are_written_one_after_the_other(monkeypatch, tmp_path):
    """Both were begun at once, and the first was awaited by nobody."""
    begun, here, allowed = [], threading.Event(), threading.Event()
    begin, commit = saving._Writer._begin, NewFolder.commit
    other = threading.Thread(target=lambda: gt.save({"n": 2}, tmp_path / "d", wait=False), daemon=True)

    def meet(self):
        begun.append(self._folder.target.name)
        if len(begun) == 1:
            other.start()
            assert here.wait(limit(30))
        else:
            here.set()
        begin(self)

    def slow(self, manifest):
        assert allowed.wait(limit(30))
        commit(self, manifest)
        begun.append("written")

    monkeypatch.setattr(saving._Writer, "_begin", meet)
    monkeypatch.setattr(NewFolder, "commit", slow)
    turns = Turns(threading.RLock(), lambda: begun and here.set())
    monkeypatch.setattr(saving._Current, "turn", turns, raising=False)
    gt.save({"n": 1}, tmp_path / "c", wait=False)
    allowed.set()
    other.join()
    saving.finish()
    assert begun == ["c", "written", "d", "written"]


def test_without_strict_what_only_one_has_is_left_alone(one, tmp_path):
    model = trained()[0]
    gt.save({"model": model, "more": {"x": torch.ones(2)}}, tmp_path / "c")
    other = nn.ModuleDict({"a": nn.Linear(48, 96), "head": nn.Linear(3, 3)}).to("remote")
    head, ema = other["head"].weight.cpu(), torch.zeros(3)
    into = {"model": other, "ema": ema}
    with pytest.raises(gt.CheckpointError, match=r"model\.head\.weight is not in .*b\.weight is in the checkpoint, and not in"):
        gt.load(tmp_path / "c", into=into)
    gt.load(tmp_path / "c", into=into, strict=False)
    assert torch.equal(other["a"].weight.cpu(), model.a.weight.cpu())
    assert torch.equal(other["head"].weight.cpu(), head) and ema.tolist() == [0, 0, 0]
    wrong = nn.ModuleDict({"a": nn.Linear(48, 95)}).to("remote")
    with pytest.raises(gt.CheckpointError, match=r"model\.a\.weight is float32\[96, 48\], want float32\[95, 48\]$|a\.bias"):
        gt.load(tmp_path / "c", into={"model": wrong}, strict=False)
    with torch.device("meta"):
        part = nn.ModuleDict({"a": nn.Linear(48, 96), "head": nn.Linear(3, 3)})
    gt.load(tmp_path / "c", into={"model": part}, strict=False)
    assert part["a"].weight.device.type == "remote" and part["head"].weight.device.type == "meta"


def test_a_generator_goes_on_where_it_was(tmp_path):
    generator = torch.Generator().manual_seed(3)
    gt.save({"sampler": generator}, tmp_path / "c")
    want = torch.randperm(10, generator=generator).tolist()
    fresh = torch.Generator()
    gt.load(tmp_path / "c", into={"sampler": fresh})
    assert torch.randperm(10, generator=fresh).tolist() == want
    gt.save({"sampler": torch.ones(3)}, tmp_path / "d")
    before = fresh.get_state()
    with pytest.raises(gt.CheckpointError, match="sampler refuses its state"):
        gt.load(tmp_path / "d", into={"sampler": fresh})
    assert torch.equal(fresh.get_state(), before)


# ---- what is wrong is named, and nothing changes


@pytest.fixture
def saved(one, tmp_path):
    parts = trained()
    gt.save({"model": parts[0], "optimizer": parts[1]}, tmp_path / "c")
    fresh = trained(seed=7)
    before = {key: value.cpu() for key, value in fresh[0].state_dict().items()}
    yield tmp_path / "c", fresh, before
    assert equal(fresh[0].state_dict(), before)


def damage(path, how):
    file = path / "model-00001-of-00001.safetensors"
    if how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "missing":
        file.unlink()
    elif how == "foreign":
        file.write_bytes(os.urandom(file.stat().st_size))
    elif how == "directory":
        file.unlink()
        file.mkdir()
    elif how == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif how == "manifest":
        (path / "gt.json").write_text((path / "gt.json").read_text()[:-5])
    elif how == "version":
        (path / "gt.json").write_text((path / "gt.json").read_text().replace('"version":1', '"version":2'))
    elif how == "index":
        (path / "optimizer.safetensors.index.json").unlink()
    elif how == "renamed":
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        file.write_bytes(data[:8] + data[8 : 8 + length].replace(b'"a.weight"', b'"x.weight"') + data[8 + length :])
    elif how == "outside":
        index = path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00001", "../model-00001"))
        manifest = path / "gt.json"
        made = json.loads(manifest.read_text())
        made["files"][index.name] = index.stat().st_size
        manifest.write_text(json.dumps(made))


@pytest.mark.parametrize(
    "how, said",
    [
        ("cut", r"has \d+ bytes, want \d+ bytes"),
        ("missing", "model-00001-of-00001.safetensors is missing"),
        ("foreign", "no safetensors file, or a damaged one"),
        ("directory", "is missing"),
        ("fifo", "is missing"),
        ("manifest", "gt.json is not JSON, or was cut"),
        ("version", "has version 2, this GT reads version 1"),
        ("index", "optimizer.safetensors.index.json is missing"),
        ("renamed", r"lacks 'a.weight', which .* names; .* has 'x.weight'"),
        ("outside", "names '../model-00001-of-00001.safetensors', want a file beside it"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(saved, how, said):
    path, fresh, _ = saved
    damage(path, how)
    with pytest.raises(gt.CheckpointError, match=said) as caught:
        gt.load(path, into={"model": fresh[0], "optimizer": fresh[1]})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "key, change, said",
    [
        ("sets", lambda sets: ["../model"], "it names '../model', want a file beside it"),
        ("sets", lambda sets: sets * 100_000, "sets has [0-9]+ names, of which 2 differ"),
        ("sets", lambda sets: {"model": 1}, "sets is a dict, want a list"),
        ("files", lambda files: files | {"/etc/passwd": 1}, "it names '/etc/passwd', want a file beside it"),
        ("files", lambda files: files | {"..": 1}, "it names '..', want a file beside it"),
        ("tensors", lambda rows: {name: 1 for name in rows}, "not a device and a truth value"),
        ("tensors", lambda rows: {}, "its state has 'model/a.bias', .* which its tensors lack"),
    ],
)
def test_a_manifest_that_save_does_not_write_is_refused_by_its_fault(saved, key, change, said):
    path, fresh, _ = saved
    manifest = json.loads((path / "gt.json").read_text())
    manifest[key] = change(manifest[key])
    (path / "gt.json").write_text(json.dumps(manifest))
    with pytest.raises(gt.CheckpointError, match=f"gt.json is damaged: ValueError .*{said}"):
        gt.load(path, into={"model": fresh[0], "optimizer": fresh[1]})


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("gt.json", b'["eps",1e-08]', b'["eps",1e-03]'),
        ("model.safetensors.index.json", b'"a.bias"', b'"b.bias"'),
        ("model-00001-of-00001.safetensors", b'"F32"', b'"I32"'),
        ("optimizer-00001-of-00001.safetensors", b'"state.0.exp_avg"', b'"state.0.exp_avh"'),
    ],
)
def test_what_was_changed_after_it_was_saved_is_named(saved, name, old, new):
    """A state all the same, of which the numbers are not those that were saved."""
    path, fresh, _ = saved
    data = (path / name).read_bytes()
    assert old in data
    (path / name).write_bytes(data.replace(old, new))
    with pytest.raises(gt.CheckpointError, match=f"{name}"):
        gt.load(path, into={"model": fresh[0], "optimizer": fresh[1]})


def test_a_checkpoint_of_an_older_version_has_no_checksums(saved):
    path, *_ = saved
    manifest = json.loads((path / "gt.json").read_text())
    del manifest["crc32"], manifest["sums"]
    (path / "gt.json").write_text(json.dumps(manifest))
    assert gt.load(path, device="cpu").keys() == {"model", "optimizer"}


@pytest.mark.parametrize("part", ["metadata", "state"])
def test_a_state_that_torch_stops_at_half_way_changes_nothing(tmp_path, part):
    models, state = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)) for _ in range(2)], {}
    nn.init.ones_(models[0][1].weight)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    models[0](torch.ones(4, 3)).sum().backward()
    optimizers[0].step()
    state = {"model": models[0].state_dict(), "optimizer": optimizers[0].state_dict()}
    if part == "metadata":
        state["model"]._metadata["1"] = {"version": "2"}
        state["model"]._metadata["0"] = 3
    else:
        state["optimizer"]["state"][2] = torch.ones(2)
    gt.save(state, tmp_path / "c")
    before = {key: value.clone() for key, value in models[1].state_dict().items()}
    with pytest.raises(gt.CheckpointError, match="versions of modules" if part == "metadata" else "no dict of dicts"):
        gt.load(tmp_path / "c", into={"model": models[1], "optimizer": optimizers[1]})
    assert equal(models[1].state_dict(), before)


def test_a_checkpoint_of_another_model_is_refused_with_all_differences(saved):
    path, fresh, _ = saved
    other = nn.Sequential(nn.Linear(3, 3)).to("remote")
    with pytest.raises(gt.CheckpointError, match=r"model\.0\.weight is not in the checkpoint; .* and \d+ more differences"):
        gt.load(path, into={"model": other})
    wide = Net()
    wide.a, wide.b = nn.Linear(48, 97), nn.Linear(97, 48)
    with pytest.raises(gt.CheckpointError, match=r"a\.weight is float32\[96, 48\], want float32\[97, 48\]"):
        gt.load(path, into={"model": wide.to("remote")})
    with pytest.raises(gt.CheckpointError, match=r"has groups of \[6\] parameters, want \[2\]"):
        gt.load(path, into={"model": fresh[0], "optimizer": torch.optim.SGD(other.parameters(), lr=1)})
    with pytest.raises(gt.CheckpointError, match="ema is not in the checkpoint"):
        gt.load(path, into={"model": fresh[0], "ema": fresh[0]})


@pytest.mark.parametrize("kinds", [("AdamW", "SGD"), ("SGD", "AdamW")], ids=" to ".join)
def test_the_state_of_another_optimizer_is_refused_before_anything_changes(one, tmp_path, kinds):
    """torch takes AdamW's state for SGD, and fails at the next step."""

    def trained_by(kind, seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to("remote")
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        model(torch.ones(1, 3, device="remote")).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained_by(kinds[0], 0)
    gt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    model, optimizer = trained_by(kinds[1], 1)
    before = model.weight.detach().cpu().clone()
    lacks = {"SGD": "dampening, .*momentum", "AdamW": "betas, .*eps"}[kinds[1]]
    with pytest.raises(gt.CheckpointError, match=f"optimizer refuses its state: .* has no .*{lacks}.*another optimizer"):
        gt.load(tmp_path / "saved", into={"model": model, "optimizer": optimizer})
    assert torch.equal(model.weight.detach().cpu(), before)
    optimizer.step()  # with its own options, as before


@pytest.mark.parametrize(
    ("kind", "options", "moment"),
    [
        ("Adagrad", {}, "sum"), ("Adamax", {}, "exp_inf"), ("ASGD", {}, "ax"), ("Rprop", {}, "prev"),
        ("RMSprop", {"centered": True}, "grad_avg"), ("SGD", {"momentum": 0.9}, "momentum_buffer"),
    ],
)  # fmt: skip
def test_moments_of_other_shapes_are_refused_before_anything_changes(one, tmp_path, kind, options, moment):
    """torch takes them, and fails at the next step."""

    def trained_by(*sizes):
        model = nn.Linear(*sizes, bias=False).to("remote")
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        model(torch.ones(1, sizes[0], device="remote")).sum().backward()
        optimizer.step()
        return optimizer

    gt.save({"optimizer": trained_by(3, 2)}, tmp_path / "saved")
    optimizer = trained_by(2, 3)
    said = rf"state\.0\.{moment} is float32\[2, 3\], its parameter float32\[3, 2\]"
    with pytest.raises(gt.CheckpointError, match=said):
        gt.load(tmp_path / "saved", into={"optimizer": optimizer})
    optimizer.step()


PARAMETERWISE = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip


def test_the_state_of_any_other_optimizer_is_refused_or_its_next_step_reads_it(tmp_path):
    """Adam and Adamax have the same options, and torch takes one's state for the other."""

    def made(kind):
        weight = nn.Parameter(torch.ones(3, 2))
        weight.grad = torch.ones(3, 2)
        return getattr(torch.optim, kind)([weight], lr=0.1)

    for kind in PARAMETERWISE:
        optimizer = made(kind)
        optimizer.step()
        gt.save({"optimizer": optimizer}, tmp_path / kind)
        gt.load(tmp_path / kind, into={"optimizer": made(kind)})
    taken = []
    for kind, other in itertools.permutations(PARAMETERWISE, 2):
        optimizer = made(other)
        before = str(optimizer.state_dict())
        try:
            gt.load(tmp_path / kind, into={"optimizer": optimizer})
        except gt.CheckpointError as error:
            assert "another optimizer saved it" in str(error), f"{kind} to {other}: {error}"
        else:
            taken.append((kind, other))
            before = str(optimizer.state_dict())
        assert str(optimizer.state_dict()) == before
        optimizer.step()
    assert {*itertools.permutations(["Adam", "AdamW", "RAdam"], 2)} == {*taken}


def test_what_is_no_checkpoint_is_named(one, tmp_path):
    with pytest.raises(gt.CheckpointError, match="does not exist"):
        gt.load(tmp_path / "none")
    with pytest.raises(gt.CheckpointError, match="no safetensors file"):
        gt.load(tmp_path)
    torch.save({"a": 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(gt.CheckpointError, match="a pickle, which can run code"):
        gt.load(tmp_path)
    with pytest.raises(gt.CheckpointError, match="no safetensors file, or a damaged one"):
        gt.load(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("wait", [True, False])
def test_a_failed_op_or_a_full_disk_leaves_the_old_checkpoint(one, tmp_path, wait, monkeypatch):
    model, _, _ = trained()
    gt.save(model, tmp_path / "c")
    want = {key: value.cpu() for key, value in model.state_dict().items()}
    bad = torch.nn.functional.embedding(torch.tensor([9], device="remote"), torch.ones(3, 2, device="remote"))  # no row 9
    with pytest.raises(gt.OpFailed):
        gt.save({"model": model, "bad": bad}, tmp_path / "c", wait=wait).wait()

    def full(fd, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(gt.CheckpointError, match="cannot be saved: no space left on device"):
        gt.save(model, tmp_path / "c", wait=wait).wait()
    monkeypatch.undo()
    assert equal(gt.load(tmp_path / "c"), want) and os.listdir(tmp_path) == ["c"]
    gt.save(model, tmp_path / "c", wait=wait).wait()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_meta_and_sparse_tensors_are_refused(one, tmp_path):
    with pytest.raises(gt.CheckpointError, match=r"state\['a'\] is on the meta device"):
        gt.save({"a": torch.empty(3, device="meta")}, tmp_path / "c")
    with pytest.raises(gt.CheckpointError, match="sparse"):
        gt.save({"a": torch.eye(3).to_sparse()}, tmp_path / "c")
    with pytest.raises(gt.CheckpointError, match="is a nested tensor, want a dense tensor"):
        gt.save({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "c")
    with pytest.raises(gt.CheckpointError, match="complex128"):
        gt.save({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path / "c")
    with pytest.raises(gt.CheckpointError, match=r"state\['m'\]\['weight'\] is a lazy module's, and has no shape yet"):
        gt.save({"m": nn.LazyLinear(3)}, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_a_loaded_tensor_outlives_its_files(one, tmp_path):
    value = torch.randn(64, 64)
    gt.save({"x": {"a": value.to("remote")}}, tmp_path / "c")
    loaded = gt.load(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    assert torch.equal(loaded["x"]["a"].cpu(), value)


def test_weights_made_from_meta_ones_are_split_as_others_are(session):
    """torch.empty_like of a meta tensor ends in as_strided, which changes nothing: a weight that is a view would stay whole."""
    session(DP4)
    with torch.device("meta"):
        layer = nn.Linear(64, 64, bias=False)
    layer.to_empty(device="remote").reset_parameters()
    layer(torch.ones(8, 64, device="remote"))
    assert gt.inspect(layer.weight)["layout"] == "[S(0)]"
