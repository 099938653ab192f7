"""Fine-tunes a small Llama of transformers, made from a config without a download: all of it, or by LoRA.

    python examples/finetune_llama.py                                         # one worker for each GPU, or one on the CPU
    GT_CONFIG=configs/llama/dp2.yaml python examples/finetune_llama.py        # data parallel
    GT_CONFIG=configs/llama/tp2pp2.yaml python examples/finetune_llama.py     # tensor x pipeline parallel
    python examples/finetune_llama.py --lora 8                                # only low-rank additions are trained
    python examples/finetune_llama.py --trainer                               # transformers' Trainer instead of a loop
    python examples/finetune_llama.py --save out --save-every 10              # checkpoints; the same command resumes

With your own checkpoint, replace `small()` by LlamaForCausalLM.from_pretrained(folder).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import gt


class LoRA(nn.Module):
    """A frozen linear layer plus x @ down @ up, two thin matrices that are trained; `up` is zero at first."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.frozen, self.scale = frozen.requires_grad_(False), scale
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.scale * self.up(self.down(x))


def add_lora(model: nn.Module, rank: int, names: Sequence[str] = ("q_proj", "v_proj")) -> None:
    """Freeze the model, and put a LoRA around each linear layer of these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoRA(child, rank))


def small() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def samples(count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Counting sequences, which a model learns quickly: each number is the one before, plus a step."""
    first, by = torch.randint(128, (count, 1)), torch.randint(1, 4, (count, 1))
    tokens = (first + by * torch.arange(length)) % 128
    return [{"input_ids": row, "labels": row} for row in tokens]


def loop(model: nn.Module, steps: int, batch: int, device: str, folder: str = "", every: int = 10) -> list[float]:
    """Train and print losses. folder: of a checkpoint, which is saved every so many steps, and resumed if it is there."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    state = {"model": model, "optimizer": optimizer, "random": gt.RandomState(), "step": 0}
    if folder and os.path.exists(folder):
        state["step"] = gt.load(folder, into=state)["step"]
        print(f"resumed from {folder} at step {state['step']}", flush=True)
    losses = []
    for step in range(state["step"], steps):
        tokens = torch.stack([sample["input_ids"] for sample in samples(batch)]).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            losses.append(loss.item())
            print(f"step {step:3d}: loss {losses[-1]:.3f}", flush=True)
        state["step"] = step + 1
        if folder and (state["step"] % every == 0 or state["step"] == steps):
            gt.save(state, folder, wait=False)  # written while the next steps run
    return losses


def by_trainer(model: nn.Module, steps: int, batch: int) -> list[float]:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "remote"  # the device that Trainer and Accelerate use
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=3e-3, logging_steps=5,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, options, train_dataset=samples(steps * batch))
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return some losses, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences of a step; default: 8")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train additions of this rank only")
    parser.add_argument("--trainer", action="store_true", help="train by transformers' Trainer")
    parser.add_argument("--save", default="", metavar="FOLDER", help="write checkpoints there, and go on from one")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS", help="between checkpoints; default: 10")
    parser.add_argument("--device", default="remote", help="remote (the default), cpu or cuda")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.save_every) < 1 or args.lora < 0:
        parser.error("--steps, --batch and --save-every want at least 1, --lora at least 0")
    if args.trainer and args.save:
        parser.error("--save is for the loop: the Trainer has checkpoints of its own")
    torch.manual_seed(0)
    model = small()
    if args.lora:
        add_lora(model, args.lora)
    model.to(args.device)
    if args.device == "remote" and gt.signal.groups():
        gt.signal.apply(model)  # the `modules:` of the config say which part runs in which group
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    if args.trainer:
        return by_trainer(model, args.steps, args.batch)
    return loop(model, args.steps, args.batch, args.device, args.save, args.save_every)


if __name__ == "__main__":
    main()
