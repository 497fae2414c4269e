"""One DFlash draft step in plain float64 numpy, written from the specification alone: the judge of both frameworks.

It shares no code with either of them and prefers loops to speed. `oracle64_config` reads the configuration. Cases in
brackets are those of the cases file.

Letters: `B` requests of the bucket, `T` query rows of one request, `C` context rows, `M` live context rows, `D` draft width,
`Dt` target width, `E` tapped target layers, `I` hidden states of the target, `N` query heads, `K` KV heads, `H` head dim,
`F` MLP width, `L` draft layers, `V` vocabulary, `P` pages, `W` block table width, `n` live requests.
"""

import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from parity_tests.harness.oracle64_config import read_config

PAD = -1
NULL_PAGE = 0
INTEGERS = {"I32": np.int32, "I64": np.int64}
STORED = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
MASK_FILE, MASK_PICKLE = "mask_embedding.safetensors", "mask_embedding.pt"
GLOBAL_TAPS = "features combined context_norm context_k context_v embeds hidden logits".split()
LAYER_TAPS = "n1 q k v attn post_attention n2 act out".split()
GLOBAL_WEIGHTS = "fc hidden_norm norm embed_tokens lm_head".split()
LAYER_WEIGHTS = (
    "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
    "self_attn.q_norm self_attn.k_norm mlp.gate_proj mlp.up_proj mlp.down_proj"
).split()


class Step(NamedTuple):
    """What one draft step of n live requests is given; row j of request r stands at position start_position[r] + j."""

    start_position: np.ndarray  # [n]
    num_context: np.ndarray  # [n] rows of this step's target batch, rejected ones included
    num_rejected: np.ndarray  # [n] how many of the last rows the verifier refused
    num_sampled: np.ndarray  # [n] 0 for an unfinished prefill
    last_sampled: np.ndarray  # [n]
    next_prefill: np.ndarray  # [n]
    request_index: np.ndarray  # [n]
    block_tables: np.ndarray  # [n, W] page ids, 0 is the null page
    hidden_states: np.ndarray  # [I, M, Dt] residual stream, index 0 = embeddings, index i = after i layers
    first_context_position: np.ndarray | tuple = ()  # [n] no row sees a key before it [C46]; empty: all see from 0 on


def load(directory):
    """Configuration and float64 tensors of a checkpoint folder; ValueError names the file, and the key at fault."""
    directory = Path(directory)
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object, got {type(config).__name__}")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory}: no *.safetensors file")
    if (directory / MASK_PICKLE).exists():
        raise ValueError(f"{directory / MASK_PICKLE}: a pickle is not opened here; store the vector as {MASK_FILE}")
    tensors = {}
    for path in files:
        try:
            entries = safetensors.deserialize(path.read_bytes())
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path}: {error}") from error
        for name, entry in entries:
            if path.name == MASK_FILE:  # a file of its own whose tensor is called otherwise
                if name == "mask_token_id":
                    continue
                name = "mask_embedding" if name == "embedding" else name
            if name in tensors:
                raise ValueError(f"{path}: {name} is also in an earlier file of the folder")
            stored = INTEGERS if name == "d2t" else STORED
            if entry["dtype"] not in stored:
                raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, expected one of {', '.join(stored)}")
            values = np.frombuffer(entry["data"], stored[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = values.astype(np.float64)
    return config, tensors


def check_names(model, tensors, forced):
    """ValueError on a tensor that is missing or never read (a bias, say), and on a forced name that is no float tap."""
    layers = range(len(model.layers))
    weights = GLOBAL_WEIGHTS + [f"layers.{i}.{name}" for i in layers for name in LAYER_WEIGHTS]
    biases = [f"layers.{i}.self_attn.{name}_proj" for i in layers for name in "qkvo" if model.attention_bias]
    taps = GLOBAL_TAPS + [f"layers.{i}.{name}" for i in layers for name in LAYER_TAPS]
    wrong = {f"{name}.weight" for name in weights} | {f"{name}.bias" for name in biases}
    wrong ^= set(tensors) - {"d2t", "mask_embedding"}
    if wrong:
        raise ValueError(f"tensors missing or unexpected: {', '.join(sorted(wrong))}")
    if unknown := sorted(set(forced) - set(taps)):
        raise ValueError(f"cannot force {', '.join(unknown)}: not a float tap")


def head_columns(model, tensors):
    """The target id of each used row of lm_head, and how many columns the logits get: those no row has are -inf.

    Without d2t row i is id i and rows past the vocabulary are padding [C07]; with it row i is id i + d2t[i] [C08].
    """
    rows, vocab = len(tensors["lm_head.weight"]), model.vocab_size or len(tensors["embed_tokens.weight"])
    if "d2t" not in tensors:
        if rows < vocab:
            raise ValueError(f"lm_head has {rows} rows for a vocabulary of {vocab}, and there is no d2t")
        return np.arange(vocab), rows
    d2t = np.asarray(tensors["d2t"])
    if d2t.shape != (rows,) or rows != (model.draft_vocab_size or rows):
        raise ValueError(f"d2t {d2t.shape}, lm_head of {rows} rows, draft_vocab_size={model.draft_vocab_size} differ")
    columns = np.arange(rows) + d2t.astype(np.int64)
    if (d2t % 1).any() or len(set(columns)) < rows or columns.min() < 0 or columns.max() >= vocab:
        raise ValueError(f"d2t does not give {rows} distinct ids of a vocabulary of {vocab}")
    return columns, vocab


def mask_row(tensors, width):
    """The vector that mask rows start from, flat."""
    row = np.asarray(tensors["mask_embedding"], np.float64).reshape(-1)
    if len(row) != width:
        raise ValueError(f"mask_embedding has {len(row)} elements, embed_tokens has rows of {width}")
    return row


class Weights:
    """A checkpoint's tensors by name, as float64."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __call__(self, name):
        return np.asarray(self.tensors[f"{name}.weight"], np.float64)

    def linear(self, x, name):
        """x @ weight.T, plus the bias if there is one."""
        y = x @ self(name).T
        return y + np.asarray(self.tensors[f"{name}.bias"], np.float64) if f"{name}.bias" in self.tensors else y


def slot_of(table, position, page_size, max_model_len):
    """Pool row of a position, or PAD at the null page and from max_model_len on: a clamped page column would alias [C28]."""
    if position >= max_model_len or table[position // page_size] == NULL_PAGE:
        return PAD
    return table[position // page_size] * page_size + position % page_size


def prepare_inputs(
    step, mask_token_id, *, num_reqs, context_rows, page_size, max_model_len, num_speculative_tokens, num_pages
):
    """The integer taps of section 3, each int32 at bucket size; ValueError names the field of a step that cannot be run."""
    n, T = len(step.start_position), num_speculative_tokens + 1
    M = int(np.sum(step.num_context))
    if not 0 < n <= num_reqs:
        raise ValueError(f"num_reqs={num_reqs} cannot hold {n} live requests; both must be at least 1")
    if M > context_rows:
        raise ValueError(f"context_rows={context_rows} cannot hold {M} context rows")
    out = {
        "context_positions": np.zeros(context_rows, np.int32),
        "context_slots": np.full(context_rows, PAD, np.int32),
        "input_ids": np.zeros(num_reqs * T, np.int32),
        "query_positions": np.zeros(num_reqs * T, np.int32),
        "query_slots": np.full(num_reqs * T, PAD, np.int32),
        "query_start_loc": np.minimum(np.arange(num_reqs + 1), n).astype(np.int32) * np.int32(T),
        "seq_lens": np.zeros(num_reqs, np.int32),
        "sample_indices": np.zeros(num_reqs * (T - 1), np.int32),
        "sample_positions": np.zeros(num_reqs * (T - 1), np.int32),
        "sample_request": np.full(num_reqs * (T - 1), PAD, np.int32),
    }
    row = 0
    for r in range(n):
        start, num_context = int(step.start_position[r]), int(step.num_context[r])
        valid = num_context - int(step.num_rejected[r])
        if start < 0 or not 0 < valid <= num_context:
            raise ValueError(
                f"request {r}: start_position={start}, {valid} of num_context={num_context} rows are valid"
            )
        anchor_position = start + valid
        seq_len = min(anchor_position + T, max_model_len)
        table = [int(page) for page in step.block_tables[r]]
        used = table[: -(-seq_len // page_size)]
        if len(used) * page_size < seq_len or min(used) < 0 or max(used) >= num_pages:
            raise ValueError(f"block_tables[{r}]={table} does not give {seq_len} keys pages of a pool of {num_pages}")
        for j in range(valid):  # rejected rows keep position 0 and PAD
            out["context_positions"][row + j] = start + j
            out["context_slots"][row + j] = slot_of(table, start + j, page_size, max_model_len)
        row += num_context
        anchor = step.last_sampled[r] if step.num_sampled[r] > 0 else step.next_prefill[r]
        for t in range(T):
            out["input_ids"][r * T + t] = anchor if t == 0 else mask_token_id
            out["query_positions"][r * T + t] = min(anchor_position + t, max_model_len - 1)
            out["query_slots"][r * T + t] = slot_of(table, anchor_position + t, page_size, max_model_len)
        out["seq_lens"][r] = seq_len
        for i in range(T - 1):  # the anchor row predicts nothing; sample positions are not clamped
            out["sample_indices"][r * (T - 1) + i] = r * T + 1 + i
            out["sample_positions"][r * (T - 1) + i] = anchor_position + 1 + i
            out["sample_request"][r * (T - 1) + i] = step.request_index[r]
    return out


def rms_norm(x, weight, eps):
    """Root-mean-square norm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, rope):
    """Half-split rotary embedding of x [..., heads, H] at positions [...]: pair j of R is (j, j + R/2), the rest stays."""
    half = len(rope.inv_freq)
    angle = positions[..., None, None] * rope.inv_freq
    cos, sin = np.cos(angle) * rope.scale, np.sin(angle) * rope.scale
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def write(rows, slots, values):
    """Put values [R, K, H] into pool rows [S, K, H] in place; PAD writes nothing (plain indexing would wrap around)."""
    rows[slots[slots != PAD]] = values[slots != PAD]


def visible_keys(row, num_rows, num_keys, causal, window):
    """Keys [first, last) that query row `row` of num_rows sees of num_keys; the last row stands at the last key [C32]."""
    at = row + num_keys - num_rows
    first = 0 if window is None else at - (window - 1)
    last = at if causal else num_keys - 1 if window is None else at + (window - 1)
    return max(first, 0), min(last + 1, num_keys)


def attend(q_BTNH, rows_2SKH, block_tables, seq_lens, page_size, *, causal, window, hidden=()):
    """Each query row over the keys it sees of its request, those of its own block included; zeros where there are none.
    The first hidden[r] keys of request r nobody sees."""
    out = np.zeros_like(q_BTNH)
    T, heads, head_dim = q_BTNH.shape[1:]
    group = heads // rows_2SKH.shape[2]
    for r, table in enumerate(block_tables):
        spans = [visible_keys(t, T, seq_lens[r], causal, window) for t in range(T)]
        spans = [(max(first, int(hidden[r])) if len(hidden) else first, last) for first, last in spans]
        for first, last in set(spans):
            if first >= last:
                continue
            rows = [t for t in range(T) if spans[t] == (first, last)]
            # Only visible rows are ever loaded, so NaN elsewhere cannot leak in as 0 * NaN.
            slots = [table[j // page_size] * page_size + j % page_size for j in range(first, last)]
            for h in range(heads):
                keys, values = rows_2SKH[0, slots, h // group], rows_2SKH[1, slots, h // group]
                scores = q_BTNH[r, rows, h] @ keys.T * head_dim**-0.5
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out[r, rows, h] = weights @ values / weights.sum(axis=-1, keepdims=True)
    return out


def read_features(model, step, context_rows, width):
    """The tapped hidden states side by side [C, E*Dt], NaN past the live rows; ValueError on a tap or width that misfits."""
    hidden_states = np.asarray(step.hidden_states, np.float64)
    num_states, M, Dt = hidden_states.shape
    if M != np.sum(step.num_context):
        raise ValueError(f"hidden_states has {M} rows, num_context adds up to {np.sum(step.num_context)}")
    if model.target_hidden_size not in (None, Dt):
        raise ValueError(f"target_hidden_size={model.target_hidden_size}, but hidden_states has width {Dt}")
    if max(model.taps) >= num_states or len(model.taps) * Dt != width:
        raise ValueError(
            f"target_layer_ids or aux_hidden_state_layer_ids tap {model.taps} of {num_states} hidden states "
            f"of width {Dt}: fc wants {width} features"
        )
    features = np.full((context_rows, width), np.nan)
    features[:M] = np.concatenate([hidden_states[i] for i in model.taps], axis=-1)
    return features


def context_kv(model, weights, context_norm_CD, positions):
    """K [L, C, K, H] through each layer's own projection, K norm [C42] and RoPE, and raw V; no input_layernorm."""
    keys, values = [], []
    for i, layer in enumerate(model.layers):
        k, v = (weights.linear(context_norm_CD, f"layers.{i}.self_attn.{name}_proj") for name in "kv")
        k, v = (y.reshape(len(positions), model.kv_heads, model.head_dim) for y in (k, v))
        keys.append(rotate(rms_norm(k, weights(f"layers.{i}.self_attn.k_norm"), model.eps), positions, layer.rope))
        values.append(v)
    return np.stack(keys), np.stack(values)


def draft_layer(model, weights, tap, i, x, rows_2SKH, ints, step, page_size):
    """One pre-norm layer on x [B, T, D]; stores the block's K/V before it reads them, as its rows see each other."""
    B, T, _ = x.shape
    at, layer, positions = f"layers.{i}.", model.layers[i], ints["query_positions"].reshape(B, T)
    n1 = tap(at + "n1", rms_norm(x, weights(at + "input_layernorm"), model.eps))
    q, k, v = (
        weights.linear(n1, f"{at}self_attn.{name}_proj").reshape(B, T, num, model.head_dim)
        for name, num in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads))
    )
    q = tap(at + "q", rotate(rms_norm(q, weights(at + "self_attn.q_norm"), model.eps), positions, layer.rope))
    k = tap(at + "k", rotate(rms_norm(k, weights(at + "self_attn.k_norm"), model.eps), positions, layer.rope))
    v = tap(at + "v", v)
    for side, kv in enumerate((k, v)):
        write(rows_2SKH[side], ints["query_slots"], kv.reshape(B * T, *kv.shape[2:]))
    mask = {"causal": layer.causal, "window": layer.window, "hidden": step.first_context_position}
    attn = tap(at + "attn", attend(q, rows_2SKH, step.block_tables, ints["seq_lens"], page_size, **mask))
    x = tap(at + "post_attention", x + weights.linear(attn.reshape(B, T, -1), at + "self_attn.o_proj"))
    n2 = tap(at + "n2", rms_norm(x, weights(at + "post_attention_layernorm"), model.eps))
    gate, up = (weights.linear(n2, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
    act = tap(at + "act", gate / (1 + np.exp(-gate)) * up)
    return tap(at + "out", x + weights.linear(act, at + "mlp.down_proj"))


# Rejected and padded rows may hold anything, and silu's exp may overflow to its right limit.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def run(
    config,
    tensors,
    step,
    pool,
    *,
    num_reqs,
    context_rows,
    page_size,
    max_model_len,
    num_speculative_tokens,
    forced=None,
    yarn_attention="mscale",
):
    """Every tap of one greedy draft step, in order; pool [L, 2, P, page, K, H] is copied to float64, never changed.

    `forced` maps float taps to values that everything downstream uses; the result still records what was computed.
    Rows of padded requests and of context past M are garbage in float taps. ValueError names what does not fit.
    `tensors` have z-lab's names, with the embed_tokens and lm_head that are to be used, d2t if lm_head is reduced, and
    mask_embedding [D] if mask rows have a vector of their own.
    """
    model, weights, forced = read_config(config, yarn_attention), Weights(tensors), forced or {}
    check_names(model, tensors, forced)
    columns, num_columns = head_columns(model, tensors)
    L = len(model.layers)
    pool = np.array(pool, np.float64, order="C")  # so that the reshape below is a view
    if pool.ndim != 6 or pool.shape != (L, 2, pool.shape[2], page_size, model.kv_heads, model.head_dim):
        raise ValueError(f"pool {pool.shape} is not [L, 2, P, page, K, H] of page_size={page_size} and {model}")
    rows_L2SKH = pool.reshape(L, 2, -1, model.kv_heads, model.head_dim)
    result = {}

    def tap(name, value):
        result[name] = value
        used = np.asarray(forced.get(name, value), np.float64)
        if used.shape != value.shape:
            raise ValueError(f"forced {name} {used.shape}, expected {value.shape}")
        return used

    ints = prepare_inputs(
        step,
        model.mask_token_id,
        num_reqs=num_reqs,
        context_rows=context_rows,
        page_size=page_size,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        num_pages=pool.shape[2],
    )
    x = tap("features", read_features(model, step, context_rows, weights("fc").shape[1]))
    result |= ints
    num_groups = len({layer.window for layer in model.layers})  # each has a block table, all of them this one
    if num_groups > 1:
        result |= {name: np.stack([ints[name]] * num_groups) for name in ("context_slots", "query_slots")}
    x = tap("combined", weights.linear(x, "fc"))
    x = tap("context_norm", rms_norm(x, weights("hidden_norm"), model.eps))
    context_k, context_v = context_kv(model, weights, x, ints["context_positions"])
    for side, kv_LCKH in enumerate((tap("context_k", context_k), tap("context_v", context_v))):
        for i in range(L):
            write(rows_L2SKH[i, side], ints["context_slots"], kv_LCKH[i])
    embed, ids = weights("embed_tokens"), ints["input_ids"].reshape(num_reqs, -1)
    if ids.min() < 0 or ids.max() >= len(embed):
        raise ValueError(f"input ids {ids.min()}..{ids.max()} outside the vocabulary of {len(embed)}")
    x = embed[ids]
    if "mask_embedding" in tensors:  # it stands for the masks' row of the embedding; a block's row 0 is the anchor
        for t in range(1, x.shape[1]):
            x[:, t] = mask_row(tensors, embed.shape[1])
    x = tap("embeds", x * model.embedding_scale)
    for i in range(L):
        x = draft_layer(model, weights, tap, i, x, rows_L2SKH[i], ints, step, page_size)
    x = tap("hidden", rms_norm(x[:, 1:], weights("norm"), model.eps))
    logits = np.full((*x.shape[:2], num_columns), -np.inf)
    logits[..., columns] = weights.linear(x, "lm_head")[..., : len(columns)] * model.logit_scale
    logits = tap("logits", logits)
    return result | {"draft_tokens": np.argmax(logits, axis=-1).astype(np.int32), "pool": pool}  # ties: the first
