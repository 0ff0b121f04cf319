"""A decoder-only transformer over bytes, and its presets from a test toy to seven billion."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorpager.pager.tensor.sharded import local_of, part_of

VOCABULARY = 256  # one token per byte value
INIT_STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of one model. ``context`` is the longest sequence that it has positions for."""

    width: int
    layers: int
    heads: int
    context: int


@dataclass(frozen=True)
class Preset:
    """A model, and the batch, sequence length and learning rate that a run takes when not told."""

    shape: ModelShape
    batch: int
    seq: int
    lr: float


PRESETS = {
    "tiny": Preset(ModelShape(width=128, layers=2, heads=4, context=256), 4, 64, 3e-3),
    "10m": Preset(ModelShape(width=384, layers=6, heads=6, context=1024), 8, 128, 1e-3),
    "125m": Preset(ModelShape(width=768, layers=12, heads=12, context=1024), 4, 256, 3e-4),
    "350m": Preset(ModelShape(width=1024, layers=24, heads=16, context=1024), 4, 256, 3e-4),
    "1b": Preset(ModelShape(width=2048, layers=24, heads=16, context=2048), 4, 512, 2e-4),
    "7b": Preset(ModelShape(width=4096, layers=32, heads=32, context=2048), 4, 512, 1e-4),
}


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, width), and the result the same."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return projected


class Block(nn.Module):
    """Pre-norm attention and GELU MLP, each added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_up = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, width), and the result the same."""
        x = x + self.attention(self.attention_norm(x))
        hidden = F.gelu(self.mlp_up(self.mlp_norm(x)))
        result: Tensor = x + self.mlp_down(hidden)
        return result


class GPT(nn.Module):
    """The language model; the output head is the token embedding's weight."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64 (batch, seq). Returns the mean cross entropy, float32 ()."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's initialisation, in place and in parameter order.

        Every parameter is written by exactly one in-place op, so the same generator state gives
        the same bits wherever the parameters are: dense, or in pages.
        """
        residual_std = INIT_STD / (2 * self.shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            mine = local_of(parameter)
            if name.endswith("bias"):
                mine.zero_()
            elif parameter.dim() == 1:  # the norms' scales
                mine.fill_(1.0)
            else:
                into_residual = name.endswith(("attention.out.weight", "mlp_down.weight"))
                std = residual_std if into_residual else INIT_STD
                if mine is parameter:
                    parameter.normal_(0.0, std, generator=generator)
                    continue
                # All ranks draw the whole, so that the model does not depend on their number.
                whole = torch.empty(parameter.size(), dtype=parameter.dtype, device=mine.device)
                mine.copy_(part_of(whole.normal_(0.0, std, generator=generator), parameter))


def meta_model(preset: str, dtype: torch.dtype) -> GPT:
    """The preset on the meta device: shapes only, no memory."""
    with torch.device("meta"):
        return GPT(PRESETS[preset].shape).to(dtype)
