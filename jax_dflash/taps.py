"""The values of a draft step that both frameworks expose, by name. Plain Python.

A forward calls `tap(name, value)` where a value comes to be and goes on with what the call returns: `no_taps` returns the
value, `Taps` keeps it and may put another one in its place (teacher forcing). No hooks: what is tapped is in the code.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TapCall = Callable[[str, Any], Any]


class Tap(NamedTuple):
    """`dims` is the shape by the letters of the legend in drafter.py; `kind` is float, int, token or pool; `level` is 1
    for a value between blocks and 2 for one inside a block. `roundings` is the contract: how often values are rounded to
    the activation dtype on the way from the taps before it; `faint` of them show less than once, since they average out
    (attention weights) or sit on the smaller branch of a sum. `where` names the value's place in vLLM."""

    name: str
    dims: str
    kind: str
    level: int
    roundings: int
    where: str
    faint: int = 0


# In topological order; the rows of a layer are repeated for each.
_INPUTS = (
    Tap("features", "C F", "float", 1, 0, "aux hidden states, concatenated"),
    Tap("context_positions", "C", "int", 1, 0, "context_positions"),
    Tap("context_slots", "C", "int", 1, 0, "_context_slot_mappings"),
    Tap("input_ids", "B*T", "int", 1, 0, "input_ids"),
    Tap("query_positions", "B*T", "int", 1, 0, "positions"),
    Tap("query_slots", "B*T", "int", 1, 0, "slot_mappings"),
    Tap("query_start_loc", "B+1", "int", 1, 0, "query_start_loc"),
    Tap("seq_lens", "B", "int", 1, 0, "seq_lens"),
    Tap("sample_indices", "B*(T-1)", "int", 1, 0, "sample_indices"),
    Tap("sample_positions", "B*(T-1)", "int", 1, 0, "sample_pos"),
    Tap("sample_request", "B*(T-1)", "int", 1, 0, "sample_idx_mapping"),
    Tap("combined", "C D", "float", 1, 1, "combine_hidden_states"),
    Tap("context_norm", "C D", "float", 2, 1, "hidden_norm"),
    Tap("context_k", "L C K H", "float", 1, 3, "precompute_and_store_context_kv, K"),
    Tap("context_v", "L C K H", "float", 1, 1, "precompute_and_store_context_kv, V"),
    Tap("embeds", "B T D", "float", 1, 0, "embed_tokens"),
)
_LAYER = (
    Tap("n1", "B T D", "float", 2, 1, "input_layernorm"),
    Tap("q", "B T N H", "float", 2, 3, "q after q_norm and RoPE"),
    Tap("k", "B T K H", "float", 2, 3, "k after k_norm and RoPE"),
    Tap("v", "B T K H", "float", 2, 1, "v"),
    Tap("attn", "B T N H", "float", 1, 2, "attention output before o_proj", faint=1),
    Tap("post_attention", "B T D", "float", 1, 2, "residual into post_attention_layernorm", faint=1),
    Tap("n2", "B T D", "float", 2, 1, "post_attention_layernorm"),
    Tap("act", "B T F", "float", 2, 3, "SiluAndMul"),
    Tap("out", "B T D", "float", 1, 2, "residual into the next layer", faint=1),
)
_OUTPUTS = (
    Tap("hidden", "B T-1 D", "float", 1, 1, "norm, sampled rows"),
    Tap("logits", "B T-1 V", "float", 1, 0, "compute_logits"),
    Tap("draft_tokens", "B T-1", "token", 1, 0, "draft_tokens"),
    Tap("pool", "L 2 P page K H", "pool", 2, 0, "the draft layers' kv_cache"),
)


def tap_table(num_layers: int) -> tuple[Tap, ...]:
    """Every tap of a drafter of that depth, each after those it is computed from."""
    layers = (row._replace(name=f"layers.{i}.{row.name}") for i in range(num_layers) for row in _LAYER)
    return (*_INPUTS, *layers, *_OUTPUTS)


def live_part(tap: Tap, value, num_reqs: int, num_rows: int):
    """The entries that belong to live context rows and, of floats and tokens, to live requests; the others mean nothing.
    The other integers are defined in padded requests too, and a pool is compared whole."""
    dims = tap.dims.split()
    if "C" in dims:
        behind = len(dims) - 1 - dims.index("C")  # counted from the end: slots of several groups have an axis more
        return value[(..., slice(num_rows), *(slice(None),) * behind)]
    return value if tap.kind in ("int", "pool") else value[:num_reqs]


def by_group(slots):
    """The tap of slots `[G, S]`: `[S]` where the drafter has one page group."""
    return slots[0] if len(slots) == 1 else slots


def no_taps(name: str, value):
    """The call that a forward without taps makes."""
    return value


class Taps:
    """Keeps the values of taps up to `level`, and puts those of `forced` in their place."""

    def __init__(self, level: int = 2, forced: Mapping[str, Any] | None = None):
        self.level, self.forced = level, forced or {}
        self.values: dict[str, Any] = {}

    def __call__(self, name: str, value):
        assert name not in self.values, name
        if _LEVELS[name.rpartition(".")[2]] <= self.level:
            self.values[name] = value
        return self.forced.get(name, value)


_LEVELS = {row.name: row.level for row in (*_INPUTS, *_LAYER, *_OUTPUTS)}
