"""cases.md, configurations and checkpoints: what test_config_forms.py and test_names_forms.py leave, which hold the
published forms: targets, vocabularies, and each tensor in turn."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_dflash.config import InputError, check_pair, parse_draft_config, parse_target_config
from jax_dflash.names import draft_tensors
from parity_tests.tiny import numpy, random_values

RAW = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 12, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "vocab_size": 99, "max_position_embeddings": 64, "block_size": 16,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3]},
}  # fmt: skip
TARGET_RAW = {key: value for key, value in RAW.items() if key not in ("architectures", "block_size", "dflash_config")}


def raw_with(changes: dict, base: dict = RAW) -> dict:
    """The configuration with keys set, or taken away where the value is None; "a.b" is key b of the object a."""
    raw = json.loads(json.dumps(base))
    for key, value in changes.items():
        *parents, last = key.split(".")
        at = raw
        for parent in parents:
            at = at.setdefault(parent, {})
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    return raw


def refused(raw: dict, *parts: str, parse=parse_draft_config) -> None:
    with pytest.raises(InputError) as caught:
        parse(raw, "some/config.json")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("some/config.json", *parts):
        assert part in message, message


@pytest.mark.parametrize("num_target_layers", [None, 64])
def test_the_layer_list_is_never_guessed(num_target_layers):
    """C04: an evenly spaced list ([1, 16, 31, 46, 61] of 64 layers) instead of the checkpoint's, or num_target_layers made
    obligatory for it."""
    changes = {"dflash_config.target_layer_ids": [5, 19, 33, 47, 61]}
    changes |= {} if num_target_layers is None else {"num_target_layers": num_target_layers}
    assert parse_draft_config(raw_with(changes)).hidden_state_indices == (6, 20, 34, 48, 62)
    refused(raw_with(changes | {"dflash_config.target_layer_ids": None}), "dflash_config.target_layer_ids", "missing")


OF_TARGETS = {
    "C15 MLP bias": ({"mlp_bias": True}, "mlp_bias"),
    "other layers": ({"model_type": "gemma3_text"}, "model_type"),
    "experts": ({"model_type": "qwen3_moe", "num_experts": 128}, "model_type"),
    "experts under a known type": ({"num_experts": 128}, "num_experts"),
    "experts as in Mixtral": ({"num_local_experts": 8}, "num_local_experts"),
    "C17 quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "C21 yarn without factor": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    "C21 llama3 without a range": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
    "C21 llama3 of an empty range": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "rope_parameters.high_freq_factor",
    ),
    "C21 half of the channels": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "C21 unknown in rope_parameters": ({"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type"),
    "C24 no theta": ({"rope_theta": None}, "rope_theta"),
    "C24 a dict without theta": ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    "C25, C32 a sliding layer": ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    "C32 all layers slide": ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
    "C82 gelu": ({"hidden_act": "gelu"}, "hidden_act"),
    "C82 tanh gelu": ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    "an end outside the vocabulary": ({"eos_token_id": [5, 99]}, "eos_token_id"),
    "a dtype": ({"torch_dtype": "int8"}, "torch_dtype"),
}  # fmt: skip


@pytest.mark.parametrize("changes, key", OF_TARGETS.values(), ids=OF_TARGETS.keys())
def test_targets_that_compute_something_else_are_refused(changes, key):
    """A key that changes the function of a target, read as if it were absent; some are read of drafters and not of
    targets."""
    parse_target_config(TARGET_RAW)
    refused(raw_with(changes, TARGET_RAW), key, parse=parse_target_config)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_epsilon_is_the_file_s(eps):
    """C78: an epsilon of the reader's own where the file says 1e-5, or says nothing."""
    assert parse_draft_config(raw_with({"rms_norm_eps": eps})).geometry.rms_norm_eps == eps
    assert parse_target_config(raw_with({"rms_norm_eps": eps}, TARGET_RAW)).geometry.rms_norm_eps == eps
    refused(raw_with({"rms_norm_eps": None}), "key 'rms_norm_eps' is missing")


SHAPES = draft_tensors(parse_draft_config(RAW))


@pytest.fixture(scope="module")
def values():
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in random_values(SHAPES).items()}


def refused_tensors(f, directory, tensors, *parts):
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(InputError) as caught:
        f.drafter.load_drafter(directory)
    for part in (str(directory), *parts):
        assert part in str(caught.value), caught.value


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("layers.0.self_attn.q_proj.bias", (32,), ml_dtypes.bfloat16),
        ("layers.0.self_attn.sinks", (4,), ml_dtypes.bfloat16),
        ("layers.1.mlp.up_proj.weight_scale", (12, 1), np.float32),
        ("d2t", (3,), np.int64),
        ("mask_hidden", (16,), ml_dtypes.bfloat16),
    ],
)
def test_a_tensor_more_is_named(f, values, tmp_path, name, shape, dtype):
    """C06, C08, C15, C17: a bias that the configuration does not announce, a sink, a scale or a map, dropped in silence."""
    refused_tensors(f, tmp_path, values | {name: np.ones(shape, dtype)}, "1 unclaimed tensor(s)", name)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_a_table_of_another_vocabulary(f, values, tmp_path, name):
    """C08: a head of 3 rows beside a vocabulary of 99 and no draft_vocab_size; the target's is used, or rows are cut."""
    table = np.ones((3, 16), ml_dtypes.bfloat16)
    refused_tensors(f, tmp_path, values | {name: table}, f"{name} has shape [3, 16], expected [99, 16]")


@pytest.mark.parametrize("name", SHAPES)
def test_no_tensor_has_a_default(f, values, tmp_path, name):
    """C15: ones for a norm, or zeros for a matrix, that the file lacks; here each of them in turn."""
    refused_tensors(f, tmp_path, {n: v for n, v in values.items() if n != name}, "1 missing tensor(s)", name)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_quantised_weights_are_refused(f, values, tmp_path, dtype):
    """C17: the stored integers or eight-bit floats taken for the weight, without their scale (6 instead of 3)."""
    name = "layers.1.self_attn.k_proj.weight"
    refused_tensors(f, tmp_path, values | {name: np.ones(SHAPES[name], dtype)}, name, "is stored as")


def test_head_and_embedding_are_the_target_s(f):
    """C07: no head attached, or a zero remap applied, because the drafter's vocabulary (6) is smaller than the padded
    target's (8)."""
    target = parse_target_config(raw_with({"vocab_size": 8, "num_hidden_layers": 4}, TARGET_RAW))
    config = check_pair(parse_draft_config(raw_with({"vocab_size": 6})), target)
    head, embedding = (f.floats(np.random.default_rng(i).standard_normal((8, 16))) for i in (0, 1))
    weights = f.drafter.pack(f.tree(random_values(draft_tensors(config))), config, embedding, head)
    assert weights.lm_head is head and weights.embed_tokens is embedding
    h = np.random.default_rng(2).standard_normal((1, 3, 16))
    logits = numpy(f.drafter.compute_logits(weights, config, f.floats(h)))
    assert logits.shape == (1, 3, 8)
    np.testing.assert_allclose(logits, h @ numpy(head).T, atol=1e-5)


def test_padding_of_the_head_never_wins(f):
    """C07: rows of zeros that pad a head of 10 tokens to 16, whose logits are larger than negative ones."""
    config = parse_draft_config(raw_with({"vocab_size": 10}))
    head = f.floats(np.concatenate([-1 - np.arange(160).reshape(10, 16) % 7, np.zeros((6, 16))]))
    weights = f.drafter.pack(f.tree(random_values(draft_tensors(config))), config, head, head)
    logits = f.drafter.compute_logits(weights, config, f.floats(np.ones((1, 3, 16))))
    assert numpy(logits).shape == (1, 3, 10) and numpy(logits).max() < 0
    assert numpy(f.sampling.greedy(logits)).max() < 10
