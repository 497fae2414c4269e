"""flax.nnx modules that hold parameters under the checkpoint's own names. The maths lives in `layers.py`, `drafter.py`
and `target.py` as functions of packed arrays; nothing here computes."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jax_dflash.config import Geometry

Module = TypeVar("Module", bound=nnx.Module)


class Weight(nnx.Module):
    """A parameter called `weight`: a matrix `[out, in]` drawn at scale `std`, or a norm's vector of ones; and with `bias`
    one of that name, zeros `[out]`."""

    def __init__(self, *shape: int, std: float = 0.02, bias: bool = False, rngs: nnx.Rngs, dtype: jnp.dtype):
        value = jnp.ones(shape, dtype) if len(shape) == 1 else jax.random.normal(rngs.params(), shape, dtype) * std
        self.weight = nnx.Param(value.astype(dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros(shape[:1], dtype))


class SelfAttention(nnx.Module):
    def __init__(self, g: Geometry, **kw):
        heads, kv_heads = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        self.q_proj = Weight(heads, g.hidden_size, bias="q" in g.biased, **kw)
        self.k_proj = Weight(kv_heads, g.hidden_size, bias="k" in g.biased, **kw)
        self.v_proj = Weight(kv_heads, g.hidden_size, bias="v" in g.biased, **kw)
        self.o_proj = Weight(g.hidden_size, heads, bias="o" in g.biased, **kw)
        if g.qk_norm:
            self.q_norm = Weight(g.head_dim, **kw)
            self.k_norm = Weight(g.head_dim, **kw)


class MLP(nnx.Module):
    def __init__(self, g: Geometry, **kw):
        self.gate_proj = Weight(g.intermediate_size, g.hidden_size, **kw)
        self.up_proj = Weight(g.intermediate_size, g.hidden_size, **kw)
        self.down_proj = Weight(g.hidden_size, g.intermediate_size, **kw)


class DecoderLayer(nnx.Module):
    def __init__(self, g: Geometry, **kw):
        self.input_layernorm = Weight(g.hidden_size, **kw)
        self.self_attn = SelfAttention(g, **kw)
        self.post_attention_layernorm = Weight(g.hidden_size, **kw)
        self.mlp = MLP(g, **kw)


def tensors(module: nnx.Module) -> dict[str, Array]:
    """The parameters under their checkpoint names, torch layout: the canonical tree."""
    state = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): param[...] for path, param in state}


def from_tensors(module_class: Callable[..., Module], config, values: dict[str, Array]) -> Module:
    """A module over these arrays, without drawing any. The names must be exactly the module's."""
    dtype = next(iter(values.values())).dtype
    abstract = nnx.eval_shape(lambda: module_class(config, rngs=nnx.Rngs(0), dtype=dtype))
    graphdef, state = nnx.split(abstract)
    leaves = {path: param.replace(values[".".join(map(str, path))]) for path, param in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))
