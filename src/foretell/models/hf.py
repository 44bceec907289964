"""Any other architecture: the graph of transformers, our attention and our KV cache.

transformers lets a registered function do the attention of every layer. Ours writes K and V into the
arena and calls `attend`, so packing, tree masks, rollback and prefix reuse work as with the own decoder.
The seam drops what it does not know without a word, so six guards turn silence into errors:

1. a keyword that the hook does not implement and that is not None raises;
2. after a pass, the hook must have run once per layer;
3. only architectures with a parity test run (`TESTED`); others need a flag;
4. this is the only file that knows transformers' attention interface;
5. nothing else of transformers is used at run time: no generate, no caches, no hidden-state outputs;
6. rotary embeddings whose angles depend on the whole batch are refused.

Shape suffixes: T packed rows, H query heads, K key/value heads, D head size, W hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.attention import Batch, Segment, attend, pack
from foretell.cache import KVArena
from foretell.errors import InputError
from foretell.kernels import HeadSpec, Kernels, kernels_for
from foretell.models.base import ForwardOutput
from foretell.models.config import architecture_of, read_config
from foretell.models.linear import pack as pack_linear
from foretell.types import NO_NEEDS, Needs

_NAME = "foretell"
# keywords that carry nothing for a packed batch whose masks we build ourselves
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "use_cache",
        "cache_position",
        "layer_idx",
    }
)

_TESTED_NAMES = (
    "Llama Mistral Qwen2 Qwen3 Phi3 Gemma Gemma2 Gemma3 Olmo2 Granite SmolLM3 Glm4 Starcoder2 GPTNeoX Phi",
    "Ernie4_5 Helium OPT Qwen3Moe Mixtral GptOss Cohere2 Exaone4",
)
TESTED = frozenset(f"{name}ForCausalLM" for names in _TESTED_NAMES for name in names.split())


@dataclass
class _Pass:
    """What the hook needs during one forward: handed through the graph as a keyword."""

    batch: Batch
    kernels: Kernels | None
    shapes: list[tuple[int, int]] = field(default_factory=list)  # (kv heads, head size) per layer seen


def _hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    foretell: _Pass | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D]."""
    layer = int(getattr(module, "layer_idx", -1))
    if foretell is None:
        raise ValueError("the model was called without foretell's batch")
    unknown = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ValueError(f"layer {layer} asks attention for {', '.join(unknown)}, which is not implemented")
    if key.shape != value.shape:
        raise ValueError(
            f"layer {layer} has values of another size than its keys: {value.shape[-1]} and {key.shape[-1]}"
        )
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    heads, kv_heads, dim = q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2]
    if foretell.kernels is None:  # the probe of the constructor: only the shapes matter
        foretell.shapes.append((kv_heads, dim))
        return query.transpose(1, 2), None
    spec = HeadSpec(
        heads,
        kv_heads,
        dim,
        scale=dim**-0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap or 0.0,
        sinks_H=None if s_aux is None else s_aux.float().contiguous(),
    )
    mixed_TW = attend(layer, q_THD, k_TKD, v_TKD, foretell.batch, spec, foretell.kernels)
    return mixed_TW.view(1, len(q_THD), heads, dim), None


class HfModel:
    """A `TargetModel` over a transformers graph; build it with `load_hf`."""

    impl = "hf"

    def __init__(self, graph: Any, dtype: torch.dtype, device: torch.device, weights: str = "stored") -> None:
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self._graph = graph
        config = graph.config.get_text_config()
        try:
            self.vocab_size = int(config.vocab_size)
            self.num_layers = int(config.num_hidden_layers)
            self.num_heads = int(config.num_attention_heads)
            self.max_context = int(config.max_position_embeddings)
            self.hidden_size = int(config.hidden_size)
        except AttributeError as error:
            raise InputError(
                f"{type(graph).__name__} is no attention model that can be run here: {error}"
            ) from error
        self._linears_exact = _pack_linears(graph, dtype, weights)
        self._kv_heads, self._dim = self._probe()
        self._kernels = kernels_for(device, dtype, (self._dim,))
        # norms and activations of the graph are torch's, which treat each row alone as well
        self.row_exact = self._kernels.row_exact and self._linears_exact

    def new_arena(self, slots: int) -> KVArena:
        """An arena of this model's shape."""
        return KVArena(self.num_layers, self._kv_heads, self._dim, slots, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, needs: Needs = NO_NEEDS) -> ForwardOutput:
        """One pass; see `TargetModel.forward`."""
        batch.capture = frozenset(needs.queries)
        hidden: list[Tensor] = []
        aux_TW: dict[int, Tensor] = {}
        hooks = self._observe(needs, hidden, aux_TW)
        try:
            logits_RV = self._run(batch, _Pass(batch, self._kernels)).float()
        finally:
            for hook in hooks:
                hook.remove()
        if batch.attend_calls != self.num_layers:
            raise ValueError(
                f"{type(self._graph).__name__} does not route attention through the hook: "
                f"{batch.attend_calls} calls for {self.num_layers} layers"
            )
        return ForwardOutput(logits_RV, hidden[0] if hidden else None, aux_TW, batch.queries)

    @torch.inference_mode()
    def embed(self, token_T: Tensor) -> Tensor:
        """See `TargetModel.embed`."""
        rows_TW: Tensor = self._graph.get_input_embeddings()(token_T)
        return rows_TW

    @torch.inference_mode()
    def head(self, hidden_RW: Tensor) -> Tensor:
        """See `TargetModel.head`; with the scale or soft cap that the architecture puts on its logits."""
        config = self._graph.config.get_text_config()
        logits_RV: Tensor = self._graph.get_output_embeddings()(hidden_RW.to(self.dtype)).float()
        if scaling := getattr(config, "logits_scaling", None):
            logits_RV = logits_RV / scaling
        if scale := getattr(config, "logit_scale", None):
            logits_RV = logits_RV * scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits_RV = cap * torch.tanh(logits_RV / cap)
        return logits_RV

    def _run(self, batch: Batch, state: _Pass) -> Tensor:
        out = self._graph(
            input_ids=batch.token_T[None],
            position_ids=batch.position_T[None],
            use_cache=False,
            logits_to_keep=batch.logit_R,
            foretell=state,
        )
        logits_RV: Tensor = out.logits[0]
        return logits_RV

    def _probe(self) -> tuple[int, int]:
        """Key/value heads and head size, from one token through the graph.

        Raises:
            InputError: the graph asks of attention what is not implemented, or does not ask it at all.
        """
        name = type(self._graph).__name__
        batch = pack([Segment(0, 0, [0])], KVArena(1, 1, 1, 1, self.dtype, self.device))
        state = _Pass(batch, None)
        try:
            with torch.inference_mode():
                self._run(batch, state)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise InputError(f"{name} cannot run on this cache: {error}") from error
        shapes = set(state.shapes)
        if len(state.shapes) != self.num_layers or len(shapes) != 1:
            raise InputError(
                f"{name} cannot run on this cache: {len(state.shapes)} attention calls for {self.num_layers} "
                f"layers, shapes {sorted(shapes)}"
            )
        return shapes.pop()

    def _observe(self, needs: Needs, hidden: list[Tensor], aux_TW: dict[int, Tensor]) -> list[Any]:
        """Forward hooks that collect what is needed."""
        hooks = []
        if needs.last_hidden:
            hooks.append(
                self._graph.get_decoder().register_forward_hook(
                    lambda _m, _i, out: hidden.append(out.last_hidden_state[0])
                )
            )
        layers = _decoder_layers(self._graph, self.num_layers) if needs.aux_layers else None
        for index in needs.aux_layers:
            assert layers is not None
            if index < self.num_layers:
                hooks.append(
                    layers[index].register_forward_pre_hook(_keep_input(index, aux_TW), with_kwargs=True)
                )
            else:
                hooks.append(layers[-1].register_forward_hook(_keep_output(index, aux_TW)))
        return hooks


def _keep_input(index: int, aux_TW: dict[int, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        aux_TW[index] = states[0]

    return hook


def _keep_output(index: int, aux_TW: dict[int, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        aux_TW[index] = (out[0] if isinstance(out, tuple) else out)[0]

    return hook


def _decoder_layers(graph: nn.Module, count: int) -> nn.ModuleList:
    for module in graph.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(f"{type(graph).__name__} has no list of {count} layers")


def _pack_linears(graph: nn.Module, dtype: torch.dtype, weights: str) -> bool:
    """Replaces every plain nn.Linear; returns whether no product is left to a kernel that mixes rows."""
    for name, module in list(graph.named_modules()):
        if type(module) is nn.Linear:
            bias_O = None if module.bias is None else module.bias.data
            parent = graph.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], pack_linear(module.weight.data, bias_O, dtype, weights))
    graph.to(dtype)
    matrices = [p for n, p in graph.named_parameters() if p.ndim > 1 and "embed" not in n]
    packed = [m for m in graph.modules() if hasattr(m, "row_exact")]
    return not matrices and all(module.row_exact for module in packed)


def _refuse_moving_rope(config: Any) -> None:
    """Guard 6: transformers takes the angles of these types from the longest sequence of a pass, so a
    request would depend on its neighbours and cached keys would go stale."""
    settings = [config.get("rope_scaling"), config.get("rope_parameters")]
    settings += [each for part in settings if isinstance(part, dict) for each in part.values()]
    for part in settings:
        kind = str((part.get("rope_type") or part.get("type")) if isinstance(part, dict) else "")
        if kind in ("dynamic", "longrope", "su"):
            raise InputError(f"rotary embeddings of type {kind!r} change with the length of the batch")


def load_hf(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weights: str = "stored",
    allow_untested: bool = False,
) -> HfModel:
    """The transformers graph of a model folder with our attention.

    Raises:
        InputError: an untested architecture without `allow_untested`, missing or surplus tensors, a
            graph that does not call the attention interface.
    """
    architecture = architecture_of(read_config(folder))
    if architecture not in TESTED and not allow_untested:
        raise InputError(
            f"architecture {architecture} has no parity test",
            hint="pass --allow-untested to run it all the same",
        )
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, _hook)
    try:
        graph, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=_NAME,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"transformers cannot load {folder}: {error}") from error
    problems = {
        kind: sorted(info[kind])
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    }
    if problems:
        raise InputError(f"{folder} does not fit {architecture}: {problems}")
    return HfModel(graph.eval().to(device), dtype, device, weights)
