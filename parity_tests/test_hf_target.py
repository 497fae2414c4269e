"""Hugging Face models as targets: the runner's own part on a stand-in for their interface, and the real thing where
transformers is installed."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from jax_dflash.config import InputError
from jax_dflash.target_batch import TargetBatch
from torch_ref import hf_target
from torch_ref.hf_target import HFTargetRunner
from torch_ref.target_runner import TargetRunner

V, D = 7, 5
SIZES = {"num_speculative_tokens": 3, "max_num_seqs": 2, "max_model_len": 40, "num_pages": 9, "widths": (1, 4, 16)}
TABLES = np.array([[3, 1, 2], [6, 4, 5], [8, 7, 2]])


class StandInCache:
    """DynamicCache's interface over the tokens themselves."""

    def __init__(self):
        self.tokens = torch.zeros(0, dtype=torch.long)

    def get_seq_length(self):
        return len(self.tokens)

    def crop(self, max_length):
        assert max_length < 0, "transformers cuts -n tokens off the end"
        self.tokens = self.tokens[:max_length]


class Layer(nn.Module):
    """Adds 10^i to the stream, times the mean of what has been seen; a tuple, as older decoders return."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x, seen):
        return (x + self.scale * seen,)


class StandIn(nn.Module):
    """A causal language model by the interface that the runner relies on: two layers and a norm that doubles."""

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(V, D, generator=rng)
        self.head = SimpleNamespace(weight=torch.randn(V, D, generator=rng))
        self.layers = nn.ModuleList([Layer(1.0), Layer(10.0)])
        self.device, self.dtype = torch.device("cpu"), self.embedding.dtype
        sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 1, "max_position_embeddings": 40}
        text = SimpleNamespace(**sizes, eos_token_id=[1, 4])
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.logits_kept = []

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return self.head

    def forward(self, *, input_ids, past_key_values, use_cache, output_hidden_states, logits_to_keep):
        assert use_cache and output_hidden_states and input_ids.shape[0] == 1
        start = past_key_values.get_seq_length()
        past_key_values.tokens = torch.cat([past_key_values.tokens, input_ids[0]])
        stream = self.embedding[past_key_values.tokens]
        seen = (torch.cumsum(stream, 0) / torch.arange(1, len(stream) + 1)[:, None])[None, start:]
        states = [stream[None, start:]]
        for layer in self.layers:
            states.append(layer(states[-1], seen)[0])
        states[-1] = states[-1] * 2
        self.logits_kept.append(logits_to_keep)
        logits = states[-1][:, -logits_to_keep:] @ self.head.weight.T
        return SimpleNamespace(logits=logits, hidden_states=tuple(states))


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(hf_target, "_transformers", lambda: SimpleNamespace(DynamicCache=StandInCache))
    runner = HFTargetRunner(StandIn(), taps=(0, 2), **SIZES)
    runner.capture()
    return runner


def run(runner, *requests):
    rows, tokens, start, num_drafts = zip(*requests, strict=True)
    return runner.run(TargetBatch(tokens=tokens, start=start, num_drafts=num_drafts, block_tables=TABLES[list(rows)]))


def exact(model, tokens):
    """Features at taps 0 and 2 and greedy next tokens of a whole sequence at once."""
    stream = model.embedding[torch.tensor(tokens)]
    last = stream + 11 * torch.cumsum(stream, 0) / torch.arange(1, len(stream) + 1)[:, None]
    return torch.cat([stream, last], -1).numpy(), (last @ model.head.weight.T).argmax(-1).tolist()


def test_rejected_drafts_leave_the_cache(runner):
    """The tap of the last layer taken after the norm (twice as large), drafts of a rejected step left in the cache, drafts
    verified at a padded row, features of one request at another's rows."""
    prompts, model = [[1, 2, 3, 4, 5], [6, 2, 0]], runner.model
    output = run(runner, (0, prompts[0], 0, 0), (1, prompts[1], 0, 0))
    feature, own = zip(*(exact(model, prompt) for prompt in prompts), strict=True)
    assert output.features.shape == (32, 2 * D)  # two requests of 16 rows
    np.testing.assert_allclose(output.features[:8], np.concatenate(feature), rtol=1e-5)
    assert not output.features[8:].any()
    assert (output.tokens.tolist(), output.num_sampled.tolist()) == (
        [[own[0][-1], 0, 0, 0], [own[1][-1], 0, 0, 0]],
        [1, 1],
    )
    text = [*prompts[0], own[0][-1]]
    for _ in range(3):
        text.append(exact(model, text)[1][-1])
    wrong = (text[7] + 1) % V
    output = run(runner, (1, [3, 3], 3, 0), (0, [*text[5:7], wrong, text[8]], 5, 3))
    assert output.tokens[1].tolist() == [*text[6:8], 0, 0] and output.num_sampled.tolist() == [1, 2]
    expected = exact(model, [*prompts[1], 3, 3])[0][3:], exact(model, [*text[:7], wrong, text[8]])[0][5:]
    np.testing.assert_allclose(output.features[:6], np.concatenate(expected), rtol=1e-5)
    assert output.features.shape == (8, 2 * D)
    output = run(runner, (0, text[7:9], 7, 1))
    assert output.tokens[0, 0] == text[8] and output.num_sampled[0] == 2
    np.testing.assert_allclose(output.features[:2], exact(model, text)[0][7:9], rtol=1e-5)
    assert model.logits_kept == [1, 1, 1, 4, 2]


def test_a_first_page_used_again_begins_anew(runner):
    """A cache that outlives its request, or a request that goes on where none has begun, refused when its mate has run
    already; caches without bound."""
    run(runner, (0, [1, 2, 3], 0, 0))
    output = run(runner, (0, [4, 5], 0, 0))
    np.testing.assert_allclose(output.features[:2], exact(runner.model, [4, 5])[0], rtol=1e-5)
    with pytest.raises(InputError, match="page 6 starts at 2, behind what has run; begin it at 0"):
        run(runner, (0, [1], 2, 0), (1, [1], 2, 0))
    with pytest.raises(InputError, match="share one"):
        run(runner, (0, [1], 2, 0), (0, [1], 0, 0))
    assert runner.caches[3].get_seq_length() == 2
    for row in (1, 2):
        run(runner, (row, [1], 0, 0))
    assert list(runner.caches) == [6, 8]


def test_what_is_read_of_a_model():
    """End tokens dropped, a vocabulary without the head's padding."""
    config = hf_target.target_config(StandIn())
    assert (config.eos_token_ids, config.vocab_size, config.geometry.num_layers) == ((1, 4), V, 2)


def test_a_model_without_a_list_of_layers(monkeypatch):
    """A tap silently taken after the final norm."""
    model = StandIn()
    del model.layers
    with pytest.raises(InputError, match="StandIn has no list of layers"):
        HFTargetRunner(model, taps=(2,), **SIZES)


def test_without_transformers(monkeypatch):
    """An ImportError's traceback for a package that is no dependency."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install transformers"):
        hf_target.load_hf_model("nowhere", torch.get_default_dtype())


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.filterwarnings("default")
def test_real_models_agree_with_ours(name, tmp_path):
    """A form that this package computes otherwise than its publisher's code; a cache that is cut otherwise."""
    import transformers

    from torch_ref.target import load_target, pack_target

    config = getattr(transformers, f"{name}Config")(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, intermediate_size=41,
        vocab_size=61, max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=[1, 4],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    ours, target = load_target(tmp_path)
    sizes = SIZES | {"taps": (0, 2, 3)}
    runners = TargetRunner(ours, pack_target(target, ours), **sizes), HFTargetRunner(model, **sizes)
    assert ours.eos_token_ids == runners[1].config.eos_token_ids == (1, 4)
    steps = [([5, 6, 7, 8, 9], 0, 0), ([3, 4, 5], 5, 2), ([8, 9, 10, 11], 6, 3), ([2], 7, 0)]
    for tokens, start, num_drafts in steps:
        outputs = []
        for runner in runners:
            runner.capture()
            outputs.append(run(runner, (0, tokens, start, num_drafts)))
        assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
        scale = float(outputs[0].features.abs().max())
        np.testing.assert_allclose(outputs[1].features, outputs[0].features, atol=1e-5 * scale)
