"""Generation without cache, batch, or drafts: the whole sequence through the model for every token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from foretell.attention import Segment, pack
from foretell.drafters import build_drafter
from foretell.drafters.base import DrafterContext, DraftRequest, Observed
from foretell.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from foretell.drafters.sparse_target import Inner, SparseTargetDrafter
from foretell.drafters.translate import SameVocabulary
from foretell.engine import Engine, Request
from foretell.engine.verification import verify
from foretell.planner import FixedPlanner
from foretell.sampling import Sampler
from foretell.sparse import POLICIES, KVReader, Profile
from foretell.types import NO_NEEDS, DraftTree, SamplingParams, StepPlan
from foretell.verify import RULES

# of unequal length: some repeat themselves, one has a single token
PROMPTS = [
    [5, 17, 33, 8, 61],
    [40, 41, 9, 40, 41, 9, 40, 41],
    [7],
    [90, 3, 90, 3, 55, 12, 13, 14, 15, 16, 17],
]


def generate(model, prompt: Sequence[int], params: SamplingParams, end_ids=frozenset()) -> list[int]:
    """What plain decoding emits, ids only."""
    tokens = list(prompt)
    ends = (frozenset() if params.ignore_eos else end_ids) | params.stop_ids
    sampler = Sampler(params, tokens, len(prompt), params.seed or 0, ends)
    while len(tokens) - len(prompt) < params.max_tokens:
        tokens.append(sampler.choose(logits_after(model, tokens)))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def logits_after(model, tokens: Sequence[int]) -> Tensor:
    """The model's logits [V] after a text, from scratch."""
    batch = pack([Segment(0, 0, list(tokens))], model.new_arena(len(tokens)))
    return model.forward(batch).logits_RV[0]


class Fortune:
    """A drafter that knows plain decoding's answers and mixes them with lies, in random trees.

    What a drafter proposes must not matter; this one proposes everything that can be proposed: the
    right path at any place among the siblings, right beginnings with wrong ends, wrong beginnings,
    nothing at all.
    """

    needs = NO_NEEDS
    expects = 0.0
    draft_tokens = 5

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocabulary: int, seed: int) -> None:
        self._answers = answers
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._started: dict[int, tuple[int, ...]] = {}
        self.observed: list[tuple[int, int, int]] = []

    def start(self, request: DraftRequest) -> None:
        self._started[request.id] = tuple(request.tokens)

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        return [self._tree(r, p.draft_tokens) for r, p in zip(requests, plans, strict=True)]

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        assert request.id in self._started
        assert seen.start + seen.count <= len(request.tokens)
        self.observed.append((request.id, seen.start, seen.count))

    def finish(self, request: DraftRequest) -> None:
        del self._started[request.id]

    def forget(self) -> None:
        """It knows everything anyway."""

    def _tree(self, request: DraftRequest, budget: int) -> DraftTree:
        prompt = self._started[request.id]
        truth = self._answers[prompt][len(request.tokens) - len(prompt) :]
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        right = [True]  # whether the root's, then each node's, path is the truth so far
        for _ in range(self._random.randint(0, budget)):
            parent = self._random.choice([-1, *range(len(tokens))] + [len(tokens) - 1] * 3)
            level = 0 if parent < 0 else depth[parent] + 1
            taken = {tokens[i] for i, p in enumerate(parents) if p == parent}
            token = self._random.randrange(self._vocabulary)
            if right[parent + 1] and level < len(truth) and self._random.random() < 0.7:
                token = truth[level]
            if token in taken:
                continue
            tokens.append(token)
            parents.append(parent)
            depth.append(level)
            right.append(right[parent + 1] and level < len(truth) and token == truth[level])
        return DraftTree(tuple(tokens), tuple(parents))


def engine(
    model,
    drafter="none",
    *,
    rule: str = "coupled",
    draft_tokens: int = 5,
    options: dict | None = None,
    decode=None,
    kv_slots: int = 512,
    max_batch: int = 16,
    prefill_chunk: int = 512,
    kv: str = "full",
    kv_budget: int = 512,
    lossless: bool = False,
    profile: Profile | None = None,
) -> Engine:
    """An engine on a tiny model; `drafter` is a name or a drafter."""
    if isinstance(drafter, str):
        context = DrafterContext(model, None, kv_slots, learning=RULES[rule].invariant)
        drafter = build_drafter(drafter, options or {}, context)
    reader = None if kv == "full" else KVReader(POLICIES[kv], kv_budget, model.num_layers, profile)
    if reader is not None and lossless:
        law = RULES[rule]
        inner = Inner(drafter, partial(verify, law), law.invariant, law.needs_q)
        drafter, reader = SparseTargetDrafter(model, reader, inner if drafter.draft_tokens else None), None
    return Engine(
        model,
        drafter,
        RULES[rule],
        FixedPlanner(draft_tokens),
        decode=decode,
        kv_slots=kv_slots,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        reader=reader,
    )


def draft_model(model, target, slots: int = 512, width: int = 1) -> DraftModelDrafter:
    """The draft-model drafter around a model that is already loaded."""
    shared = min(model.vocab_size, target.vocab_size)
    same = SameVocabulary(shared, model.vocab_size, target.vocab_size)
    return DraftModelDrafter(model, same, slots, DraftModelOptions(width))


def run(engine: Engine, prompts, params, end_ids=frozenset()) -> list[Request]:
    """Runs prompts as one batch; integrity is checked after every step."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [engine.submit(p, q, end_ids) for p, q in zip(prompts, each, strict=True)]
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.cache.check_integrity()
    return requests
