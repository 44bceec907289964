"""The own decoder: Llama, SmolLM2, Mistral, Qwen2/2.5 and Qwen3 as one graph with flags.

It exists because it is faster than the transformers graph at one to sixteen rows: projections are
fused (q, k, v in one product, gate and up in another), weights are prepacked, and everything between
two products is one kernel.

Shape suffixes: T packed rows, R rows whose logits are wanted, W hidden width, F = (H + 2K) * D fused
projection, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention import Batch, Queries, attend
from foretell.cache import KVArena
from foretell.kernels import HeadSpec, Kernels, NativeKernels, kernels_for
from foretell.kernels.whole import LayerSpec, WholePass
from foretell.models.base import ForwardOutput
from foretell.models.config import DecoderConfig, decoder_config, read_config
from foretell.models.linear import PackedLinear, check_weights, matrices, pack
from foretell.models.rope import RopeTable
from foretell.models.weights import Checkpoint, join
from foretell.types import NO_NEEDS, Needs

# tensors of a checkpoint that belong to draft heads (`foretell.heads`), not to the model
HEADS = re.compile(r"medusa_head\.|mtp\.|model\.mtp_layers\.")


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm_W: Tensor
    qkv: PackedLinear
    qk_norms: tuple[Tensor, Tensor] | None
    out: PackedLinear
    mlp_norm_W: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    spec: HeadSpec


class Decoder:
    """A `TargetModel`; build it with `load_decoder`."""

    impl = "decoder"

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        weights: str = "stored",
    ) -> None:
        check_weights(weights, device, dtype)
        self.weights = weights
        # tied checkpoints may store the head all the same; it is the embedding
        checkpoint.require(_tensor_names(config), ["lm_head.weight"] if config.tied else [], beside=HEADS)
        self.config = config
        self.vocab_size = config.vocab_size
        self.num_layers = config.layers
        self.num_heads = config.heads
        self.max_context = config.max_context
        self.hidden_size = config.hidden
        self.device = device
        self.dtype = dtype
        dims = (config.hidden, config.intermediate, config.head_dim)
        self._kernels = kernels_for(device, dtype, dims)
        loader = _Loader(config, checkpoint, dtype, device, weights)
        # the table keeps the checkpoint's dtype: half the memory, and a row converts exactly
        self._embed_VW = loader.raw("model.embed_tokens.weight", config.vocab_size, config.hidden)
        self._layers = [loader.layer(index) for index in range(config.layers)]
        self._norm_W = loader.vector("model.norm.weight", config.hidden)
        if config.tied:
            self._head = pack(self._embed_VW, None, dtype, weights)
        else:
            self._head = loader.linear("lm_head", config.vocab_size, config.hidden)
        self.row_exact = self._kernels.row_exact and self._head.row_exact
        self._rope = RopeTable(config.rope, config.head_dim, device)
        self._whole = _whole_pass(self._kernels, self._layers, self._norm_W, config.rms_eps)

    def new_arena(self, slots: int) -> KVArena:
        """An arena of this model's shape."""
        config = self.config
        return KVArena(config.layers, config.kv_heads, config.head_dim, slots, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, needs: Needs = NO_NEEDS) -> ForwardOutput:
        """One pass; see `TargetModel.forward`."""
        batch.capture = frozenset(needs.queries)
        table = self._rope.upto(batch.positions)
        x_TW = self.embed(batch.token_T)
        wanted = [layer for layer in needs.aux_layers if layer < self.num_layers]
        aux_TW = {layer: torch.empty_like(x_TW) for layer in wanted}
        if self._whole is not None and batch.elsewhere is None:
            arena = batch.arena
            seen = {window: batch.seen(window) for window in set(self.config.windows)}
            cache = arena.keys_LKSD, arena.values_LKSD
            batch.queries = {layer: self._queries(layer, len(x_TW)) for layer in needs.queries}
            queries_THD = {layer: queries.q_THD for layer, queries in batch.queries.items()}
            h_TW = self._whole(x_TW, table, batch.position_T, cache, seen, aux_TW, queries_THD)
        else:
            h_TW = self._run(x_TW, table, batch, aux_TW)
        if self.num_layers in needs.aux_layers:
            aux_TW[self.num_layers] = x_TW
        rows_RW = h_TW[batch.logit_R]
        logits_RV = self.head(rows_RW) if len(rows_RW) else h_TW.new_empty(0, self.vocab_size)
        return ForwardOutput(logits_RV, h_TW if needs.last_hidden else None, aux_TW, batch.queries)

    def _queries(self, layer: int, rows: int) -> Queries:
        """Room for the queries of a layer."""
        spec = self._layers[layer].spec
        return Queries(torch.empty(rows, spec.heads, spec.dim, dtype=self.dtype), spec)

    def _run(
        self, x_TW: Tensor, table: tuple[Tensor, Tensor], batch: Batch, aux_TW: dict[int, Tensor]
    ) -> Tensor:
        """The layers, operation by operation; `WholePass` does the same in one call."""
        kernels, eps = self._kernels, self.config.rms_eps
        delta_TW: Tensor | None = None
        for index, layer in enumerate(self._layers):
            h_TW = kernels.add_norm(x_TW, delta_TW, layer.attn_norm_W, eps)
            if index in aux_TW:
                aux_TW[index].copy_(x_TW)
            qkv_TF = layer.qkv(h_TW)
            kernels.rope(qkv_TF, table, batch.position_T, layer.spec, layer.qk_norms, eps)
            q_THD, k_TKD, v_TKD = _split_heads(qkv_TF, layer.spec)
            mixed_TW = attend(index, q_THD, k_TKD, v_TKD, batch, layer.spec, kernels)
            h_TW = kernels.add_norm(x_TW, layer.out(mixed_TW), layer.mlp_norm_W, eps)
            delta_TW = layer.down(kernels.silu_mul(layer.gate_up(h_TW)))
        return kernels.add_norm(x_TW, delta_TW, self._norm_W, eps)

    @torch.inference_mode()
    def embed(self, token_T: Tensor) -> Tensor:
        """See `TargetModel.embed`."""
        return F.embedding(token_T, self._embed_VW).to(self.dtype)

    @torch.inference_mode()
    def head(self, hidden_RW: Tensor) -> Tensor:
        """See `TargetModel.head`."""
        logits_RV: Tensor = self._head(hidden_RW.to(self.dtype)).float()
        return logits_RV


def _whole_pass(kernels: Kernels, layers: list[_Layer], norm_W: Tensor, eps: float) -> WholePass | None:
    """The layers as one call, where compiled kernels run all of them."""
    if not isinstance(kernels, NativeKernels):
        return None
    specs = []
    for layer in layers:
        products = matrices((layer.qkv, layer.out, layer.gate_up, layer.down))
        if products is None:
            return None
        norms = layer.attn_norm_W, layer.mlp_norm_W, layer.qk_norms
        qkv, out, gate_up, down = products
        specs.append(LayerSpec(*norms, qkv, out, gate_up, down, layer.spec))
    return WholePass(kernels, specs, norm_W, eps) if WholePass.fits(specs) else None


def _split_heads(qkv_TF: Tensor, spec: HeadSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the fused projection: q [T, H, D], k and v [T, K, D]."""
    qkv_TAD = qkv_TF.unflatten(1, (-1, spec.dim))
    q_THD, k_TKD, v_TKD = qkv_TAD.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    return q_THD, k_TKD, v_TKD


class _Loader:
    """Takes tensors from a checkpoint and lays them out for the decoder."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        weights: str,
    ) -> None:
        self._weights = weights
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def raw(self, name: str, *shape: int) -> Tensor:
        """A tensor in the checkpoint's dtype."""
        return self._checkpoint.get(name, shape).to(self._device)

    def vector(self, name: str, size: int) -> Tensor:
        return self.raw(name, size).to(self._dtype)

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> PackedLinear:
        return self.fused([(name, outputs)], inputs, bias=bias)

    def fused(self, parts: list[tuple[str, int]], inputs: int, *, bias: bool) -> PackedLinear:
        """Several projections of one input as one product."""
        weights = [self._checkpoint.get(f"{name}.weight", (outputs, inputs)) for name, outputs in parts]
        biases = (
            [self._checkpoint.get(f"{name}.bias", (outputs,)) for name, outputs in parts] if bias else None
        )
        joined = join(weights, self._device)
        bias_O = None if biases is None else join(biases, self._device)
        return pack(joined, bias_O, self._dtype, self._weights)

    def layer(self, index: int) -> _Layer:
        config, at = self._config, f"model.layers.{index}"
        dim, hidden, inner = config.head_dim, config.hidden, config.intermediate
        q, kv = config.heads * dim, config.kv_heads * dim
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        norms = (
            (self.vector(f"{attn}.q_norm.weight", dim), self.vector(f"{attn}.k_norm.weight", dim))
            if config.qk_norm
            else None
        )
        return _Layer(
            attn_norm_W=self.vector(f"{at}.input_layernorm.weight", hidden),
            qkv=self.fused(
                [(f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)],
                hidden,
                bias=config.qkv_bias,
            ),
            qk_norms=norms,
            out=self.linear(f"{attn}.o_proj", hidden, q, bias=config.out_bias),
            mlp_norm_W=self.vector(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=self.fused(
                [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], hidden, bias=config.mlp_bias
            ),
            down=self.linear(f"{mlp}.down_proj", hidden, inner, bias=config.mlp_bias),
            spec=HeadSpec(config.heads, config.kv_heads, dim, dim**-0.5, config.windows[index]),
        )


def _tensor_names(config: DecoderConfig) -> Iterator[str]:
    """Every tensor that a checkpoint of this configuration holds."""
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not config.tied:
        yield "lm_head.weight"
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias}
    biased |= {
        "o_proj": config.out_bias,
        "gate_proj": config.mlp_bias,
        "up_proj": config.mlp_bias,
        "down_proj": config.mlp_bias,
    }
    for index in range(config.layers):
        at = f"model.layers.{index}"
        yield from (f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight")
        for name, bias in biased.items():
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            yield f"{at}.{block}.{name}.weight"
            if bias:
                yield f"{at}.{block}.{name}.bias"
        if config.qk_norm:
            yield from (f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight")


def load_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device, *, weights: str = "stored"
) -> Decoder:
    """The own decoder for a model folder.

    Args:
        dtype: of activations and arithmetic.
        weights: how matrices are kept; see `foretell.models.linear.pack`.

    Raises:
        Unsupported: the configuration needs the transformers adapter.
        InputError: the folder is damaged, or its tensors do not fit its config.json; or these weights
            cannot be had here.
    """
    return Decoder(decoder_config(read_config(folder)), Checkpoint(folder), dtype, device, weights)
