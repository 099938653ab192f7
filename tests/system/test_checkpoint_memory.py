"""A model larger than the memory of any worker and of the client is made, trained, saved, loaded and trained on."""

from __future__ import annotations

import json

from tests.helpers.processes import run_program

PRELUDE = """
import json, resource, sys
sys.path.insert(0, {root!r})
import torch
from torch import nn
import gt

MIB = 1 << 20

def private():  # bytes that RLIMIT_DATA counts
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10

def made():
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(96))

def step(model, optimizer, x):
    for layer in model:
        x = x + layer(x) / 8
    loss = (x - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
"""

PROGRAM = """
gt.cpu_workers(4, config="gt: {data_parallel: null, zero: 3}")
torch.manual_seed(0)
host = torch.randn(8, 512)
x = host.to("remote")
warm = nn.Linear(512, 512, bias=False).to("remote")  # threads and buffers are made before the limit
step([warm], torch.optim.SGD(warm.parameters(), lr=1e-3), x)
del warm
resource.setrlimit(resource.RLIMIT_DATA, (private() + 24 * MIB,) * 2)
model = made()
size = sum(p.numel() * p.element_size() for p in model.parameters())
model.to_empty(device="remote")
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(2):
    step(model, optimizer, x)
gt.save({"model": model, "optimizer": optimizer}, FOLDER)
losses = [step(model, optimizer, x) for _ in range(2)]
del model, optimizer
again = made()
state = gt.load(FOLDER, into={"model": again})
resumed = torch.optim.SGD(again.parameters(), lr=1e-2)
resumed.load_state_dict(state["optimizer"])
del state
repeated = [step(again, resumed, x) for _ in range(2)]
gt.save({"model": again, "optimizer": resumed}, FOLDER, wait=False).wait()
stats = gt.stats()
print(json.dumps({
    "size": size, "losses": losses, "repeated": repeated, "limits": [w["memory_limit"] for w in stats["workers"]],
    "read": [w["file_bytes_read"] for w in stats["workers"]], "written": [w["file_bytes_written"] for w in stats["workers"]],
    "relayed": stats["dispatcher"]["tensor_bytes_relayed"],
}))
"""


def test_a_model_larger_than_every_memory_is_made_trained_saved_and_resumed(tmp_path):
    program = f"FOLDER = {str(tmp_path / 'c')!r}\n{PROGRAM}"
    made = json.loads(run_program(PRELUDE, program, 120, GT_MEMORY_LIMIT="94MiB").splitlines()[-1])
    assert made["size"] == 96 << 20 and all(limit < made["size"] for limit in made["limits"])
    assert made["repeated"] == made["losses"] and made["relayed"] == 0
    quarter = made["size"] // 4
    assert made["read"] == [quarter] * 4 and made["written"] == [2 * quarter] * 4
