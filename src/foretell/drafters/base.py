"""What a drafter is. It proposes tokens; it never decides what is emitted, so it can only change speed.

Shape suffixes: T rows, W hidden width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foretell.attention import Queries
from foretell.cache import KVArena, Lease
from foretell.errors import InputError
from foretell.heads.shipped import shipped_head
from foretell.models.base import TargetModel
from foretell.models.catalog import Report
from foretell.models.tokenizer import Tokenizer
from foretell.sampling import Sampler
from foretell.sparse import Heads, ModelShape, Profile, Reader
from foretell.types import DraftTree, Needs, StepPlan, Verdict

_log = logging.getLogger(__name__)


class DraftRequest(Protocol):
    """What a drafter may see of a request.

    Attributes:
        id: unique while the request lives.
        tokens: prompt and emitted tokens; grows.
        capacity: the most tokens that `tokens` can come to.
        end_ids: tokens that end the answer.
        sampler: how draft logits become proposals.
        lease: its slots in the target's cache, for drafters that borrow it; None while it waits.
    """

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def lease(self) -> Lease | None: ...


def reserved(request: DraftRequest) -> int:
    """How many tokens the request's own cache should hold by now: as many as the target's has room for."""
    return request.capacity if request.lease is None else min(request.capacity, request.lease.capacity)


@dataclass(frozen=True, slots=True)
class Observed:
    """What one step of the target showed of one request.

    Args:
        start: tokens of the request that the target had read before the step.
        count: tokens that it has read since, all of them in `request.tokens`.
        tree, verdict: what was drafted and kept; no verdict while the prompt is being read.
        hidden_TW, aux_TW: states of those `count` tokens, as far as the drafter needs them.
        choices: the target's likeliest token after the root, then after each node of the tree, by its
            raw logits; empty without a verdict, or where the drafter does not need them.
        queries: of those `count` tokens, as far as the drafter needs them.
    """

    start: int
    count: int
    tree: DraftTree
    verdict: Verdict | None
    hidden_TW: Tensor | None = None
    aux_TW: Mapping[int, Tensor] = field(default_factory=dict)
    choices: Sequence[int] = ()
    queries: Mapping[int, Queries] = field(default_factory=dict)


class Drafter(Protocol):
    """The life of a drafter: start, (propose, observe) per step, finish.

    `observe` is called after every step of a request, also when nothing was proposed, so that state
    stays in step. Emitted tokens are in `request.tokens` by then.

    Attributes:
        needs: states of the target that `observe` wants.
        expects: acceptance of its first draft token below which something is mis-wired; 0 = any.
        draft_tokens: nodes per step that suit it, where nobody says otherwise.
    """

    needs: Needs
    expects: float
    draft_tokens: int

    def start(self, request: DraftRequest) -> None: ...

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]) -> list[DraftTree]:
        """A tree of at most `plan.draft_tokens` nodes per request."""
        ...

    def observe(self, request: DraftRequest, seen: Observed) -> None: ...

    def finish(self, request: DraftRequest) -> None: ...

    def forget(self) -> None:
        """Drops what finished requests have left: texts, counts, cached prefixes."""
        ...


@runtime_checkable
class ScoredDrafter(Drafter, Protocol):
    """A drafter that knows what its drafts are worth, so that it can take turns with another."""

    def propose_scored(
        self, requests: Sequence[DraftRequest], plans: Sequence[StepPlan]
    ) -> list[tuple[DraftTree, float]]:
        """As `propose`, each tree with the number of tokens that it is expected to gain."""
        ...


@runtime_checkable
class AttendingDrafter(Drafter, Protocol):
    """A drafter whose own attention tells what the next tokens will need of the history (Dustin).

    Attributes:
        looker: the model whose attention that is; None = it has none to tell of.
    """

    @property
    def looker(self) -> ModelShape | None: ...

    def watch(self, heads: Sequence[Heads] = ()) -> bool:
        """From now on keeps what `draft_attention` needs of these heads, without any of those that it
        chooses; returns whether it can."""
        ...

    def draft_attention(self, request: DraftRequest, length: int) -> Tensor | None:
        """Attention [length] that the tokens of the last draft pay to the first `length` tokens of the
        request, averaged over them and some heads; None = nothing was drafted."""
        ...


def looks_ahead(drafter: Drafter, reader: Reader) -> bool:
    """Whether the drafter tells the reader where its drafts look; asks it to, if the policy wants that."""
    if not reader.wants_draft:
        return False
    watching = isinstance(drafter, AttendingDrafter) and drafter.watch(reader.draft_heads)
    if not watching:
        _log.warning("the drafter does not look ahead: slots are selected by the target's last token alone")
    return watching


@runtime_checkable
class RetractingDrafter(Drafter, Protocol):
    """A drafter that can take tokens back; others are finished and started again."""

    def retract(self, request: DraftRequest) -> None:
        """The request's last tokens were taken back: `tokens` has been cut, its last token is unread."""
        ...


@runtime_checkable
class LayeredDrafter(Drafter, Protocol):
    """A drafter above another one, which it lets draft for the target where a plan is `direct`.

    Attributes:
        direct_tokens: nodes per step that suit the other one alone; 0 = there is none.
    """

    direct_tokens: int


@runtime_checkable
class BorrowingDrafter(Drafter, Protocol):
    """A drafter that reads the target's cache, and writes behind what is committed there."""

    def borrow(self, arena: KVArena) -> None:
        """The cache in which `DraftRequest.lease` lies; called once, before anything else."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built for.

    Args:
        target: the model that verifies.
        tokenizer: the target's; None in tests without text.
        slots: tokens of all requests that may be live at once.
        folder: the target's checkpoint, for drafters that live in it; None in tests.
        learning: whether what other requests did may change a draft. Under rules whose text depends on the
            draft it must not: the same seed should give the same text.
        name: what the target was loaded as.
        kv_profile: the user's, for drafters that select keys; None = a shipped one, where one fits.
        allow_untested, report: for drafters that load a model; see `foretell.models.load.load_model`.
    """

    target: TargetModel
    tokenizer: Tokenizer | None
    slots: int
    folder: Path | None = None
    learning: bool = True
    allow_untested: bool = False
    report: Report | None = None
    name: str = ""
    kv_profile: Profile | None = None

    def head_folder(self, kind: str, argument: str | None, own: Callable[[Path], bool] | None = None) -> Path:
        """Where the drafter `kind` finds its heads: in the given folder, else in the target's checkpoint,
        else among those that come with the package.

        Args:
            own: whether a checkpoint of the target has some.

        Raises:
            InputError: there are none.
        """
        if argument:
            return Path(argument)
        if own is not None and self.folder is not None and own(self.folder):
            return self.folder
        if (folder := shipped_head(self.name, kind)) is not None:
            return folder
        raise InputError(
            f"no {kind} heads are known for {self.name or 'this model'}",
            hint=f"{kind}:PATH, or train some: foretell train {kind}",
        )


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """A drafter in the registry.

    Args:
        build: (context, argument, options) -> drafter; `argument` is what follows the colon in
            NAME:ARGUMENT, or None.
        argument: what the argument is, for messages ("MODEL"), in brackets where it may be left out
            ("[PATH]"); None = takes none.
        options: frozen dataclass of the options, with their defaults.
        about: one line for help texts.
    """

    build: Callable[[DrafterContext, str | None, Any], Drafter]
    argument: str | None
    options: type
    about: str
