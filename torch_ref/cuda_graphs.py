"""CUDA graphs of the draft step: one per bucket, captured largest first into one memory pool, replayed by bucket."""

import time
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor

from jax_dflash.batch import EngineConfig
from jax_dflash.buckets import BatchDescriptor, BucketLadder, GraphMode
from torch_ref.draft_step import DraftState, draft_step
from torch_ref.drafter import DraftWeights


class CaptureRow(NamedTuple):
    """What one capture cost."""

    program: str
    seconds: float


class CudaGraphs:
    """A graph and its static integers per bucket; features and draft tokens are shared by all of them.

    Graphs are captured for max_model_len: a replay reads every page of the block tables, live or not.
    """

    def __init__(
        self,
        config: EngineConfig,
        ladder: BucketLadder,
        weights: DraftWeights,
        state: DraftState,
        attention: str = "sdpa",
    ):
        self.config, self.ladder, self.weights, self.state = config, ladder, weights, state
        self.attention = attention
        device, dtype = weights.fc.device, weights.fc.dtype
        rows = config.context_rows(config.max_num_seqs)
        self.features = torch.zeros(rows, config.draft.feature_size, dtype=dtype, device=device)
        self.ints: dict[BatchDescriptor, Tensor] = {}
        self.draft_tokens: dict[BatchDescriptor, Tensor] = {}
        self.graphs: dict[BatchDescriptor, torch.cuda.CUDAGraph] = {}
        self.report: list[CaptureRow] = []

    def body(self, descriptor: BatchDescriptor) -> Int[Tensor, "N K"]:
        """What a graph holds: the whole draft step over static buffers."""
        features = self.features[: self.config.context_rows(descriptor.padded_reqs)]
        _, tokens = draft_step(
            self.config,
            self.weights,
            self.state,
            features,
            self.ints[descriptor],
            num_reqs=descriptor.padded_reqs,
            table_width=self.config.table_width,
            attention=self.attention,
        )
        return tokens

    def capture(self, *, progress: bool = True) -> None:
        """Warm each bucket up on PAD slots and capture it. The KV pools keep their bits."""
        pool = torch.cuda.graph_pool_handle()
        descriptors = self.ladder.capture_order(GraphMode.FULL)
        for descriptor in track(
            descriptors, "Capturing dflash CUDA graphs (FULL)", console=Console(stderr=True), disable=not progress
        ):
            start = time.perf_counter()
            empty = torch.from_numpy(self.config.layout(descriptor.padded_reqs).empty())
            self.ints[descriptor] = empty.to(self.features.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.body(descriptor)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.draft_tokens[descriptor] = self.body(descriptor)
            self.graphs[descriptor] = graph
            torch.cuda.synchronize()
            self.report.append(CaptureRow(str(descriptor), time.perf_counter() - start))

    def replay(
        self, descriptor: BatchDescriptor, features: Float[Tensor, "M F"], ints: Int[Tensor, "_"]
    ) -> Int[Tensor, "N K"]:
        """Fill the static buffers and replay. The tokens are static memory: the next replay overwrites them."""
        self.features[: features.shape[0]].copy_(features)
        self.ints[descriptor].copy_(ints)
        self.graphs[descriptor].replay()
        return self.draft_tokens[descriptor]
