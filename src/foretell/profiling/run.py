"""The search from models to a profile. Every finished trace is kept in a file, so that it can go on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.errors import InputError
from foretell.models.load import LoadedModel
from foretell.profiling import traces
from foretell.profiling.blocks import BLOCK, Block, Looker, block, drafted, places
from foretell.profiling.heads import mean_scores, needle_scores, top_heads, weights
from foretell.profiling.passes import decode, draft, follow
from foretell.profiling.search import Found, references, search, steps
from foretell.sparse import POLICIES, Heads, KVReader, Profile, shape_of
from foretell.sparse.policies import LEAST_BUDGET

AIM = "retrieval heads"  # whose attention is to be recovered; traces of another aim are others
_NEEDLE_ANSWER = 12  # tokens, for an answer of two words
_HELD_OUT = 3  # every third prompt judges what the others chose; prose and code take turns

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is searched on.

    Args:
        length: tokens of a trace.
        traces: needles, and as many prompts.
        blocks: verifications per prompt.
        budgets: for which a share is chosen; layers are chosen at the middle one.
        heads: retrieval heads per layer; 0 = all heads, and no needles.
        seed: of the needles.
        data: prompts; see `traces.prompts`.

    Raises:
        InputError: a bad value, or budgets that hold the whole trace.
    """

    length: int = 2048
    traces: int = 8
    blocks: int = 8
    budgets: tuple[int, ...] = (128, 256, 512)
    heads: int = 4
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        least = {"length": 1, "traces": 1, "blocks": 1, "heads": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InputError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if not self.budgets or min(self.budgets) < LEAST_BUDGET:
            raise InputError(f"budget must be at least {LEAST_BUDGET}, got {min(self.budgets, default=0)}")
        if max(self.budgets) >= self.length:
            raise InputError(f"budget must be below length ({self.length}), got {max(self.budgets)}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A profile and the figures behind it.

    Args:
        found: curves over the blocks that were searched.
        searched, judged: budget -> selection -> mean ARR, on those blocks and on others; `judged` is None
            where there was one prompt only.
        right: role -> (needles that were answered rightly, needles); empty without needles.
    """

    profile: Profile
    found: Found
    searched: dict[int, dict[str, float]]
    judged: dict[int, dict[str, float]] | None
    right: dict[str, tuple[int, int]]


class State:
    """Finished traces of one search, a file each.

    Raises:
        InputError: the folder holds another search.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        path, wanted = folder / "search.json", json.loads(json.dumps(facts))
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            half = path.with_suffix(".part")
            half.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
            half.rename(path)  # a cut file never has its name
        elif json.loads(path.read_text(encoding="utf-8")) != wanted:
            raise InputError(f"{folder} holds another search", hint="choose another --out, or remove it")

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What a file holds; made and stored if it is not there."""
        path = self._folder / f"{name}.pt"
        if not path.exists():
            half = path.with_suffix(".part")
            torch.save(make(), half)
            half.rename(path)  # a cut file never has its name
        return torch.load(path, weights_only=True)


def find(
    target: LoadedModel,
    draft: LoadedModel | None,
    settings: Settings,
    state: State,
    advance: Callable[[str, int, int], None],
    origin: dict[str, Any],
) -> Outcome:
    """Searches a profile.

    Args:
        draft: None = the target drafts for itself, reading few keys.
        advance: called with (what, done, total).
        origin: command, date and machine, for the profile.

    Raises:
        InputError: the traces do not fit a context, or the draft has another vocabulary.
    """
    _check(target, draft, settings)
    heads: dict[str, tuple[Heads, ...]] = {}
    right: dict[str, tuple[int, int]] = {}
    scores: dict[str, Tensor] = {}
    for role, loaded in {"target": target, "draft": draft}.items():
        if loaded is not None and settings.heads:
            scores[role], right[role] = _scores(role, loaded, settings, state, advance)
            heads[role] = top_heads(scores[role], settings.heads)
        elif loaded is not None:
            heads[role] = tuple(map(Heads, range(loaded.model.num_layers)))
            scores[role] = torch.ones(loaded.model.num_layers, loaded.model.num_heads)
    heads.setdefault("draft", heads["target"])
    weight_LH = weights(scores["target"]) if settings.heads else scores["target"] / scores["target"].numel()
    blocks = _blocks(target, draft, settings, state, heads, weight_LH, advance)
    held = set(range(_HELD_OUT - 1, len(blocks), _HELD_OUT)) or set(range(1, len(blocks)))
    if not held:
        _log.warning("one prompt: ARR is that of the search itself, not of a prompt that it has not seen")
    seen = [one for i, part in enumerate(blocks) if i not in held for one in part]
    unseen = [one for i in sorted(held) for one in blocks[i]]
    total, done = steps(len(seen[0].history_LN), settings.budgets), iter(range(1, 1 << 30))
    found = search(seen, settings.budgets, lambda: advance("search", next(done), total))
    advance("search", total, total)
    searched = references(seen, settings.budgets, found)
    judged = references(unseen, settings.budgets, found) if unseen else None
    origin = {
        **origin,
        "length": settings.length,
        "traces": len(blocks),
        "arr": _rounded(judged or searched),
        "curves": found.curves(),
    }
    shape = shape_of(target.model, target.name)
    profile = Profile(
        target=shape,
        draft=shape if draft is None else shape_of(draft.model, draft.name),
        target_heads=heads["target"][found.target_layer],
        draft_heads=tuple(heads["draft"][layer] for layer in sorted(found.draft_layers)),
        lookahead=found.lookahead,
        found=origin,
    )
    return Outcome(profile, found, searched, judged, right)


def _check(target: LoadedModel, draft: LoadedModel | None, settings: Settings) -> None:
    longest = settings.length + max(_NEEDLE_ANSWER, settings.blocks * BLOCK)
    for role, loaded in {"target": target, "draft": draft}.items():
        if loaded is not None and longest > loaded.model.max_context:
            raise InputError(
                f"length must be at most {loaded.model.max_context - longest + settings.length}, got "
                f"{settings.length}: the context of {role} {loaded.name} holds {loaded.model.max_context}"
            )
    if draft is not None and not target.tokenizer.same_vocabulary(draft.tokenizer):
        raise InputError(
            f"draft {draft.name} has another vocabulary than target {target.name}: its positions are others",
            hint="choose a draft of the same family",
        )


def _scores(
    role: str,
    loaded: LoadedModel,
    settings: Settings,
    state: State,
    advance: Callable[[str, int, int], None],
) -> tuple[Tensor, tuple[int, int]]:
    """The retrieval scores of every head [L, H], and how many needles were answered rightly."""
    samples: list[dict[str, Any]] = []
    what = f"needles, {role}"
    for number, needle in enumerate(
        traces.needles(loaded.tokenizer, settings.length, settings.traces, settings.seed)
    ):
        advance(what, number, settings.traces)

        def sample(needle: traces.Needle = needle) -> dict[str, Any]:
            passed = decode(loaded.model, needle.tokens, _NEEDLE_ANSWER)
            answer = loaded.tokenizer.decode(passed.tokens[passed.prompt :])
            scores = needle_scores(passed, needle.span)
            return {"right": needle.answer in answer, "scores": None if scores is None else scores.cpu()}

        samples.append(state.get(f"needle-{role}-{number}", sample))
    advance(what, settings.traces, settings.traces)
    counted = [one["scores"] for one in samples if one["right"] and one["scores"] is not None]
    right = len(counted)
    if not counted:
        counted = [one["scores"] for one in samples if one["scores"] is not None]
        _log.warning("%s %s answered no needle rightly: all answers count", role, loaded.name)
    if not counted:
        raise InputError(
            f"{role} {loaded.name} said nothing of any needle: retrieval heads cannot be told",
            hint="choose a smaller --length, or more --traces",
        )
    return mean_scores(counted), (right, settings.traces)


def _blocks(
    target: LoadedModel,
    draft: LoadedModel | None,
    settings: Settings,
    state: State,
    heads: dict[str, tuple[Heads, ...]],
    weight_LH: Tensor,
    advance: Callable[[str, int, int], None],
) -> list[list[Block]]:
    """The blocks of every prompt."""
    least = max(settings.budgets) + 1
    prompts = traces.prompts(target.tokenizer, settings.length, settings.traces, settings.data, least)
    if len(prompts) < settings.traces:
        _log.warning("%d prompts instead of %d: there is no more text", len(prompts), settings.traces)
    found = []
    for number, prompt in enumerate(prompts):
        advance("prompts", number, len(prompts))

        def record(prompt: Sequence[int] = prompt) -> list[list[Any]]:
            return [_stored(one) for one in _record(target, draft, prompt, settings, heads, weight_LH)]

        found.append([_restored(one) for one in state.get(f"prompt-{number}", record)])
    advance("prompts", len(prompts), len(prompts))
    return found


def _record(
    target: LoadedModel,
    other: LoadedModel | None,
    prompt: Sequence[int],
    settings: Settings,
    heads: dict[str, tuple[Heads, ...]],
    weight_LH: Tensor,
) -> Iterator[Block]:
    """The blocks of one prompt. Drafting for itself the target reads what self-speculation reads by default,
    at the middle budget."""
    middle = sorted(settings.budgets)[len(settings.budgets) // 2]
    reader = None if other else KVReader(POLICIES["snapkv"], middle, target.model.num_layers)
    passed = decode(target.model, prompt, settings.blocks * BLOCK, reader)
    model = target.model if other is None else other.model
    own = passed if other is None else follow(model, passed.tokens)
    for place in places(passed):
        looker = Looker(draft(model, own, drafted(place), reader), own)
        yield block(passed, place, heads["target"], weight_LH, looker, heads["draft"])


def _stored(one: Block) -> list[Any]:
    return [one.prompt, one.own, *_tensors(one)]


def _tensors(one: Block) -> list[Tensor]:
    return [one.true_N, one.history_LN, one.lookahead_LN, one.default_N, one.default_ahead_N]


def _restored(value: Sequence[Any]) -> Block:
    prompt, own, true_N, history_LN, lookahead_LN, default_N, default_ahead_N = value
    return Block(prompt, true_N, own, history_LN, lookahead_LN, default_N, default_ahead_N)


def _rounded(arr: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {str(k): {name: round(value, 4) for name, value in row.items()} for k, row in arr.items()}
