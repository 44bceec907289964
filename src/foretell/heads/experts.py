"""Mixtures of experts as MTP modules have them: Qwen3-Next's and DeepSeek-V3's routing.

Shape suffixes: T rows, W hidden width, E experts, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretell.heads.layers import GatedMlp, Projection, Slot, positive


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Shape and routing of a mixture of experts.

    Args:
        hidden, inner, count, active: widths; experts, and how many of them a row uses.
        shared_inner: width of the expert that every row uses.
        shared_gated: whether the shared expert's output is gated (Qwen3-Next).
        sigmoid: DeepSeek's routing: sigmoid scores, a correction bias that only chooses, the best
            `active_groups` of `groups`; otherwise softmax scores.
        normalised: whether the weights of the active experts add up to one.
        scale: factor of the weights.
    """

    hidden: int
    inner: int
    count: int
    active: int
    shared_inner: int
    shared_gated: bool = False
    sigmoid: bool = False
    groups: int = 1
    active_groups: int = 1
    normalised: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "hidden", "inner", "count", "active", "shared_inner", "groups", "active_groups")
        if self.count % self.groups or self.active_groups > self.groups:
            raise ValueError(
                f"{self.count} experts in {self.groups} groups, {self.active_groups} of them active"
            )
        if self.active > self.count * self.active_groups // self.groups:
            raise ValueError(f"{self.active} of {self.count} experts are active")


def qwen_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """From Qwen3-Next's configuration."""
    return ExpertsConfig(
        hidden=int(config["hidden_size"]),
        inner=int(config["moe_intermediate_size"]),
        count=int(config["num_experts"]),
        active=int(config["num_experts_per_tok"]),
        shared_inner=int(config["shared_expert_intermediate_size"]),
        shared_gated=True,
        normalised=bool(config.get("norm_topk_prob", True)),
    )


def deepseek_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """From DeepSeek-V3's configuration."""
    inner = int(config["moe_intermediate_size"])
    return ExpertsConfig(
        hidden=int(config["hidden_size"]),
        inner=inner,
        count=int(config["n_routed_experts"]),
        active=int(config["num_experts_per_tok"]),
        shared_inner=inner * int(config.get("n_shared_experts") or 1),
        sigmoid=True,
        groups=int(config.get("n_group") or 1),
        active_groups=int(config.get("topk_group") or 1),
        normalised=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )


class Experts(nn.Module):
    """Drop-in for `layers.GatedMlp`."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self._config = config
        self.gate = Projection(config.hidden, {"gate": config.count})
        self.bias_E = nn.Parameter(torch.zeros(config.count)) if config.sigmoid else None
        self.experts = nn.ModuleList(GatedMlp(config.hidden, config.inner) for _ in range(config.count))
        self.shared = GatedMlp(config.hidden, config.shared_inner)
        gate = Projection(config.hidden, {"shared_expert_gate": 1}) if config.shared_gated else None
        self.shared_gate = gate

    def forward(self, x_TW: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        weight_TE = self._route(self.gate(x_TW).float()).to(x_TW.dtype)
        out_TW: Tensor = self.shared(x_TW)
        if self.shared_gate is not None:
            out_TW = out_TW * torch.sigmoid(self.shared_gate(x_TW))
        for index in weight_TE.any(0).nonzero().flatten().tolist():
            (rows,) = torch.where(weight_TE[:, index] != 0)
            part_TW = self.experts[index](x_TW[rows]) * weight_TE[rows, index, None]
            out_TW = out_TW.index_add(0, rows, part_TW)
        return out_TW

    def _route(self, logits_TE: Tensor) -> Tensor:
        """Weight of every expert, zero for those that do not run."""
        config = self._config
        if config.sigmoid:
            assert self.bias_E is not None
            score_TE = logits_TE.sigmoid()
            chosen = self._best_groups(score_TE + self.bias_E.float()).topk(config.active, dim=-1).indices
        else:
            score_TE = logits_TE.softmax(-1)
            chosen = score_TE.topk(config.active, dim=-1).indices
        weights = score_TE.gather(1, chosen)
        if config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.sigmoid else 0.0))
        weight_TE: Tensor = torch.zeros_like(score_TE).scatter(1, chosen, weights * config.scale)
        return weight_TE

    def _best_groups(self, score_TE: Tensor) -> Tensor:
        """Scores of the experts in the best groups; a group counts the sum of its two best."""
        config = self._config
        grouped_TGE = score_TE.unflatten(1, (config.groups, -1))
        value_TG = grouped_TGE.topk(min(2, grouped_TGE.shape[-1]), dim=-1).values.sum(-1)
        kept = value_TG.topk(config.active_groups, dim=-1).indices
        mask_TG = torch.zeros_like(value_TG, dtype=torch.bool).scatter(1, kept, True)
        left_TE: Tensor = grouped_TGE.masked_fill(~mask_TG[..., None], -torch.inf).flatten(1)
        return left_TE

    def slots(self, at: str) -> Iterator[Slot]:
        """Tensors below `at`, which ends with a dot."""
        yield from self.gate.slots(at)
        if self.bias_E is not None:
            yield Slot(f"{at}gate.e_score_correction_bias", self.bias_E, 0, len(self.bias_E))
        for index, expert in enumerate(self.experts):
            assert isinstance(expert, GatedMlp)
            yield from expert.slots(f"{at}experts.{index}.")
        yield from self.shared.slots(f"{at}{'shared_expert.' if self.shared_gate else 'shared_experts.'}")
        if self.shared_gate is not None:
            yield from self.shared_gate.slots(at)
