"""A torch program on a remote device: the model, the loss and the optimizer are torch's own."""

import torch
from torch import nn

import gt

gt.cpu_workers(1)  # or gt.gpu_workers(8), or gt.connect("host:12345"), or nothing: starts what this machine has

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to("remote")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
x = torch.rand(256, 2, device="remote") * 2 - 1
y = (x[:, :1] * x[:, 1:]).sign()  # are the two signs equal?

for step in range(201):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}: loss {loss.item():.4f}")  # waits here, and only here

print(f"right: {((model(x) * y) > 0).float().mean().item():.0%} on {gt.stats()['workers'][0]['name']}")
