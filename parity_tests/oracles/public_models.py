"""The public DFlash models on a case's weights and inputs. Runs in the environment of constraints/oracles.txt, which has
neither jax nor this project:

    python parity_tests/oracles/public_models.py CASE.safetensors OUT.safetensors [CASE OUT ...]

A case is one request: metadata `config` (a drafter's config.json, z-lab's form), `anchor` and `num_speculative_tokens`
K; a drafter's tensors under checkpoint names, `embed_tokens.weight`, `lm_head.weight`, and `features [C, E*Dt]`, the
target's hidden states of positions 0 .. C-1 side by side. The block stands at positions C .. C+K: the anchor, K masks.

The answer holds `<package>.<run>.hidden [K, D]` (after the final norm, the anchor's row dropped) and
`<package>.<run>.logits [K, V]`; metadata `packages` {name: version} and `skipped` {package.run: why}. The runs:
    float32  as the package computes it
    float64  float64 weights and inputs; every package still casts inside norms, RoPE and eager softmax to float32
    pure64   the same code with those casts going to float64, its RoPE frequencies included
T block rows, C context rows, D model width, V vocabulary.
"""

import contextlib
import importlib
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

RUNS = {"float32": torch.float32, "float64": torch.float64, "pure64": torch.float64}


class NoFloat32(TorchFunctionMode):
    """Inside, every request for float32 gets float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def lift(value):
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


@dataclass(frozen=True)
class Case:
    """A case file in one dtype. `weights` are the drafter's own tensors."""

    raw: dict
    weights: dict[str, torch.Tensor]
    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    features: torch.Tensor
    anchor: int
    num_speculative_tokens: int
    dtype: torch.dtype

    @classmethod
    def load(cls, path: str, dtype: torch.dtype) -> "Case":
        with safe_open(path, framework="pt") as handle:
            tensors, meta = {name: handle.get_tensor(name).to(dtype) for name in handle.keys()}, handle.metadata()
        tables = (tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight", "features"))
        K = int(meta["num_speculative_tokens"])
        return cls(json.loads(meta["config"]), tensors, *tables, int(meta["anchor"]), K, dtype)

    @property
    def num_context(self) -> int:
        return self.features.shape[0]

    @property
    def block_ids(self) -> torch.Tensor:
        return torch.tensor([self.anchor] + [self.raw["dflash_config"]["mask_token_id"]] * self.num_speculative_tokens)

    def config(self) -> transformers.Qwen3Config:
        return transformers.Qwen3Config(**self.raw)

    def fill(self, model: torch.nn.Module, weights: dict[str, torch.Tensor] | None = None) -> torch.nn.Module:
        """The model with this case's weights: none missing, none left over."""
        model = model.to(self.dtype).eval()
        model.load_state_dict(self.weights if weights is None else weights, strict=True)
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """What z-lab's forward takes, and SpecForge's copy of it."""
        return {
            "position_ids": torch.arange(self.num_context + len(self.block_ids))[None],
            "noise_embedding": self.embed_tokens[self.block_ids][None],
            "target_hidden": self.features[None],
        }

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.lm_head)


def dflash(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """z-lab's model; attention is PyTorch's fused kernel."""
    model = case.fill(importlib.import_module("dflash.model").DFlashDraftModel(case.config()))
    hidden = model(**case.inputs(), past_key_values=None)
    return hidden, model.compute_logits(hidden, case.head)


def speculators(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The vLLM project's training model, eager attention: one anchor at position C of a sequence that goes on after it.
    Its own LM head."""
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets"):
        sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))  # for its data code, unused here
    package = importlib.import_module("speculators.models.dflash")
    layers, ids = case.config(), case.raw["dflash_config"]
    layers._attn_implementation = "eager"
    config = package.DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=layers.vocab_size,
        block_size=len(case.block_ids),
        aux_hidden_state_layer_ids=[i + 1 for i in ids["target_layer_ids"]],
        mask_token_id=ids["mask_token_id"],
    )
    own = {"embed_tokens.weight": case.embed_tokens, "lm_head.weight": case.lm_head}
    verifier = {"verifier_lm_head.weight": case.lm_head, "verifier_norm.weight": case.weights["norm.weight"]}
    model = case.fill(package.DFlashDraftModel(config), case.weights | own | verifier)
    C, rest = case.num_context, 1 + len(case.block_ids)
    at_anchor = (torch.arange(C + rest) == C)[None].long()
    hidden, logits, *_ = model._backbone_forward(
        torch.cat([case.features, torch.ones_like(case.features[:1]).expand(rest, -1)])[None],
        at_anchor * case.anchor,
        at_anchor,
        torch.zeros_like(case.embed_tokens[:1]).expand(1, C + rest, -1),
        torch.zeros_like(at_anchor),
        max_anchors=1,
    )
    return hidden, logits


def specforge(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The SGLang project's model, fused attention."""
    config = case.config()
    config._attn_implementation = "sdpa"
    model = case.fill(importlib.import_module("specforge.modeling.draft.dflash").DFlashDraftModel(config))
    hidden = model(**case.inputs(), is_causal=False)
    return hidden, case.head(hidden)


def muse(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own DFlash drafter, eager attention."""
    raw = {name: value for name, value in case.raw.items() if name not in ("model_type", "sliding_window")}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    layers = {"rope_parameters": case.config().rope_parameters, "layer_types": case.config().layer_types}
    config = transformers.MuseGlimmerAssistantConfig(**raw | raw["dflash_config"] | special | layers)
    config._attn_implementation = "eager"
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = {renamed.get(name, name): value for name, value in case.weights.items()}
    model = case.fill(transformers.MuseGlimmerAssistantModel(config), weights)
    inputs = case.inputs()
    hidden = model(noise_embeds=inputs["noise_embedding"], context_hidden_states=inputs["target_hidden"])
    return hidden.last_hidden_state, case.head(hidden.last_hidden_state)


MODELS = {"dflash": dflash, "speculators": speculators, "specforge": specforge, "transformers": muse}


@torch.no_grad()
def answer(case_path: str, out_path: str) -> None:
    """Every package and run on one case; one that fails is named in the metadata with the reason."""
    tensors, skipped = {}, {}
    for package, model in MODELS.items():
        for run, dtype in RUNS.items():
            case = Case.load(case_path, dtype)
            try:
                with NoFloat32() if run == "pure64" else contextlib.nullcontext():
                    hidden, logits = model(case)
                assert hidden.dtype == logits.dtype == dtype, f"answered in {hidden.dtype} and {logits.dtype}"
            except Exception as error:  # whatever a package raises is its answer to this case
                skipped[f"{package}.{run}"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                continue
            tensors[f"{package}.{run}.hidden"] = hidden[0, 1:].contiguous()
            tensors[f"{package}.{run}.logits"] = logits[0, 1:].contiguous()
    versions = {name: importlib.metadata.version(name) for name in (*MODELS, "torch")}
    save_file(tensors, out_path, metadata={"packages": json.dumps(versions), "skipped": json.dumps(skipped)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case_path, out_path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        answer(case_path, out_path)
