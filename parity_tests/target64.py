"""A target's whole forward in numpy float64, written from the published models and sharing no code with the packages; and
small targets of every form, as their files say it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jax_dflash.config import TargetConfig, parse_target_config
from jax_dflash.names import target_tensors

SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
    "intermediate_size": 41, "vocab_size": 61, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FORMS = {
    "qwen3": SIZES | {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3 biases": SIZES | {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {k: v for k, v in SIZES.items() if k != "head_dim"} | {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": SIZES | {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3, "mlp_bias": False},
    "llama biases": {k: v for k, v in SIZES.items() if k != "rope_theta"}
    | {"model_type": "llama", "attention_bias": True, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
}


def values_of(config: TargetConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under their checkpoint names; norms and biases differ everywhere."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        if name.endswith("bias"):
            return rng.standard_normal(shape) / 4
        return rng.standard_normal(shape) / np.sqrt(shape[1]) if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)

    return {name: draw(name, shape).astype(np.float32) for name, shape in target_tensors(config).items()}


def write(directory: Path, raw: dict, values: dict[str, np.ndarray], shards: int = 1) -> None:
    """A published folder: one file, or several and their index."""
    (directory / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(values, directory / "model.safetensors")
        return
    names = sorted(values)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: values[name] for name in names if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def frequencies(raw: dict) -> np.ndarray:
    """The formula of Llama 3.1's release, by wavelengths; plain RoPE without it."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    H = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    inv_freq = 1 / rope.get("rope_theta", raw.get("rope_theta", 0)) ** (np.arange(0, H, 2) / H)
    if not rope:
        return inv_freq
    out = []
    for freq in inv_freq:
        wavelength, original = 2 * np.pi / freq, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            out.append(freq)
        elif wavelength > original / low:
            out.append(freq / rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * freq / rope["factor"] + smooth * freq)
    return np.array(out)


def forward(raw: dict, values: dict[str, np.ndarray], tokens) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states `[S, D]` after 0, 1, ... layers, before the final norm, and logits `[S, V]`."""
    w = {name: value.astype(np.float64) for name, value in values.items()}
    S, N, K = len(tokens), raw["num_attention_heads"], raw["num_key_value_heads"]
    angles = np.arange(S)[:, None] * frequencies(raw)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + raw["rms_norm_eps"]) * w[name]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def rotated(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["model.embed_tokens.weight"][np.asarray(tokens)]
    states = [x]
    for i in range(raw["num_hidden_layers"]):
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm.weight")
        q, k, v = (linear(y, f"{p}self_attn.{n}_proj").reshape(S, h, -1) for n, h in (("q", N), ("k", K), ("v", K)))
        if raw["model_type"] == "qwen3":
            q, k = (norm(a, f"{p}self_attn.{n}_norm.weight") for a, n in ((q, "q"), (k, "k")))
        q, k = rotated(q), np.repeat(rotated(k), N // K, axis=1)
        scores = np.einsum("snh,tnh->nst", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        o = np.einsum("nst,tnh->snh", weights, np.repeat(v, N // K, axis=1)).reshape(S, -1)
        x = x + linear(o, p + "self_attn.o_proj")
        y = norm(x, p + "post_attention_layernorm.weight")
        gate = linear(y, p + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, p + "mlp.up_proj"), p + "mlp.down_proj")
        states.append(x)
    head = w["model.embed_tokens.weight"] if raw.get("tie_word_embeddings") else w["lm_head.weight"]
    return states, norm(x, "model.norm.weight") @ head.T


def config_of(name: str) -> TargetConfig:
    return parse_target_config(FORMS[name])
