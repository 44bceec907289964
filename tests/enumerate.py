"""Exact distributions: runs a function under every sequence of random decisions that it can take."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretell.engine.verification import Rows
from foretell.sampling import Sampler
from foretell.types import DraftTree, SamplingParams
from foretell.verify import Rule


class Script:
    """Random decisions read from a list; beyond it, the first possible one, noting the others."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self.taken: list[int] = []
        self.probability = 1.0
        self.others: list[list[int]] = []
        self._prefix = prefix

    def pick(self, probs: Sequence[float]) -> int:
        possible = [i for i, p in enumerate(probs) if p > 0]
        if len(self.taken) < len(self._prefix):
            index = self._prefix[len(self.taken)]
        else:
            index = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(index)
        self.probability *= probs[index]
        return index

    def accept(self, probability: float, depth: int, node: int) -> bool:
        return self.pick([1 - probability, probability]) == 1

    def sample(self, weights_V: Tensor, depth: int) -> int:
        return self.pick((weights_V / weights_V.sum()).tolist())


def all_runs(run: Callable[[Script], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """result -> probability over every script."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    waiting: list[list[int]] = [[]]
    while waiting:
        script = Script(waiting.pop())
        found[run(script)] += script.probability
        waiting += script.others
    return found


class ScriptedRows(Rows):
    """The real processed target; its own token is picked by the script, as independent noise would."""

    script: Script
    known: dict[tuple[int, ...], Tensor]

    def probs(self, node: int) -> Tensor:
        key = tuple(self._ahead(node))
        if key not in self.known:
            self.known[key] = super().probs(node)
        return self.known[key].clone()

    def choose(self, node: int) -> int:
        return self.script.pick(self.probs(node).tolist())


class World:
    """A random target and a random draft over a tiny vocabulary, conditioned on the last token.

    Args:
        params: processors of the request.
        draft: "sampled" (without replacement, log_q reported), or "chosen" (deterministic).
        shape: children of the root, of each of them, ...
    """

    def __init__(
        self, params: SamplingParams, draft: str, shape: Sequence[int], seed: int = 0, vocab: int = 4
    ):
        generator = torch.Generator().manual_seed(seed)
        self.target_logits = torch.randn(vocab, vocab, generator=generator) * 1.5
        self.draft_logits = self.target_logits + torch.randn(vocab, vocab, generator=generator)
        self.prompt = [0, 1]
        self.params, self.draft, self.shape, self.vocab = params, draft, shape, vocab
        self.sampler = Sampler(params, list(self.prompt), len(self.prompt), seed=0, end_ids=[vocab - 1])
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._probs: dict[tuple[int, ...], Tensor] = {}
        self._log_q: dict[tuple[int, ...], Tensor] = {}

    def target_probs(self, ahead: Sequence[int]) -> Tensor:
        """The target after `ahead`, as plain decoding sees it."""
        key = tuple(ahead)
        if key not in self._probs:
            self._probs[key] = self.sampler.probs(self.target_logits[[*self.prompt, *ahead][-1]], ahead)
        return self._probs[key].clone()

    def draft_log_q(self, ahead: Sequence[int]) -> Tensor:
        key = tuple(ahead)
        if key not in self._log_q:
            scores = self.sampler.scores(self.draft_logits[[*self.prompt, *ahead][-1]], ahead)
            self._log_q[key] = scores.double().log_softmax(0)
        return self._log_q[key]

    def draw_children(self, log_q: Tensor, count: int, script: Script) -> list[int]:
        if self.draft == "chosen":
            return [int(i) for i in log_q.topk(min(count, int((log_q > -torch.inf).sum()))).indices]
        left, drawn = log_q.exp(), []
        for _ in range(min(count, int((left > 0).sum()))):
            drawn.append(script.pick((left / left.sum()).tolist()))
            left[drawn[-1]] = 0
        return drawn

    def draw_tree(self, script: Script) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        log_q: list[Tensor | None] = [None]
        level: list[tuple[int, list[int]]] = [(-1, [])]
        for count in self.shape:
            below = []
            for node, ahead in level:
                log_q[node + 1] = self.draft_log_q(ahead)
                for token in self.draw_children(log_q[node + 1], count, script):
                    tokens.append(token)
                    parents.append(node)
                    log_q.append(None)
                    below.append((len(tokens) - 1, [*ahead, token]))
            level = below
        return DraftTree(tuple(tokens), tuple(parents), tuple(log_q) if self.draft == "sampled" else None)

    def rows(self, tree: DraftTree, script: Script, *, faulty: bool = False) -> ScriptedRows:
        last = [self.prompt[-1], *tree.tokens]
        rows = ScriptedRows(self.sampler, tree, self.target_logits[last], None)
        rows.script = script
        rows.known = {} if faulty else self._known
        return rows

    def one_step(self, rule: Rule, script: Script) -> tuple[int, ...]:
        tree = self.draw_tree(script)
        verdict = rule.verify(tree, self.rows(tree, script), script)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    def sequence_probability(self, tokens: Sequence[int]) -> float:
        result = 1.0
        for i, token in enumerate(tokens):
            result *= float(self.target_probs(tokens[:i])[token])
        return result

    def error(self, step: Callable[[Script], tuple[int, ...]], length: int) -> float:
        """Total variation between `length` tokens (one step, then plain decoding) and the target."""
        emitted = all_runs(step)
        assert abs(sum(emitted.values()) - 1) < 1e-9, "the enumeration is not complete"
        total = 0.0
        for sequence in itertools.product(range(self.vocab), repeat=length):
            made = 0.0
            for start, probability in emitted.items():
                if sequence[: len(start)] == start[:length]:
                    after = 1.0
                    for i in range(len(start), length):
                        after *= float(self.target_probs(sequence[:i])[sequence[i]])
                    made += probability * after
            total += abs(made - self.sequence_probability(sequence))
        return total / 2
