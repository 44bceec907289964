"""Many methods in one engine: what each request reads, and what it is verified by.

A prompt is read once, by a request that watches it for everybody (`Panel.reads`). The requests of all methods
then find it in the prefix cache and resume what was watched. Rows are exact, so a method's answer in this
company is the one that it gives alone.

Shape suffixes: N positions of the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretell.attention import Queries, Segment, pack
from foretell.bench.longcontext.methods import FULL, ORACLE, Method, Watch
from foretell.cache import KVArena, Lease
from foretell.drafters import AttendingDrafter, BorrowingDrafter, Drafter, DraftRequest, Observed
from foretell.models.base import TargetModel
from foretell.sparse import Heads, KVReader, ModelShape, Profile, draft_mass
from foretell.types import EMPTY_TREE, DraftTree, Needs, StepPlan, chain

_EVERYTHING = 1 << 40  # a budget that holds any prompt


@dataclass(slots=True)
class Panel:
    """Which request belongs to which method.

    Args:
        layers: of the target.
        every: of how many selections of a request one is compared with the truth; 0 = none is.
        profile: whom dustin asks; None = nobody in particular.

    Attributes:
        shares: per request, the share of the block's true attention that was selected, where compared.
        blocks: per request, the draft that is verified next.
    """

    layers: int
    every: int = 0
    profile: Profile | None = None
    by_request: dict[int, Method] = field(default_factory=dict)
    shares: dict[int, list[float]] = field(default_factory=dict)
    blocks: dict[int, DraftTree] = field(default_factory=dict)
    watcher: KVReader | None = None
    watched: int = -1

    def reads(self, request_id: int) -> None:
        """This request reads a prompt but for its last token, before all others."""
        self.watcher, self.watched = KVReader(Watch(), _EVERYTHING, self.layers), request_id

    def enter(self, request_id: int, method: Method) -> None:
        """This request is answered by this method."""
        self.by_request[request_id] = method
        self.shares[request_id] = []

    def own_reader(self, request_id: int) -> KVReader | None:
        """What a request of the engine reads by; None = everything."""
        if request_id == self.watched:
            return self.watcher
        method = self.by_request[request_id]
        rule = method.rule
        return None if rule is None else KVReader(rule, method.budget or 0, self.layers, self.profile)

    @property
    def asked(self) -> tuple[int, ...]:
        """Layers whose queries somebody wants."""
        layers = {*KVReader(Watch(), _EVERYTHING, self.layers).needs.queries}
        return tuple(sorted(layers if self.profile is None else {*layers, self.profile.target_heads.layer}))


class PanelReader:
    """A `Reader` that has one of its own for every request; see `Panel`.

    Args:
        make: request -> its reader; None = everything is read.
        measure: called with (request, arena, lease, what was selected).
        wants_draft: see `KVReader`.
    """

    def __init__(
        self,
        panel: Panel,
        make: Callable[[int], KVReader | None],
        measure: Callable[[int, KVArena, Lease, Tensor], None] | None = None,
        *,
        wants_draft: bool,
    ) -> None:
        self.wants_draft = wants_draft
        self.draft_heads = () if panel.profile is None else panel.profile.draft_heads
        self._panel = panel
        self._make = make
        self._measure = measure
        self._readers: dict[int, KVReader | None] = {}
        # without `prompts`: who watched the prompt has seen all of its rows
        self.needs = Needs(queries=panel.asked)

    def start(self, request_id: int, prompt: int) -> None:
        """See `KVReader`; resumes what was watched."""
        reader = self._readers[request_id] = self._make(request_id)
        if reader is None:
            return
        if reader is self._panel.watcher:
            reader.start(request_id, prompt)
        else:
            assert self._panel.watcher is not None
            reader.resume(request_id, prompt, self._panel.watcher, self._panel.watched)

    def finish(self, request_id: int) -> None:
        """Lets go of the request's reader, which the panel may still hold."""
        self._readers.pop(request_id, None)

    def ready(self, request_id: int) -> bool:
        """See `KVReader`."""
        reader = self._readers[request_id]
        return reader is not None and reader.ready(request_id)

    def observe(
        self,
        request_id: int,
        queries: Mapping[int, Queries],
        rows: Sequence[int],
        arena: KVArena,
        lease: Lease,
    ) -> None:
        """See `KVReader`."""
        if (reader := self._readers[request_id]) is not None:
            reader.observe(request_id, queries, rows, arena, lease)

    def select(
        self, request_id: int, arena: KVArena, lease: Lease, lookahead_N: Tensor | None = None
    ) -> Tensor | None:
        """See `KVReader`."""
        if (reader := self._readers[request_id]) is None:
            return None
        selected = reader.select(request_id, arena, lease, lookahead_N)
        if selected is not None and self._measure is not None:
            self._measure(request_id, arena, lease, selected)
        return selected


class PanelDrafter:
    """Drafts for all methods by the same drafter, and says where drafts look: for the oracle the truth, for
    others what their drafter says.

    Args:
        inner: who drafts.
        script: the text that every request is made to say: per step what of the draft it confirms, and
            one token more.
    """

    expects = 0.0

    def __init__(
        self,
        target: TargetModel,
        panel: Panel,
        inner: Drafter,
        script: Sequence[int] = (),
    ) -> None:
        self._target = target
        self._panel = panel
        self._inner = inner
        self._script = script
        self._arena: KVArena | None = None
        self._prompts: dict[int, int] = {}
        self._known: tuple[tuple[int, ...] | None, Tensor] = None, torch.empty(0)
        self.draft_tokens = inner.draft_tokens
        self.needs = inner.needs

    def borrow(self, arena: KVArena) -> None:
        """See `BorrowingDrafter`."""
        self._arena = arena
        if isinstance(self._inner, BorrowingDrafter):
            self._inner.borrow(arena)

    def start(self, request: DraftRequest) -> None:
        """See `Drafter`."""
        self._prompts[request.id] = len(request.tokens)
        self._inner.start(request)

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """The inner drafter's trees; with a script, what of it they foresaw and the token behind that."""
        if self._script:  # its last token takes the place of the target's own
            plans = [replace(plan, draft_tokens=max(0, plan.draft_tokens - 1)) for plan in plans]
        trees = self._inner.propose(requests, plans)
        if self._script:
            trees = [self._scripted(request, tree) for request, tree in zip(requests, trees, strict=True)]
        for request, tree in zip(requests, trees, strict=True):
            self._panel.blocks[request.id] = chain(tree.tokens[:-1]) if self._script else tree
        return trees

    def observe(self, request: DraftRequest, seen: Observed) -> None:
        """See `Drafter`."""
        self._inner.observe(request, seen)

    def finish(self, request: DraftRequest) -> None:
        """See `Drafter`."""
        self._inner.finish(request)

    def forget(self) -> None:
        """See `Drafter`."""
        self._inner.forget()

    @property
    def looker(self) -> ModelShape | None:
        """See `AttendingDrafter`."""
        return self._inner.looker if isinstance(self._inner, AttendingDrafter) else None

    def watch(self, heads: Sequence[Heads] = ()) -> bool:
        """See `AttendingDrafter`: the oracle always can."""
        if isinstance(self._inner, AttendingDrafter):
            self._inner.watch(heads)
        return True

    def draft_attention(self, request: DraftRequest, length: int) -> Tensor | None:
        """See `AttendingDrafter`; None for requests whose method does not go by it."""
        method = self._method(request)
        if method.policy == ORACLE:
            return self.truth(request.id, request.lease)
        if not method.looks_ahead or not isinstance(self._inner, AttendingDrafter):
            return None
        return self._inner.draft_attention(request, length)

    def measure(self, request_id: int, arena: KVArena, lease: Lease, selected: Tensor) -> None:
        """Compares a selection with the truth, now and then."""
        shares, every = self._panel.shares[request_id], self._panel.every
        shares.append(float("nan"))
        if every and len(shares) % every == 1 % every:
            shares[-1] = float(self.truth(request_id, lease)[selected.to(arena.device)].sum())

    def truth(self, request_id: int, lease: Lease | None) -> Tensor:
        """What the block that is verified next pays to each position when it reads everything, over all
        layers and heads: [N]."""
        assert lease is not None
        assert self._arena is not None
        block = self._panel.blocks.get(request_id, EMPTY_TREE)
        # behind the same exact rows the same block looks at the same places, whichever method asks
        key = None if lease.exact is not None else (*lease.tokens, -1, *block.tokens)
        if key is None or key != self._known[0]:
            layers = range(self._target.num_layers)
            self._known = key, block_attention(self._target, self._arena, lease, block, layers)
        return self._known[1]

    def _method(self, request: DraftRequest) -> Method:
        return self._panel.by_request.get(request.id, FULL)

    def _scripted(self, request: DraftRequest, draft: DraftTree) -> DraftTree:
        """What a step says of the script; one token where the prompt ends: its logits come of a full pass."""
        if request.id not in self._panel.by_request:
            return EMPTY_TREE
        said = len(request.tokens) - self._prompts[request.id]
        rest = self._script[said:]
        return chain(rest[: 1 + (foreseen(draft.tokens, rest) if said else 0)])


def foreseen(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens of a chain a text confirms."""
    return next(
        (i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b), min(len(draft), len(text))
    )


@torch.inference_mode()
def block_attention(
    target: TargetModel,
    arena: KVArena,
    lease: Lease,
    draft: DraftTree,
    layers: Sequence[int],
) -> Tensor:
    """Attention that the unread tokens and a draft behind them pay to each position of the history, mean over
    rows, layers and heads: [N].

    A pass of its own over all positions; it writes behind the committed rows, where the pass that verifies
    writes again.
    """
    length, block = lease.length, [*lease.tokens[lease.length :], *draft.tokens]
    assert draft.parents == tuple(range(-1, len(draft) - 1)), "the draft is a chain"
    segment = Segment(lease.start, length, block, logits=False)
    output = target.forward(pack([segment], arena), Needs(queries=tuple(layers)))
    found_N = draft_mass([output.queries], [Heads(layer) for layer in layers], arena, lease.start, length)
    assert found_N is not None
    return found_N
