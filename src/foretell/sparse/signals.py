"""What selection policies go by: attention recomputed from queries and keys of a few heads, and bounds on it.

Fused attention keeps no scores, so they are computed again, without values, for the heads that are asked for.
Scores of different heads are not comparable; their softmax is, so means over heads are taken after it.

Shape suffixes: R queries, H query heads, K key/value heads, J chosen query heads, N keys (the history, in
order of position), P pages, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.kernels import HeadSpec, NativeKernels, kernels_for

PAGE = 16  # keys that share a bound (Quest)
_SCORES_AT_ONCE = 1 << 22  # bounds the scores of a long prompt's rows


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known of a request's history when its slots are selected; policies say which they need.

    Args:
        length: tokens of the history, N.
        prompt: how many of them are the prompt.
        history_N: attention that the target's last confirmed token pays to each position.
        lookahead_N: attention that the drafted tokens pay, in the draft model; None = nobody looked ahead.
        window_N: attention that the prompt's last tokens paid, of prompt positions only.
        received_N: attention received so far, summed over all queries.
        pages_P: upper bound of what each page of keys can score with the last confirmed query.
    """

    length: int
    prompt: int
    history_N: Tensor | None = None
    lookahead_N: Tensor | None = None
    window_N: Tensor | None = None
    received_N: Tensor | None = None
    pages_P: Tensor | None = None


def attention_mass(
    q_RHD: Tensor, keys_KND: Tensor, spec: HeadSpec, heads: Sequence[int], last_R: Sequence[int]
) -> Tensor:
    """The attention probabilities [R, J, N] of these heads, float32.

    Args:
        q_RHD: rotated queries.
        heads: query heads; each scores the keys of its own key/value head.
        last_R: the last position that each query sees; what its layer's window hides gets 0.
    """
    scores_RJN = torch.empty(len(q_RHD), len(heads), keys_KND.shape[1], device=q_RHD.device)
    for kv, own in _by_kv_head(spec, heads).items():
        q_RJD = q_RHD[:, [heads[j] for j in own]] * spec.scale
        part_XN = q_RJD.flatten(0, 1) @ keys_KND[kv].T
        scores_RJN[:, own] = part_XN.float().unflatten(0, (len(q_RHD), -1))
    if spec.softcap:
        scores_RJN = spec.softcap * torch.tanh(scores_RJN / spec.softcap)
    if spec.window is not None or min(last_R) < keys_KND.shape[1] - 1:
        hidden_RN = _hidden(last_R, keys_KND, spec.window)
        scores_RJN = scores_RJN.masked_fill_(hidden_RN[:, None], -torch.inf)
    if spec.sinks_H is None:
        return scores_RJN.softmax(-1)
    sinks_RJ1 = spec.sinks_H[list(heads)].float().expand(len(q_RHD), -1)[..., None]
    return torch.cat([scores_RJN, sinks_RJ1], -1).softmax(-1)[..., :-1]


def add_attention(
    total_N: Tensor,
    q_RHD: Tensor,
    keys_KND: Tensor,
    spec: HeadSpec,
    heads: Sequence[int],
    last_R: Sequence[int],
) -> None:
    """Adds to `total_N` (float32) what every query pays to every position, averaged over the heads.

    With the compiled kernels a total is the same bits however its queries came, one by one or together.

    Args:
        q_RHD, keys_KND, last_R: see `attention_mass`.
        heads: query heads, ascending.
    """
    kernels = kernels_for(keys_KND.device, keys_KND.dtype, (spec.dim,))
    step = max(1, _SCORES_AT_ONCE // (len(heads) * keys_KND.shape[1]))
    for row in range(0, len(q_RHD), step):
        part_RHD, ends_R = q_RHD[row : row + step], last_R[row : row + step]
        if isinstance(kernels, NativeKernels):
            kernels.add_mass(total_N, part_RHD, keys_KND, spec, heads, ends_R)
        else:
            total_N += attention_mass(part_RHD, keys_KND, spec, heads, ends_R).sum(0).mean(0)


def page_bounds(keys_KND: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest key of each page, channel by channel: two [K, P, D]; the last page may be short."""
    whole = keys_KND.shape[1] // PAGE * PAGE
    pages = keys_KND[:, :whole].unflatten(1, (-1, PAGE))
    low, high = pages.amin(2), pages.amax(2)
    if rest := keys_KND.shape[1] - whole:
        tail_KND = keys_KND[:, -rest:]
        low = torch.cat([low, tail_KND.amin(1, keepdim=True)], 1)
        high = torch.cat([high, tail_KND.amax(1, keepdim=True)], 1)
    return low, high


class PageBounds:
    """`page_bounds` of a history that grows: pages that are full are looked at once."""

    def __init__(self) -> None:
        self._room_2KPD: Tensor | None = None
        self._full = 0

    def of(self, keys_KND: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of these keys, of which full pages of an earlier call are the first: views, good until the
        next call."""
        pages, room = -(-keys_KND.shape[1] // PAGE), self._room_2KPD
        if room is None or room.shape[2] < pages:
            heads, _, dim = keys_KND.shape
            self._room_2KPD = keys_KND.new_empty(2, heads, pages + pages // 4 + 1, dim)
            if room is not None:
                self._room_2KPD[:, :, : self._full] = room[:, :, : self._full]
            room = self._room_2KPD
        if self._full < pages:
            new = page_bounds(keys_KND[:, self._full * PAGE :])
            for store_KPD, new_KPD in zip(room, new, strict=True):
                store_KPD[:, self._full : pages] = new_KPD
        self._full = keys_KND.shape[1] // PAGE
        return room[0, :, :pages], room[1, :, :pages]


def page_scores(q_HD: Tensor, bounds: tuple[Tensor, Tensor], spec: HeadSpec, heads: Sequence[int]) -> Tensor:
    """Quest's score [J, P] of each page: sum over channels of max(q * low, q * high). No key of the page
    scores higher with this query."""
    low_KPD, high_KPD = bounds
    scores_JP = torch.empty(len(heads), low_KPD.shape[1], dtype=q_HD.dtype, device=q_HD.device)
    for kv, own in _by_kv_head(spec, heads).items():
        q_JD = q_HD[[heads[j] for j in own]] * spec.scale
        scores_JP[own] = q_JD.clamp(min=0) @ high_KPD[kv].T + q_JD.clamp(max=0) @ low_KPD[kv].T
    return scores_JP


def _by_kv_head(spec: HeadSpec, heads: Sequence[int]) -> dict[int, list[int]]:
    """Key/value head -> places among `heads` of the query heads that read it."""
    group, found = spec.heads // spec.kv_heads, dict[int, list[int]]()
    for place, head in enumerate(heads):
        found.setdefault(head // group, []).append(place)
    return found


def _hidden(last_R: Sequence[int], keys_KND: Tensor, window: int | None) -> Tensor:
    """Positions [R, N] that these queries do not see."""
    last_R1 = torch.tensor(last_R, device=keys_KND.device)[:, None]
    place_N = torch.arange(keys_KND.shape[1], device=keys_KND.device)
    hidden_RN = place_N > last_R1
    return hidden_RN if window is None else hidden_RN | (place_N <= last_R1 - window)
