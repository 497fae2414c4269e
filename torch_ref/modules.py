"""torch.nn modules that hold parameters under the checkpoint's own names. The maths lives in `layers.py`, `drafter.py`
and `target.py` as functions of packed arrays; nothing here computes, so no module has a forward."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from jax_dflash.config import Geometry

Module = TypeVar("Module", bound=nn.Module)


class Weight(nn.Module):
    """A parameter called `weight`: a matrix `[out, in]` drawn at scale `std`, or a norm's vector of ones; and with `bias`
    one of that name, zeros `[out]`."""

    def __init__(
        self,
        *shape: int,
        std: float = 0.02,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype,
    ):
        super().__init__()
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * std
        self.weight = nn.Parameter(value.to(dtype), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[:1], dtype=dtype), requires_grad=False)


class SelfAttention(nn.Module):
    def __init__(self, g: Geometry, **kw):
        super().__init__()
        heads, kv_heads = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        self.q_proj = Weight(heads, g.hidden_size, bias="q" in g.biased, **kw)
        self.k_proj = Weight(kv_heads, g.hidden_size, bias="k" in g.biased, **kw)
        self.v_proj = Weight(kv_heads, g.hidden_size, bias="v" in g.biased, **kw)
        self.o_proj = Weight(g.hidden_size, heads, bias="o" in g.biased, **kw)
        if g.qk_norm:
            self.q_norm = Weight(g.head_dim, **kw)
            self.k_norm = Weight(g.head_dim, **kw)


class MLP(nn.Module):
    def __init__(self, g: Geometry, **kw):
        super().__init__()
        self.gate_proj = Weight(g.intermediate_size, g.hidden_size, **kw)
        self.up_proj = Weight(g.intermediate_size, g.hidden_size, **kw)
        self.down_proj = Weight(g.hidden_size, g.intermediate_size, **kw)


class DecoderLayer(nn.Module):
    def __init__(self, g: Geometry, **kw):
        super().__init__()
        self.input_layernorm = Weight(g.hidden_size, **kw)
        self.self_attn = SelfAttention(g, **kw)
        self.post_attention_layernorm = Weight(g.hidden_size, **kw)
        self.mlp = MLP(g, **kw)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters under their checkpoint names, torch layout: the canonical tree."""
    return dict(module.state_dict())


def from_tensors(module_class: Callable[..., Module], config, values: dict[str, Tensor]) -> Module:
    """A module over these arrays, without drawing any. The names must be exactly the module's."""
    with torch.device("meta"):
        module = module_class(config, dtype=next(iter(values.values())).dtype)
    module.load_state_dict(values, assign=True)
    return module.requires_grad_(False)
