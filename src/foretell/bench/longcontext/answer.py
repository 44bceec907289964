"""Answers a prompt by every method, and scores a text under every method, with the engine's own decoding.

A text is scored as decoding would say it, teacher-forced: per step what of a draft the text confirms, and one
token more, behind one selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.bench.longcontext.methods import FULL, Method
from foretell.bench.longcontext.metrics import score
from foretell.bench.longcontext.panel import Panel, PanelDrafter, PanelReader
from foretell.bench.longcontext.questions import Question
from foretell.drafters import AttendingDrafter, Drafter, DrafterContext, build_drafter
from foretell.drafters.none import NoDrafter
from foretell.drafters.sparse_target import SparseTargetDrafter
from foretell.engine import Engine, Request
from foretell.errors import InputError
from foretell.models.load import LoadedModel
from foretell.noise import Stream
from foretell.planner import FixedPlanner
from foretell.sparse import POLICIES, KVReader, Profile, choose, shape_of
from foretell.types import DraftTree, SamplingParams, Verdict
from foretell.verify import RULES, Draws, Rule, Target

_AT_ONCE = 8  # methods in one batch; each holds a copy of the prompt's keys
_EVERY = 4  # of so many selections one is compared with the truth


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a method made of a prompt.

    Args:
        value: the score of an answer; of a text, the sum of its log-probabilities.
        tokens: emitted, or scored.
        read: tokens of the history whose keys verification read per token behind the first.
        share: of the true attention to the history, what fell on the selection; None = never compared.
        al: tokens per verification.
        ids: the answer.
    """

    method: str
    value: float
    tokens: int
    read: float
    share: float | None
    al: float
    text: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, for all methods alike.

    Args:
        model: a model of the target's vocabulary; None = the target itself over few keys.
        tokens: drafted per step; 0 = nothing is, and nobody looks ahead.
        kv, budget: what the target reads when it drafts.
    """

    model: str | None = None
    tokens: int = 4
    kv: str = "snapkv"
    budget: int = 512


class Runner:
    """Runs methods on one model.

    Args:
        longest: tokens of the longest prompt with its answer.
        at_once: methods in one batch.

    Raises:
        InputError: the draft cannot be loaded, or has another vocabulary.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        methods: Sequence[Method],
        drafting: Drafting,
        longest: int,
        at_once: int = _AT_ONCE,
    ) -> None:
        self._loaded = loaded
        self._methods = list(methods)
        self._drafting = drafting
        self._at_once = at_once
        self._slots = (min(at_once, len(methods)) + 1) * (longest + 3 * drafting.tokens + 1)
        self._draft = self._load_draft()
        self._profile = self._choose_profile()
        self._session: tuple[Panel, Engine] | None = None

    def answers(self, question: Question) -> list[Outcome]:
        """Every method's answer.

        Raises:
            InputError: the prompt and its answer exceed the model's context.
        """
        params = SamplingParams(
            max_tokens=question.max_tokens, stop=question.stop, min_tokens=question.min_tokens
        )
        if self._session is None:
            self._session = self._build(())
        panel, engine = self._session
        engine.forget()
        self._read(panel, engine, question.ids[:-1])
        return [
            _outcome(panel, method, request, _score(question, request.text))
            for group in self._groups()
            for method, request in self._run(panel, engine, group, question.ids, params)
        ]

    def perplexity(self, prompt: Sequence[int], text: Sequence[int]) -> list[Outcome]:
        """Every method's log-probability of a text behind a prompt, but for its first token, which a full
        pass tells."""
        count = len(text) - 1
        self._session = None  # its cache would lie beside the new one
        panel, engine = self._build(text)
        params = SamplingParams(max_tokens=count + 2, ignore_eos=True, logprobs=0)
        self._read(panel, engine, prompt[:-1])
        out = []
        for group in self._groups():
            for method, request in self._run(panel, engine, group, prompt, params, len(text)):
                told = request.logprobs[1 : len(text)]
                assert [entry.token_id for entry in told] == list(text[1:])
                out.append(_outcome(panel, method, request, sum(entry.logprob for entry in told), count))
        return out

    def _load_draft(self) -> Drafter | None:
        """A draft model, which all engines share; None = the target drafts."""
        model = self._drafting.model
        if model is None or not self._drafting.tokens:
            return None
        target = self._loaded
        context = DrafterContext(target.model, target.tokenizer, self._slots, target.folder)
        drafter = build_drafter(f"draft:{model}", {}, context)
        if not isinstance(drafter, AttendingDrafter) or drafter.looker is None:
            raise InputError(f"--draft {model} has another vocabulary than the target")
        return drafter

    def _choose_profile(self) -> Profile | None:
        """The shipped profile of the target and of who looks ahead for it."""
        target = shape_of(self._loaded.model, self._loaded.name)
        looker = self._draft.looker if isinstance(self._draft, AttendingDrafter) else target
        return choose(None, target, looker if self._drafting.tokens else None)

    def _build(self, text: Sequence[int]) -> tuple[Panel, Engine]:
        """An engine for all methods; with a text, one that makes them say it."""
        model, tokens = self._loaded.model, self._drafting.tokens
        panel = Panel(model.num_layers, _EVERY, self._profile)
        inner: Drafter = NoDrafter()
        if self._draft is not None:
            inner = self._draft
        elif self._drafting.tokens:
            few = PanelReader(panel, self._own_draft(panel), wants_draft=False)
            inner = SparseTargetDrafter(model, few, name=self._loaded.name)
        drafter = PanelDrafter(model, panel, inner, text)
        reader = PanelReader(panel, panel.own_reader, drafter.measure, wants_draft=True)
        engine = Engine(
            model,
            drafter,
            _FORCED if text else RULES["coupled"],
            FixedPlanner(tokens + 1 if text else tokens),
            decode=self._loaded.tokenizer.decode,
            kv_slots=self._slots,
            max_batch=self._at_once,
            reader=reader,
        )
        return panel, engine

    def _own_draft(self, panel: Panel) -> Callable[[int], KVReader | None]:
        """What the target reads when it drafts for a request."""
        policy, budget = POLICIES[self._drafting.kv], self._drafting.budget

        def make(request_id: int) -> KVReader | None:
            return None if request_id == panel.watched else KVReader(policy, budget, panel.layers)

        return make

    def _groups(self) -> list[list[Method]]:
        """Methods that run together. Full KV runs alone, so that a draft model reads the prompt once."""
        rest = [method for method in self._methods if method != FULL]
        parts = [rest[start : start + self._at_once] for start in range(0, len(rest), self._at_once)]
        return [[FULL], *parts]

    def _read(self, panel: Panel, engine: Engine, ids: Sequence[int]) -> None:
        """The prompt but for its last token, once for all methods."""
        once = SamplingParams(max_tokens=1, ignore_eos=True)
        request = engine.submit(ids, once, frozenset())
        panel.reads(request.id)
        while request.finish_reason is None:
            engine.step()

    def _run(
        self,
        panel: Panel,
        engine: Engine,
        group: Sequence[Method],
        ids: Sequence[int],
        params: SamplingParams,
        enough: int | None = None,
    ) -> list[tuple[Method, Request]]:
        """The requests of a group, finished, or each stopped after `enough` tokens."""
        requests = []
        for method in group:
            requests.append(engine.submit(ids, params, self._loaded.end_ids))
            panel.enter(requests[-1].id, method)
        while open_ := [r for r in requests if r.finish_reason is None]:
            engine.step()
            for request in open_:
                if enough is not None and request.emitted >= enough:
                    engine.abort(request)
        for request in requests:
            assert request.stats.reused == len(ids) - 1, "a method read the prompt itself"
            engine.abort(request)
        return list(zip(group, requests, strict=True))


def _outcome(
    panel: Panel, method: Method, request: Request, value: float, scored: int | None = None
) -> Outcome:
    stats = request.stats
    compared = [share for share in panel.shares.pop(request.id) if not math.isnan(share)]
    share = sum(compared) / len(compared) if compared else None
    later = stats.emitted - stats.first_emitted
    return Outcome(
        method.name,
        value,
        stats.emitted if scored is None else scored,
        stats.kv_read / later if later > 0 else 0.0,
        1.0 if method == FULL else share,
        stats.al,
        request.text if scored is None else "",
        tuple(request.output_ids) if scored is None else (),
    )


def _score(question: Question, text: str) -> float:
    answer = text.lstrip("\n").split("\n")[0] if question.first_line else text
    return score(question.metric, answer, question.references, question.classes)


def _forced(tree: DraftTree, target: Target, draws: Draws) -> Verdict:
    """Whatever the target thinks of it, the draft is said; its last token takes the place of the target's."""
    if not len(tree):
        return Verdict((), target.choose(-1), lossless=False)
    return Verdict(tuple(range(len(tree) - 1)), tree.tokens[-1], lossless=False)


_FORCED = Rule(
    name="forced",
    verify=_forced,
    lossless=False,
    draft_stream=Stream.TARGET,
    needs_q=False,
    invariant=False,
    draws=False,
    about="teacher forcing",
)
