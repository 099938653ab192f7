"""Models of many kinds at sizes that people train, with random weights and a batch, for bench_models.py.

A builder gives (model, batch): the batch is keyword arguments, and `model(**batch)` gives the loss, or an object that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
Batch = dict[str, torch.Tensor]
Model = tuple[nn.Module, Batch]
VOCABULARY = 32000


def tokens(batch: int, length: int, vocabulary: int = VOCABULARY) -> Batch:
    ids = torch.randint(5, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def images(batch: int, side: int = 224) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(1000, (batch,))}


class Classifier(nn.Module):
    """An image model with its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(pixel_values.to(next(self.parameters()).dtype)).float(), labels)


def llama(kv_heads: int = 8) -> Model:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=kv_heads, max_position_embeddings=2048, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config), tokens(8, 1024)


def gpt2() -> Model:
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)), tokens(8, 1024, 50257)


def bert() -> Model:
    import transformers as hf

    config = hf.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForMaskedLM(config), tokens(32, 512, 30000)


def t5() -> Model:
    import transformers as hf

    config = hf.T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), tokens(16, 512, 32000)


def vit() -> Model:
    import transformers as hf

    config = hf.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000,
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), images(64)


def qwen3() -> Model:
    import transformers as hf

    config = hf.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config), tokens(8, 1024)


def qwen3_moe() -> Model:
    import transformers as hf

    config = hf.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=768, use_cache=False,
        max_position_embeddings=2048,
    )  # fmt: skip
    return hf.Qwen3MoeForCausalLM(config), tokens(8, 512)


def gemma() -> Model:
    import transformers as hf

    config = hf.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, sliding_window=256, use_cache=False, attn_logit_softcapping=None,
        max_position_embeddings=2048,
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config), tokens(8, 1024)


def whisper() -> Model:
    import transformers as hf

    config = hf.WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(8, 80, 3000), "labels": torch.randint(5, 50000, (8, 256))}


def resnet50() -> Model:
    import torchvision

    return Classifier(torchvision.models.resnet50()), images(128)


def convnext() -> Model:
    import torchvision

    return Classifier(torchvision.models.convnext_base(stochastic_depth_prob=0.0)), images(64)


class Block(nn.Module):
    """A residual block of a diffusion U-Net, with attention over positions if `heads`."""

    def __init__(self, inside: int, outside: int, heads: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, inside), nn.GroupNorm(32, outside), nn.GroupNorm(32, outside)])
        self.first, self.second = nn.Conv2d(inside, outside, 3, 1, 1), nn.Conv2d(outside, outside, 3, 1, 1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.time = nn.Linear(512, outside)
        self.heads = heads
        if heads:
            self.qkv, self.out = nn.Linear(outside, 3 * outside), nn.Linear(outside, outside)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        x = self.skip(x) + self.second(F.silu(self.norms[1](h)))
        if not self.heads:
            return x
        b, c, high, wide = x.shape
        q, k, v = self.qkv(self.norms[2](x).flatten(2).transpose(1, 2)).view(b, high * wide, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return x + self.out(mixed.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(b, c, high, wide)


class UNet(nn.Module):
    """A diffusion model's U-Net on 64 x 64 latents, and its loss."""

    def __init__(self, wide: int = 192) -> None:
        super().__init__()
        sizes = [wide, 2 * wide, 3 * wide]
        self.time = nn.Sequential(nn.Linear(1, 512), nn.SiLU(), nn.Linear(512, 512))
        self.enter, self.leave = nn.Conv2d(4, wide, 3, 1, 1), nn.Conv2d(wide, 4, 3, 1, 1)
        self.down = nn.ModuleList([Block(a, b, 0 if n == 0 else 8) for n, (a, b) in enumerate(zip([wide, *sizes], sizes))])
        self.middle = Block(sizes[-1], sizes[-1], 8)
        up = zip(reversed(sizes), [sizes[1], sizes[0], wide], strict=True)
        self.up = nn.ModuleList([Block(2 * a, b, 8 if n < 2 else 0) for n, (a, b) in enumerate(up)])

    def forward(self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        kind = self.enter.weight.dtype
        time = self.time(times[:, None].to(kind))
        x, kept = self.enter((latents + noise * times[:, None, None, None]).to(kind)), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1), time)
        return F.mse_loss(self.leave(x).float(), noise)


def unet() -> Model:
    shape = (16, 4, 64, 64)
    return UNet(), {"latents": torch.randn(shape), "noise": torch.randn(shape), "times": torch.rand(16)}


class Mamba(nn.Module):
    """A selective state-space model in plain torch: the recurrence by chunks, as matrices within them."""

    def __init__(self, wide: int = 768, layers: int = 12, states: int = 16, chunk: int = 64) -> None:
        super().__init__()
        self.embed, self.chunk = nn.Embedding(VOCABULARY, wide), chunk
        nn.init.normal_(self.embed.weight, std=0.02)
        inner = 2 * wide
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(wide),
                    "enter": nn.Linear(wide, 2 * inner),
                    "leave": nn.Linear(inner, wide),
                    "mix": nn.Conv1d(inner, inner, 4, padding=3, groups=inner),
                    "pick": nn.Linear(inner, 2 * states),
                    "step": nn.Linear(inner, inner // 64),
                }
            )
            for _ in range(layers)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + self.mixed(layer, layer["norm"](x))
        scores = x[:, :-1] @ self.embed.weight.t()
        return F.cross_entropy(scores.flatten(0, 1).float(), labels[:, 1:].flatten())

    def mixed(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        u, gate = layer["enter"](x).chunk(2, -1)
        u = F.silu(layer["mix"](u.transpose(1, 2))[..., :length].transpose(1, 2))
        b, c = layer["pick"](u).float().view(batch, -1, self.chunk, 2, 16).unbind(3)  # [batch, chunks, chunk, states]
        decay = -F.softplus(layer["step"](u).float()).view(batch, -1, self.chunk, u.shape[-1] // 64)  # a head has 64 channels
        values = u.float().view(batch, -1, self.chunk, u.shape[-1] // 64, 64)
        total = decay.cumsum(2)
        apart = total[:, :, :, None] - total[:, :, None]  # from row j to row i
        seen = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device).tril()[..., None]
        weights = torch.where(seen, apart, float("-inf")).exp() * (c @ b.transpose(-1, -2))[..., None]
        inside = torch.einsum("nkijh,nkjhd->nkihd", weights, values)
        left = (total[:, :, -1:] - total).exp()
        state = torch.einsum("nkjs,nkjh,nkjhd->nkhsd", b, left, values)
        past, carried = total[:, :, -1].exp(), []
        held = torch.zeros_like(state[:, 0])
        for n in range(state.shape[1]):
            carried.append(held)
            held = held * past[:, n, :, None, None] + state[:, n]
        across = torch.einsum("nkis,nkih,nkhsd->nkihd", c, total.exp(), torch.stack(carried, 1))
        out = (inside + across).reshape(batch, length, -1).to(x.dtype) * F.silu(gate)
        return layer["leave"](out)


def mamba() -> Model:
    return Mamba(), tokens(8, 1024)


class Dlrm(nn.Module):
    """Recommendation: embedding tables, dot products of all pairs, two perceptrons."""

    def __init__(self, tables: int = 26, rows: int = 100_000, wide: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, wide) for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, wide), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + wide, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense.to(self.top[0].weight.dtype))
        rows = torch.stack([bottom, *(table(sparse[:, n]) for n, table in enumerate(self.tables))], 1)
        dots = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([bottom, dots], 1)).float().flatten(), clicked)


def dlrm() -> Model:
    batch = 8192
    sparse = torch.randint(100_000, (batch, 26))
    return Dlrm(), {"dense": torch.randn(batch, 13), "sparse": sparse, "clicked": torch.randint(2, (batch,)).float()}


class WordModel(nn.Module):
    """An LSTM language model."""

    def __init__(self, wide: int = 1024, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, wide), nn.LSTM(wide, wide, layers)
        self.head = nn.Linear(wide, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.embed(input_ids.t()))[0])
        return F.cross_entropy(scores[:-1].flatten(0, 1).float(), labels.t()[1:].flatten())


def lstm() -> Model:
    return WordModel(), tokens(64, 128)


def wav2vec2() -> Model:
    import transformers as hf

    config = hf.Wav2Vec2Config(
        hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, apply_spec_augment=False, num_labels=16, classifier_proj_size=256,
    )  # fmt: skip
    batch = {"input_values": torch.randn(16, 64000), "labels": torch.randint(16, (16,))}
    return hf.Wav2Vec2ForSequenceClassification(config), batch


def efficientnet() -> Model:
    import torchvision

    return Classifier(torchvision.models.efficientnet_v2_s(stochastic_depth_prob=0.0, dropout=0.0)), images(64)


def swin() -> Model:
    import torchvision

    return Classifier(torchvision.models.swin_t()), images(64)


def deberta() -> Model:
    import transformers as hf

    config = hf.DebertaV2Config(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=VOCABULARY,
        relative_attention=True, position_buckets=256, pos_att_type="p2c|c2p", norm_rel_ebd="layer_norm", share_att_key=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.DebertaV2ForMaskedLM(config), tokens(16, 512)


class GraphNetwork(nn.Module):
    """Message passing over the edges of a batch of graphs: means of messages, gated updates, and the largest over a graph."""

    def __init__(self, wide: int = 256, layers: int = 6, features: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, wide)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * wide, wide), nn.SiLU(), nn.Linear(wide, wide)) for _ in range(layers)
        )
        self.updates = nn.ModuleList(nn.GRUCell(wide, wide) for _ in range(layers))
        self.head = nn.Linear(wide, classes)

    def forward(
        self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor, graph: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.embedding(nodes.to(self.embedding.weight.dtype))
        ones = hidden.new_ones(len(target))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([hidden[source], hidden[target]], 1))
            sums = torch.zeros_like(hidden).index_add(0, target, sent)
            degrees = hidden.new_zeros(len(nodes)).index_add(0, target, ones).clamp(min=1)
            hidden = update(sums / degrees[:, None], hidden)
        largest = hidden.new_zeros(len(labels), hidden.shape[1])
        largest = largest.scatter_reduce(0, graph[:, None].expand_as(hidden), hidden, "amax", include_self=False)
        return F.cross_entropy(self.head(largest).float(), labels)


def graph_network(nodes: int = 20_000, edges: int = 120_000, graphs: int = 256) -> Model:
    batch = {
        "nodes": torch.randn(nodes, 32), "source": torch.randint(nodes, (edges,)), "target": torch.randint(nodes, (edges,)),
        "graph": torch.randint(graphs, (nodes,)).sort().values, "labels": torch.randint(10, (graphs,)),
    }  # fmt: skip
    return GraphNetwork(), batch


class Segmenter(nn.Module):
    """Classes of pixels, from scores that are enlarged to the picture. The loss is fp32: bf16 would hide its changes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = F.interpolate(self.body(pixel_values=pixel_values).logits, labels.shape[1:], mode="bilinear")
        return F.cross_entropy(scores.float(), labels)


def segformer() -> Model:
    """Attention over reduced keys, and depthwise convolutions."""
    import transformers as hf

    config = hf.SegformerConfig(
        depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=512, num_labels=150, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, 512, 512), "labels": torch.randint(150, (8, 512, 512))}
    return Segmenter(hf.SegformerForSemanticSegmentation(config)), batch


class Pairs(nn.Module):
    """CLIP with its contrastive loss, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        self.body = hf.CLIPModel(hf.CLIPConfig())

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        scores = self.body(input_ids=input_ids, pixel_values=pixel_values).logits_per_text.float()
        pairs = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


def clip() -> Model:
    return Pairs(), {"input_ids": torch.randint(3, 49406, (256, 77)), "pixel_values": torch.randn(256, 3, 224, 224)}


def video() -> Model:
    import torchvision

    batch = {"pixel_values": torch.randn(16, 3, 16, 112, 112), "labels": torch.randint(400, (16,))}
    return Classifier(torchvision.models.video.r3d_18()), batch


def bart() -> Model:
    import transformers as hf

    config = hf.BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, dropout=0.1, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    batch = tokens(16, 512, 50265)
    return hf.BartForConditionalGeneration(config), {**batch, "labels": torch.randint(5, 50265, (16, 256))}


def densenet() -> Model:
    import torchvision

    return Classifier(torchvision.models.densenet121()), images(64)


def gemma2() -> Model:
    """Scores with a soft cap, and every second layer attends to a window."""
    import transformers as hf

    config = hf.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, sliding_window=256, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config), tokens(8, 1024)


class DiffusionTransformer(nn.Module):
    """Noise of latents in patches, each block shifted and scaled by what the time says (DiT, 2022)."""

    def __init__(self, wide: int = 768, depth: int = 12, heads: int = 12, side: int = 16, channels: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Conv2d(channels, wide, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, side * side, wide) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(wide, elementwise_affine=False),
                    "norm2": nn.LayerNorm(wide, elementwise_affine=False),
                    "joint": nn.Linear(wide, 3 * wide),
                    "out": nn.Linear(wide, wide),
                    "mlp": nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU("tanh"), nn.Linear(4 * wide, wide)),
                    "shifts": nn.Linear(wide, 6 * wide),
                }
            )
            for _ in range(depth)
        )
        self.leave = nn.ConvTranspose2d(wide, channels, 2, stride=2)

    def forward(self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        dtype = self.places.dtype
        at = times[:, None, None, None]
        x = self.enter((latents * (1 - at) + noise * at).to(dtype))
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.places
        rates = torch.exp(-9.2 * torch.arange(128, device=x.device) / 128)
        angles = times[:, None] * 1000 * rates
        said = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], 1).to(dtype)))
        for block in self.blocks:
            shift1, scale1, gate1, shift2, scale2, gate2 = block["shifts"](said)[:, None].chunk(6, -1)
            q, k, v = block["joint"](block["norm1"](x) * (1 + scale1) + shift1).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            x = x + gate1 * block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + gate2 * block["mlp"](block["norm2"](x) * (1 + scale2) + shift2)
        found = self.leave(x.transpose(1, 2).unflatten(2, (height, width)))
        return F.mse_loss(found.float(), noise - latents)


def diffusion_transformer() -> Model:
    shape = (32, 4, 32, 32)
    return DiffusionTransformer(), {"latents": torch.randn(shape), "noise": torch.randn(shape), "times": torch.rand(32)}


ZOO: dict[str, Callable[[], Model]] = {
    "llama": llama, "llama-mha": lambda: llama(32), "gpt2-dropout": gpt2, "bert": bert, "t5": t5, "resnet50": resnet50,
    "qwen3-moe": qwen3_moe, "vit": vit, "convnext": convnext, "qwen3": qwen3, "gemma": gemma, "whisper": whisper, "unet": unet,
    "mamba": mamba, "dlrm": dlrm, "lstm": lstm, "wav2vec2": wav2vec2, "efficientnet": efficientnet,
    "swin": swin, "deberta": deberta, "gnn": graph_network,
    "segformer": segformer, "clip": clip, "video": video, "bart": bart, "densenet": densenet, "gemma2": gemma2,
    "dit": diffusion_transformer,
}  # fmt: skip
RANDOM = frozenset(
    {"gpt2-dropout", "whisper", "swin", "bart"}
)  # their losses depend on what dropout, or a depth that is random, draws
