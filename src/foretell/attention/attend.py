"""The one place where attention happens, for the own decoder and for the transformers adapter.

Shape suffixes: T packed rows, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor

from foretell.attention.batch import Batch, Queries
from foretell.kernels import HeadSpec, Kernels


def attend(
    layer: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    batch: Batch,
    spec: HeadSpec,
    kernels: Kernels,
) -> Tensor:
    """Writes K and V of every row into its request's range, then attends.

    Args:
        layer: index of the layer in the arena.
        q_THD, k_TKD, v_TKD: rotated queries and keys, and values; last dimension contiguous.

    Returns:
        [T, H * D]; row t is the mix of the values that row t sees (`Batch.seen`).
    """
    batch.attend_calls += 1
    if layer in batch.capture:
        batch.queries[layer] = Queries(q_THD.clone(), spec)
    if batch.elsewhere is not None:
        return batch.elsewhere(layer, q_THD, k_TKD, v_TKD, spec, kernels)
    return kernels.attend(q_THD, k_TKD, v_TKD, batch.arena.layer(layer), batch.seen(spec.window), spec)
