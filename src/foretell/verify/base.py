"""What an acceptance rule sees and answers. Rules are pure: no model, no cache, no generator.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretell.noise import Stream
from foretell.types import DraftTree, Verdict


class Target(Protocol):
    """The target at the nodes of a draft tree; -1 is the root, before the first draft token."""

    def choose(self, node: int) -> int:
        """The target's own token after `node`, under the noise of that position."""
        ...

    def probs(self, node: int) -> Tensor:
        """Processed probabilities [V] of the token after `node`, float64."""
        ...


class Draws(Protocol):
    """Random decisions, each with a key of its own."""

    def accept(self, probability: float, depth: int, node: int) -> bool:
        """True with this probability; `node` is the draft token in question."""
        ...

    def sample(self, weights_V: Tensor, depth: int) -> int:
        """A token with probability proportional to its weight, at `depth` tokens after the root."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule.

    Args:
        name: on the command line.
        verify: (tree, target, draws) -> verdict.
        lossless: whether the output keeps the target's distribution.
        draft_stream: noise that sampled drafts must be drawn with under this rule.
        needs_q: whether it reads what sampled drafts were drawn from.
        invariant: whether the text under a seed is the same whatever was drafted.
        draws: whether anything is drawn at all; where not, a seed has no effect.
        about: one line for help texts.
    """

    name: str
    verify: Callable[[DraftTree, Target, Draws], Verdict]
    lossless: bool
    draft_stream: Stream
    needs_q: bool
    invariant: bool
    draws: bool
    about: str


def draft_probs(tree: DraftTree, node: int) -> Tensor | None:
    """What the children of `node` were drawn from [V], float64; None = chosen deterministically."""
    if tree.log_q is None:
        return None
    log_q_V = tree.log_q[node + 1]
    assert log_q_V is not None, f"node {node} has children but no log_q"
    return log_q_V.double().exp()


def without(q_V: Tensor | None, token: int) -> Tensor | None:
    """q after `token` was drawn from it: without it, and renormalised (SpecInfer; forgetting this
    biases the output)."""
    if q_V is None:
        return None
    q_V = q_V.clone()
    q_V[token] = 0
    total = q_V.sum()
    return q_V / total if total > 0 else q_V


def residual(p_V: Tensor, q_V: Tensor | None, token: int) -> Tensor:
    """The distribution that makes up for a rejection of `token`: (p - q)+, normalised; q is one-hot
    at `token` for a deterministic draft."""
    if q_V is None:
        rest_V = p_V.clone()
        rest_V[token] = 0
    else:
        rest_V = (p_V - q_V).clamp_(min=0)
    total = rest_V.sum()
    return rest_V / total if total > 0 else p_V
