"""What a drafter weighs, and what one draft step must read and compute at least. Plain Python.

n requests, K drafts, R = n (K + 1) rows of the query forward, C context rows stored in the step, S live context tokens of
each request, L layers, D model width, N query and KH KV heads of head size H, F MLP width, E D_t feature width, V rows of
the LM head. A matrix `[out, in]` applied to r rows is out * in values read and 2 r out in flops (a multiply and an add).

The floor counts every weight once, the K/V that queries see once, and what is stored once; activations are taken to stay
on the chip. It is the sum over operations of max(bytes / bandwidth, flops / peak): each operation needs the one before.
"""

import math
from dataclasses import dataclass

from jax_dflash.config import DTYPE_BYTES, DraftConfig
from jax_dflash.names import draft_tensors


@dataclass(frozen=True)
class Operation:
    """A part of a draft step: bytes that must move to or from memory, and flops."""

    name: str
    num_bytes: int
    flops: int

    def seconds(self, bandwidth: float, peak: float) -> float:
        """At `bandwidth` bytes/s and `peak` flops/s, the slower of the two."""
        return max(self.num_bytes / bandwidth, self.flops / peak)


def num_parameters(config: DraftConfig) -> int:
    """Parameters of the drafter's own layers, fc and norms:
    L (2 D N H + 2 D KH H + 3 D F + 2 D + 2 H) + E D_t D + 2 D, and (N + 2 KH) H + D more a layer with biases. Tables of
    tokens are not counted, whether the target's or its own."""
    return sum(math.prod(shape) for shape in draft_tensors(config).values())


def num_bytes(config: DraftConfig) -> int:
    """Those parameters in the checkpoint's dtype."""
    return num_parameters(config) * DTYPE_BYTES[config.dtype]


def head_rows(config: DraftConfig) -> int | None:
    """Rows of the LM head that a step multiplies with: the reduced vocabulary's, else the whole one's; None: not known
    without the target."""
    return config.geometry.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size


def pool_bytes_per_token(config: DraftConfig) -> int:
    """K and V of one context token in all layers: 2 L KH H values."""
    g = config.geometry
    return 2 * g.num_layers * g.num_kv_heads * g.head_dim * DTYPE_BYTES[config.dtype]


def visible_keys(window: int | None, causal: bool, context: int, query_len: int) -> tuple[int, int]:
    """Of `context` stored tokens and a block of `query_len` rows after them: how many different context tokens the rows of
    a block see in one layer, and the sum over rows of the keys that each sees.

    Row i stands at position context + i. It sees keys from max(0, context + i - w + 1) to context + i if causal, else to
    min(context + query_len, context + i + w) - 1; without a window w is endless. The first row sees the most context.
    """
    w = context + query_len if window is None else window
    seen = 0
    for i in range(query_len):
        position = context + i
        end = position + 1 if causal else min(context + query_len, position + w)
        seen += end - max(0, position - w + 1)
    return min(context, w - 1), seen


def draft_step(
    config: DraftConfig, *, num_reqs: int, num_speculative_tokens: int, length: int, context_rows: int | None = None
) -> list[Operation]:
    """The operations of one step of `num_reqs` requests, each with `length` context tokens of which this step stores some:
    `context_rows` in all, by default a whole verify of each request. Without a known vocabulary there is no `lm_head`."""
    g, size = config.geometry, DTYPE_BYTES[config.dtype]
    Q = num_speculative_tokens + 1
    R, C = num_reqs * Q, num_reqs * Q if context_rows is None else context_rows
    NH, KH = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    kv_bytes = 2 * KH * size  # of one token in one layer
    fc = config.feature_size * g.hidden_size
    kv, qo = 2 * KH * g.hidden_size * g.num_layers, 2 * NH * g.hidden_size * g.num_layers
    mlp = 3 * g.hidden_size * g.intermediate_size * g.num_layers
    vectors = num_parameters(config) - fc - kv - qo - mlp  # norms and biases
    operations = [
        Operation("fc", (fc + C * config.feature_size) * size, 2 * C * fc),
        Operation("context K/V", kv * size + C * g.num_layers * kv_bytes, 2 * C * kv),
        Operation("embedding", (num_reqs + 1) * g.hidden_size * size, 0),  # the anchors' rows and the mask's
        # the block's K and V use the weights of the context's, which are counted there
        Operation("projections", (qo + vectors) * size, 2 * R * (qo + kv)),
        Operation("MLP", mlp * size, 2 * R * mlp),
    ]
    read, scores = 0, 0
    for layer in config.layers:
        context, seen = visible_keys(layer.window, layer.causal, length, Q)
        read, scores = read + context + Q, scores + seen
    written = g.num_layers * Q
    # q k^T and the weighted sum of v: 2 H flops each for a pair of a query head's row and a key.
    operations.append(Operation("attention", num_reqs * (read + written) * kv_bytes, 4 * num_reqs * scores * NH))
    if (V := head_rows(config)) is not None:
        rows = num_reqs * num_speculative_tokens  # an anchor's row has no logits
        operations.append(Operation("lm_head", V * g.hidden_size * size, 2 * rows * V * g.hidden_size))
    return operations


def floor_seconds(operations: list[Operation], bandwidth: float, peak: float) -> float:
    """The least time of a step whose operations follow each other."""
    return sum(operation.seconds(bandwidth, peak) for operation in operations)


def total(operations: list[Operation]) -> tuple[int, int]:
    """Bytes and flops of all operations."""
    return sum(operation.num_bytes for operation in operations), sum(operation.flops for operation in operations)
