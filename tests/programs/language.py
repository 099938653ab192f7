"""Programs over text: language models, translation, embeddings, and ways to fine-tune."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

from tests.programs.program import Program, batches, labelled, mlp, tokens, train


class Block(nn.Module):
    """A transformer block with causal attention, RMS norm and a gated feed-forward."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        gate, value = self.gate(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Decoder(nn.Module):
    """A language model with tied weights."""

    def __init__(self, vocabulary: int = 40, width: int = 16, context: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language_model(device: str) -> Program:
    """Next tokens, with clipped gradients, a cosine schedule, and greedy generation at the end."""
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(ids):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.detach()

    @torch.inference_mode()
    def generate():
        ids = torch.ones(2, 3, dtype=torch.long, device=device)
        for _ in range(4):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return [ids, model.head.weight[0], *model.head.weight.chunk(2)]

    return Program(step, tokens(), [model], generate)


def masked_language_model(device: str) -> Program:
    """Tokens under a mask, by torch's own encoder with a padding mask. A bias of keys has no gradient but rounding."""
    embed, head = nn.Embedding(40, 16, padding_idx=0), nn.Linear(16, 40)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True, bias=False)
    model = nn.ModuleList([embed, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(ids, hidden):
        shown = ids.masked_fill(hidden, 39)
        states = model[1](model[0](shown), src_key_padding_mask=ids == 0)
        loss = F.cross_entropy(model[2](states).transpose(1, 2), ids.masked_fill(~hidden, -100))
        return train(loss, optimizer)

    def draw(g):
        ids = torch.randint(1, 39, (4, 10), generator=g)
        ids[1, 7:] = 0
        return ids, (torch.rand(4, 10, generator=g) < 0.3) & (ids != 0)

    return Program(step, batches(4, draw), [model])


class Translator(nn.Module):
    """An LSTM encoder of packed sentences, and a GRU decoder with attention to its states."""

    def __init__(self, vocabulary: int = 30, width: int = 12) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.bridge, self.decoder = nn.Linear(2 * width, width), nn.GRUCell(width, width)
        self.out = nn.Linear(2 * width, vocabulary)

    def forward(self, source, lengths, target):
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        states, sizes = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        assert sizes.tolist() == list(lengths)
        states = self.bridge(states)
        hidden, rows = states.mean(1), []
        for time in range(target.size(1) - 1):
            hidden = self.decoder(self.target(target[:, time]), hidden)
            weights = torch.softmax(torch.einsum("bd,btd->bt", hidden, states), -1)
            rows.append(self.out(torch.cat([hidden, torch.einsum("bt,btd->bd", weights, states)], -1)))
        return torch.stack(rows, 1)


def translation(device: str) -> Program:
    """Sequence to sequence with packed sequences; the lengths are numbers."""
    model = Translator().to(device)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)

    def step(source, target, *lengths):
        logits = model(source, lengths, target)
        return train(F.cross_entropy(logits.transpose(1, 2), target[:, 1:], label_smoothing=0.1), optimizer)

    def draw(g):
        lengths = [7, *torch.randint(2, 7, (3,), generator=g).tolist()]
        return torch.randint(30, (4, 7), generator=g), torch.randint(30, (4, 5), generator=g), *lengths

    return Program(step, batches(3, draw), [model])


def sentence_tagger(device: str) -> Program:
    """A GRU over sequences packed as they are, time first; and one over a sorted batch with lengths in a CPU tensor."""
    model = nn.ModuleList([nn.GRU(6, 8), nn.GRU(8, 8, bidirectional=True), nn.Linear(16, 3)]).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    lengths = torch.tensor([6, 4, 4, 1])

    def step(x, y):
        packed = pack_sequence([x[: int(n), k] for k, n in enumerate(lengths)])
        states = model[0](packed)[0]
        padded = pad_packed_sequence(states, total_length=6)[0]
        again, last = model[1](pack_padded_sequence(padded, lengths))
        logits = model[2](pad_packed_sequence(again)[0].max(0)[0] + last.transpose(0, 1).flatten(1))
        return train(F.cross_entropy(logits, y), optimizer)

    def draw(g):
        return torch.randn(6, 4, 6, generator=g), torch.randint(3, (4,), generator=g)

    return Program(step, batches(3, draw), [model])


def padded_sequences(device: str) -> Program:
    """pad_sequence of a list, and a masked mean over its steps."""
    model = mlp(5, 8, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)

    def step(x, y):
        sequences = [x[k, : 3 + k] for k in range(x.size(0))]
        padded = pad_sequence(sequences, batch_first=True, padding_value=-1.0)
        counts = torch.tensor([len(sequence) for sequence in sequences], device=x.device)
        inside = torch.arange(padded.size(1), device=x.device)[None] < counts[:, None]
        mean = (model(padded) * inside[..., None]).sum(1) / counts[:, None]
        return train(F.cross_entropy(mean, y), optimizer)

    def draw(g):
        return torch.randn(4, 7, 5, generator=g), torch.randint(2, (4,), generator=g)

    return Program(step, batches(3, draw), [model])


def word_vectors(device: str) -> Program:
    """Skip-gram with negative samples."""
    model = nn.ModuleList([nn.Embedding(50, 8), nn.Embedding(50, 8)]).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def step(words, contexts, negatives):
        center = model[0](words)
        positive = F.logsigmoid((center * model[1](contexts)).sum(-1))
        negative = F.logsigmoid(-torch.bmm(model[1](negatives), center[..., None]).squeeze(-1)).sum(-1)
        return train(-(positive + negative).mean(), optimizer)

    def draw(g):
        return tuple(torch.randint(50, shape, generator=g) for shape in ((16,), (16,), (16, 5)))

    return Program(step, batches(4, draw), [model], lambda: F.normalize(model[0].weight.detach(), dim=-1))


class Experts(nn.Module):
    """Two of four experts for each row, with a loss that balances their load."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(width, 4, bias=False), nn.Linear(width, 5)
        self.experts = nn.ModuleList(mlp(width, 24, width, activation=nn.GELU) for _ in range(4))

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        top, chosen = chances.topk(2, -1)
        weights = torch.zeros_like(chances).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        mixed = torch.stack([expert(x) for expert in self.experts], -1) @ weights[..., None]
        load = F.one_hot(chosen, 4).sum(1).float().mean(0)
        return self.head(x + mixed.squeeze(-1)), (load * chances.mean(0)).sum()


def mixture_of_experts(device: str) -> Program:
    model = Experts().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)

    def step(x, y):
        logits, balance = model(x)
        return train(F.cross_entropy(logits, y) + 0.1 * balance, optimizer)

    return Program(step, labelled(), [model])


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 2."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, frozen.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, 2))

    def forward(self, x):
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)


def low_rank_adaptation(device: str) -> Program:
    """LoRA: only the update is trained, and merged into the weight at the end."""
    model = nn.Sequential(LowRank(nn.Linear(12, 16)), nn.GELU(), LowRank(nn.Linear(16, 5))).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)

    def step(x, y):
        return train(F.cross_entropy(model(x), y), optimizer)

    def merge():
        with torch.no_grad():
            model[0].frozen.weight += model[0].up @ model[0].down
        return model[0].frozen.weight

    return Program(step, labelled(), [model], merge)


def distillation(device: str) -> Program:
    """A small model learns a large one's distribution."""
    teacher, student = mlp(12, 32, 5).to(device).eval(), mlp(12, 6, 5).to(device)
    optimizer = torch.optim.Adadelta(student.parameters(), lr=1.0)

    def step(x, y):
        with torch.no_grad():
            soft = F.log_softmax(teacher(x) / 2, -1)
        logits = student(x)
        loss = F.kl_div(F.log_softmax(logits / 2, -1), soft, reduction="batchmean", log_target=True) * 4
        return train(loss + F.cross_entropy(logits, y), optimizer)

    return Program(step, labelled(), [student])


PROGRAMS = (
    language_model, masked_language_model, translation, sentence_tagger, padded_sequences, word_vectors, mixture_of_experts,
    low_rank_adaptation, distillation,
)  # fmt: skip
