"""Training: what a head sees is what it will see in the engine; nothing finished is lost; bad data counts."""

from __future__ import annotations

import errno
import json
import math

import pytest
import torch

from foretell.attention import Segment, pack
from foretell.errors import InputError
from foretell.heads.base import layer_output
from foretell.heads.checkpoint import KIND
from foretell.heads.vocabulary import head_rows
from foretell.models.rope import RopeTable
from foretell.train import answers as answers_module
from foretell.train import states as states_module
from foretell.train import trainer as trainer_module
from foretell.train.answers import AnswerSettings, Sample, read_answers, write_answers
from foretell.train.batch import groups, join
from foretell.train.data import read_prompts
from foretell.train.export import save_head
from foretell.train.heads import RECIPES, Shape
from foretell.train.losses import LOSSES, acceptance, cross_entropy, lk
from foretell.train.objective import FeatureObjective, MedusaObjective, Teacher, Weights
from foretell.train.resume import load_head
from foretell.train.states import StateStore
from foretell.train.trainer import Trainer, TrainingStopped, TrainSettings
from foretell.train.vocabulary import choose_vocabulary
from foretell.types import Needs, SamplingParams
from tests import head_files, oracle, reference_heads

FEATURE_KINDS = ("eagle", "eagle3", "mtp")
IDS = torch.tensor(sorted({*range(2, 90, 3), 5, 7, 9, 61}))
FLOOR = 1e-5


def sample(seed: int, prompt: int, answer: int) -> Sample:
    chance = torch.Generator().manual_seed(seed)
    return Sample(tuple(torch.randint(3, 90, (prompt + answer,), generator=chance).tolist()), prompt)


SAMPLES = [sample(1, 5, 9), sample(2, 1, 6), sample(3, 8, 3), sample(4, 3, 12)]


@pytest.fixture(scope="module")
def target(decoder):
    return decoder("llama", **head_files.TARGET)


def new_head(kind, target, **shape):
    """A head with random weights, and its config."""
    config = head_files.llama_config(num_hidden_layers=head_files.LAYERS)
    made = Shape(config, target.num_layers, None, len(IDS), **shape)
    torch.manual_seed(3)
    head = RECIPES[kind].make(made, head_rows(target, IDS).clone())
    for parameter in head.parameters():  # norms around one, everything else large enough to matter
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return head, RECIPES[kind].config(made)


def store_of(target, head, folder=None, limit=1 << 30, samples=SAMPLES):
    return StateStore(target, head.needs, samples, folder, limit)


class Seen:
    """A loss that records what it was given."""

    def __init__(self):
        self.pairs = []

    def __call__(self, logits_RV, chance_RV):
        self.pairs.append((logits_RV.detach().clone(), chance_RV.clone()))
        return cross_entropy(logits_RV, chance_RV)


def true_states(target, tokens):
    batch = pack([Segment(0, 0, list(tokens))], target.new_arena(len(tokens)))
    out = target.forward(batch, Needs(last_hidden=True, aux_layers=tuple(range(target.num_layers + 1))))
    return out.hidden_TW, out.aux_TW


def unrolled(head, target, tokens, path):
    """Logits over the draft vocabulary after `path`, every row run anew with dense causal attention."""
    table = RopeTable(head.rope, head.rotated, target.device).upto(64)

    def attend(q_THD, k_TKD, v_TKD):
        group = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = k_TKD.repeat_interleave(group, 1), v_TKD.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * head.scale
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v_THD).flatten(1)

    def step(embed, features):
        embed = embed.clone()
        if head.zero_first:
            embed[0] = 0
        return layer_output(head, embed, features, (table[0][: len(embed)], table[1][: len(embed)]), attend)

    hidden, aux = true_states(target, tokens)
    with torch.no_grad():
        features = head.features(hidden.clone(), {layer: state.clone() for layer, state in aux.items()})
        out = reference_heads.unroll(target.embed, step, head.feedback, features, tokens, path)
        own = head.logits(out[None])
        return (head.normed(out[None]) @ head_rows(target, IDS).T if own is None else own)[0]


@pytest.mark.parametrize("kind", FEATURE_KINDS)
def test_every_depth_sees_what_a_draft_of_the_engine_sees(kind, target):
    head, _ = new_head(kind, target)
    seen, depths = Seen(), 4
    objective = FeatureObjective(head, Teacher(target, IDS), Weights(depths=depths), seen)
    batch = join(SAMPLES, store_of(target, head).get(range(len(SAMPLES))))
    objective(batch, torch.Generator())
    assert len(seen.pairs) == depths
    for depth, (logits_RV, chance_RV) in enumerate(seen.pairs):
        row = 0
        for one in SAMPLES:
            count = max(0, len(one.tokens) - 2 - depth - (one.prompt - 1))
            for place in range(one.prompt - 1, one.prompt - 1 + count):
                known, path = one.tokens[: place + 2], one.tokens[place + 2 : place + 2 + depth]
                # half precision of the stored states, float32 here
                expected_V = unrolled(head, target, known, path)
                assert torch.allclose(logits_RV[row], expected_V, atol=3e-2, rtol=2e-2), (depth, place)
                judge_V = true_states(target, one.tokens)[0][place + 1 + depth]
                expected_V = target.head(judge_V[None])[0, IDS].softmax(-1)
                assert torch.allclose(chance_RV[row], expected_V, atol=1e-3)
                row += 1
        assert row == len(logits_RV)


@pytest.mark.parametrize("kind", [*FEATURE_KINDS, "medusa"])
def test_rows_that_no_tree_would_come_from_are_left_out(kind, target):
    """What is left is computed as before, and weighs as much of a depth as there is of it."""
    head, _ = new_head(kind, target)
    batch = join(SAMPLES, store_of(target, head).get(range(len(SAMPLES))))
    objective = RECIPES[kind].objective
    everything, some = Seen(), Seen()
    whole = objective(head, Teacher(target, IDS), Weights(depths=3), everything)(batch, torch.Generator())
    part = objective(head, Teacher(target, IDS), Weights(depths=3, among=9), some)(batch, torch.Generator())
    assert (part.count, part.right) == (whole.count, whole.right)
    known_T = torch.isin(batch.best_T, IDS)
    kept, loss = torch.ones(len(batch.token_T), dtype=torch.bool), 0.0
    for depth, (logits_RV, chance_RV) in enumerate(everything.pairs):
        at_R = batch.rows(depth).at_R
        judge_R = at_R + 1 + depth
        left_R = kept[at_R]
        torch.testing.assert_close(some.pairs[depth][0], logits_RV[left_R], atol=1e-5, rtol=1e-5)
        known_R = known_T[judge_R]
        loss += cross_entropy(logits_RV, chance_RV)[left_R & known_R].sum() / known_R.sum()
        place_R = torch.searchsorted(IDS, batch.best_T[judge_R]).clamp(max=len(IDS) - 1)
        rank_R = (logits_RV > logits_RV.gather(1, place_R[:, None])).sum(-1)
        kept[at_R] &= known_R & (rank_R < 9)
    assert len(some.pairs[1][0]) < len(everything.pairs[1][0])
    if kind != "eagle":  # which has another loss beside it
        torch.testing.assert_close(part.loss, loss)


@pytest.mark.parametrize("kind", FEATURE_KINDS)
def test_without_rounding_the_depths_are_equal(kind, target, monkeypatch):
    """As above with float32 states, so that a small mistake cannot hide."""
    monkeypatch.setattr(states_module, "_half", lambda value: value.clone())
    head, _ = new_head(kind, target)
    seen = Seen()
    FeatureObjective(head, Teacher(target, IDS), Weights(depths=3), seen)(
        join(SAMPLES, store_of(target, head).get(range(len(SAMPLES)))), torch.Generator()
    )
    one = SAMPLES[0]
    for depth in range(3):
        expected_V = unrolled(
            head, target, one.tokens[: one.prompt + 3], one.tokens[one.prompt + 3 :][:depth]
        )
        torch.testing.assert_close(seen.pairs[depth][0][2], expected_V, atol=FLOOR, rtol=FLOOR)


def test_a_window_hides_old_rows_at_every_depth(target, monkeypatch):
    monkeypatch.setattr(states_module, "_half", lambda value: value.clone())
    head, _ = new_head("eagle3", target)
    head.window = 3
    seen = Seen()
    batch = join(SAMPLES[:1], store_of(target, head).get([0]))
    FeatureObjective(head, Teacher(target, IDS), Weights(depths=3), seen)(batch, torch.Generator())
    far, near = SAMPLES[0].tokens, (11, 12, *SAMPLES[0].tokens[2:])
    other = StateStore(target, head.needs, [Sample(near, 5)], None, 0)
    # the target's own states of later rows must be the same for the comparison: take them from the first text
    states = store_of(target, head).get([0])[0]
    assert len(far) == len(near)
    again = Seen()
    swapped = join([Sample(near, 5)], [states])
    FeatureObjective(head, Teacher(target, IDS), Weights(depths=3), again)(swapped, torch.Generator())
    for (a_RV, _), (b_RV, _) in zip(seen.pairs, again.pairs, strict=True):
        assert torch.equal(a_RV, b_RV)  # rows 4 and on see rows 2 and on, whose tokens are 3 and on
    del other


def test_medusa_heads_are_judged_by_the_place_they_foresee(target):
    heads, _ = new_head("medusa", target, heads=3)
    seen = Seen()
    batch = join(SAMPLES, store_of(target, heads).get(range(len(SAMPLES))))
    judged = MedusaObjective(heads, Teacher(target, IDS), Weights(decay=0.5), seen)(batch, torch.Generator())
    one = SAMPLES[0]
    hidden, _ = true_states(target, one.tokens)
    for k in range(3):
        state = heads.states(hidden[one.prompt - 1 :].clone())[k][0]
        torch.testing.assert_close(
            seen.pairs[k][0][0], head_rows(target, IDS) @ state.detach(), atol=1e-2, rtol=1e-2
        )
        torch.testing.assert_close(
            seen.pairs[k][1][0],
            (head_rows(target, IDS) @ hidden[one.prompt + k]).softmax(-1),
            atol=1e-3,
            rtol=1e-2,
        )
    assert judged.count == [sum(max(0, len(s.tokens) - s.prompt - 1 - k) for s in SAMPLES) for k in range(3)]


def test_tokens_that_cannot_be_drafted_do_not_count(target):
    head, _ = new_head("eagle3", target)
    batch = join(SAMPLES, store_of(target, head).get(range(len(SAMPLES))))
    rows = batch.rows(0)
    known = torch.isin(batch.best_T[rows.at_R + 1], IDS)
    assert 0 < int(known.sum()) < len(known)
    losses = []

    def loss(logits_RV, chance_RV):
        losses.append(cross_entropy(logits_RV, chance_RV))
        return losses[-1]

    judged = FeatureObjective(head, Teacher(target, IDS), Weights(depths=1), loss)(batch, torch.Generator())
    torch.testing.assert_close(judged.loss, losses[0][known].mean())


def test_losses_are_what_they_say():
    logits_RV = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0]], requires_grad=True)
    p, q = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]).softmax(-1), logits_RV.softmax(-1)
    torch.testing.assert_close(acceptance(logits_RV, p), torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(acceptance(logits_RV, p)[1], torch.tensor(1.0))
    torch.testing.assert_close(cross_entropy(logits_RV, p), -(p * q.log()).sum(-1))
    torch.testing.assert_close(cross_entropy(logits_RV, p)[1], torch.tensor(math.log(3)))
    before = acceptance(logits_RV, p)[0].detach()
    (grad,) = torch.autograd.grad(lk(logits_RV, p)[0], logits_RV)
    assert acceptance(logits_RV - 0.1 * grad, p)[0] > before


def test_the_vocabulary_is_what_is_said_most(target):
    said = [Sample((1, 9, 9, 9, 4, 4, 8), 1), Sample((7, 7, 4, 2), 2)]
    vocabulary = choose_vocabulary(said, 3, 96, always=[2])
    assert vocabulary.ids_V.tolist() == [2, 4, 9]  # the prompt's 7 is not said
    assert vocabulary.coverage == pytest.approx(7 / 8)
    assert len(choose_vocabulary(said, 10, 96).ids_V.unique()) == 10
    with pytest.raises(InputError, match=r"draft_vocab must be between 1 and .* 96, got 97"):
        choose_vocabulary(said, 97, 96)


def test_batches_hold_every_sample_once():
    cut = groups([5, 9, 2, 7, 30, 1], [3, 1, 4, 0, 5, 2], 12)
    assert cut == [[3], [1], [4], [0, 5, 2]]


def test_dirty_data_is_counted(tmp_path):
    path = tmp_path / "dirty.jsonl"
    lines = [
        b'{"prompt": "one"}', b"", b"{not json", b'{"question": "two"}', b'{"other": 1}', b'{"prompt": "  "}',
        b"\xff\xfe", b'{"prompt": "one"}', b'{"turns": ["three", "four"]}', b"[1]", b'{"prompt": 5}',
        b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, '
        b'{"role": "assistant", "content": "a"}]}', b'{"messages": [{"role": "user"}]}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n")
    prompts = read_prompts([path])
    assert [m[-1]["content"] for m in prompts.messages] == ["one", "two", "three", "u"]
    assert prompts.skipped == {
        "empty": 2,
        "not JSON": 1,
        "without a prompt": 4,
        "not UTF-8": 1,
        "repeated": 1,
    }
    assert len(read_prompts([path], 2).messages) == 2
    assert read_prompts([path], 2).digest == prompts.digest
    (tmp_path / "nothing.jsonl").write_bytes(b"\n{}\n")
    with pytest.raises(InputError, match="no usable prompt: 1 empty, 1 without a prompt"):
        read_prompts([tmp_path / "nothing.jsonl"])
    with pytest.raises(InputError, match=r"neither a .jsonl file nor a folder"):
        read_prompts([tmp_path / "absent"])


def training(target, folder, *, head=None, objective=None, **settings):
    """A small run; the evaluation is the mean loss so far."""
    head = head or new_head("eagle3", target)[0]
    samples = [sample(seed, 4, 10) for seed in range(12)]
    objective = objective or FeatureObjective(head, Teacher(target, IDS), Weights(depths=2), cross_entropy)
    kept = []
    trainer = Trainer(
        head,
        objective,
        store_of(target, head, samples=samples),
        samples,
        TrainSettings(**{"epochs": 3, "rows": 45, "save": 2, "rate": 3e-3, **settings}),
        {"data": "x"},
        folder,
        evaluate=lambda step: {"al": 1 + step / 100},
        keep=lambda: kept.append(1),
        advance=lambda *_: None,
    )
    return trainer, head, kept


def test_a_killed_run_ends_like_one_that_was_not(target, tmp_path, monkeypatch):
    whole, head, _ = training(target, tmp_path / "whole")
    log = whole.run()
    assert log[-2]["loss"] < log[0]["loss"]

    class Killed(BaseException):
        pass

    real, calls = join, []

    def deadly(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "join", deadly)
        with pytest.raises(Killed):
            training(target, tmp_path / "cut")[0].run()
    torch.manual_seed(99)
    resumed, other, _ = training(target, tmp_path / "cut")
    again = resumed.run()
    assert [e.get("loss") for e in again] == [e.get("loss") for e in log]
    for a, b in zip(head.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="holds a run with another rate"):
        training(target, tmp_path / "cut", rate=1e-3)[0].run()


def test_a_loss_that_is_no_number_keeps_the_last_good_checkpoint(target, tmp_path):
    head, _ = new_head("eagle3", target)
    real = FeatureObjective(head, Teacher(target, IDS), Weights(depths=1), cross_entropy)
    steps = []

    def objective(batch, chance):
        steps.append(1)
        judged = real(batch, chance)
        return judged if len(steps) < 6 else type(judged)(judged.loss * math.nan, judged.right, judged.count)

    trainer, _, _ = training(target, tmp_path, head=head, objective=objective)
    with pytest.raises(TrainingStopped, match="nan at step 6"):
        trainer.run()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["progress"]["step"] == 4
    assert all(bool(torch.isfinite(value).all()) for value in state["head"].values())


def test_a_run_stops_early_where_nothing_gets_better(target, tmp_path):
    trainer, _, kept = training(target, tmp_path, patience=2, evaluate=1, epochs=9)
    trainer._evaluate = lambda step: {"al": 2.0 if step == 3 else 1.5}
    log = trainer.run()
    assert [e["step"] for e in log if "evaluation" in e] == [1, 2, 3, 4, 5]
    assert len(kept) == 2


def full_disk(*_arguments, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_nothing(target, tmp_path, monkeypatch):
    many = [sample(seed, 3, 5) for seed in range(130)]
    head, config = new_head("eagle3", target)
    store = store_of(target, head, tmp_path, samples=many)
    store.fill(lambda *_: None)
    first = sorted(tmp_path.iterdir())
    assert len(first) == 2
    first[1].unlink()
    with monkeypatch.context() as patch:
        patch.setattr(states_module, "save_file", full_disk)
        with pytest.raises(InputError, match="the disk is full"):
            store.fill(lambda *_: None)
    assert list(tmp_path.iterdir()) == first[:1]
    trainer, _, _ = training(target, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.torch, "save", full_disk)
        with pytest.raises(InputError, match="the checkpoint before it is kept"):
            trainer.run()
    save_head("eagle3", head, config, IDS, tmp_path / "head")
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("foretell.train.export.save_file", full_disk)
        with pytest.raises(InputError, match="the disk is full"):
            save_head("eagle3", head, config, IDS, tmp_path / "head")
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before


def test_another_head_s_states_serve_where_they_hold_all_that_is_needed(target, tmp_path, monkeypatch):
    monkeypatch.setattr(states_module, "_SHARD", 2)
    eagle3, medusa = (new_head(kind, target)[0] for kind in ("eagle3", "medusa"))
    store_of(target, eagle3, tmp_path).fill(lambda *_: None)
    files = sorted(tmp_path.iterdir())
    wanted = store_of(target, medusa).get([1, 3])
    store = store_of(target, medusa, tmp_path)
    store.fill(lambda *_: None)
    assert sorted(tmp_path.iterdir()) == files
    monkeypatch.setattr(target, "forward", None)
    for ours, theirs in zip(store.get([1, 3]), wanted, strict=True):
        torch.testing.assert_close(ours.hidden_TW, theirs.hidden_TW, atol=1e-3, rtol=1e-3)
        assert ours.aux_TW == {}
        assert torch.equal(ours.best_T, theirs.best_T)


def test_states_from_disk_are_those_that_are_computed(target, tmp_path):
    many = [sample(seed, 3, 5 + seed % 7) for seed in range(70)]
    head, _ = new_head("eagle3", target)
    kept = store_of(target, head, tmp_path, samples=many)
    kept.fill(lambda *_: None)
    for stored, computed in zip(
        kept.get([3, 69, 10]), store_of(target, head, samples=many).get([3, 69, 10]), strict=True
    ):
        assert torch.equal(stored.best_T, computed.best_T)
        for name, value in stored.tensors().items():
            torch.testing.assert_close(value, computed.tensors()[name], atol=2e-3, rtol=2e-3)
    small = store_of(target, head, tmp_path / "small", limit=1, samples=many * 2)
    (tmp_path / "small").mkdir()
    small.fill(lambda *_: None)
    assert len(list((tmp_path / "small").iterdir())) == 1


@pytest.mark.parametrize("kind", list(RECIPES))
def test_a_head_is_saved_as_it_is_published(kind, target, tmp_path):
    """Round trip, and the engine drafts with it without changing a token."""
    head, config = new_head(kind, target)
    save_head(kind, head, config, None if kind == "draft" else IDS, tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())[KIND] == kind
    again, _ = load_head(kind, tmp_path, target)
    assert kind == "draft" or again.target_ids.tolist() == IDS.tolist()
    for a, b in zip(head.slots(), again.slots(), strict=True):
        assert a.name == b.name
        assert torch.equal(a.view, b.view)
    if kind == "draft":  # a model, with a tokenizer; see the real one
        return
    params = SamplingParams(max_tokens=12)
    engine = oracle.engine(target, f"{kind}:{tmp_path}", draft_tokens=5)
    for request in oracle.run(engine, oracle.PROMPTS, params):
        prompt = request.tokens[: request.prompt_length]
        assert request.output_ids == oracle.generate(target, prompt, params)
    assert engine.stats.drafted > 0


def test_a_draft_vocabulary_is_part_of_the_target_s_head(target, tmp_path, monkeypatch):
    """Drafts come from it alone, ranked as the whole head ranks them."""
    head, config = new_head("eagle", target)
    save_head("eagle", head, config, IDS, tmp_path / "few", torch.float32)
    save_head("eagle", head, config, None, tmp_path / "all", torch.float32)
    seen = {}
    from foretell.sampling import Sampler

    real = Sampler.rank
    for name in ("few", "all"):
        ranked = []

        def rank(sampler, logits_V, ahead, count, ids_V=None, ranked=ranked):
            ranked.append((logits_V.clone(), ids_V))
            return real(sampler, logits_V, ahead, count, ids_V)

        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "rank", rank)
            engine = oracle.engine(
                target, f"eagle:{tmp_path / name}", options={"weights": "stored"}, draft_tokens=3
            )
            oracle.run(engine, [[5, 6, 7]], SamplingParams(max_tokens=4))
        seen[name] = ranked[0]
    (few_V, ids_V), (all_V, none) = seen["few"], seen["all"]
    assert (ids_V.tolist(), none) == (IDS.tolist(), None)
    torch.testing.assert_close(few_V, all_V[IDS], atol=1e-5, rtol=1e-5)


def test_a_head_of_another_width_is_refused(target, decoder, tmp_path):
    head, config = new_head("eagle3", target)
    save_head("eagle3", head, config, IDS, tmp_path)
    wide = decoder("llama", **{**head_files.TARGET, "hidden_size": 48, "head_dim": 12})
    with pytest.raises(InputError, match="head for states of 32"):
        load_head("eagle3", tmp_path, wide)


def test_unknown_losses_are_named():
    with pytest.raises(InputError, match="unknown loss 'mse'"):
        LOSSES["mse"]


class Tiny:
    """As much of an LLM as answers need."""

    def __init__(self, model):
        self.loaded = type("Loaded", (), {"model": model, "end_ids": frozenset([2])})
        self.asked = 0

    def encode(self, messages):
        return [3 + ord(c) % 80 for c in messages[-1]["content"]]

    def generate(self, prompts, params):
        self.asked += len(prompts)
        outs = [[4 + len(p), 5 + (each.seed or 0)] for p, each in zip(prompts, params, strict=True)]
        return [type("Answer", (), {"token_ids": out}) for out in outs]


def test_answers_go_on_behind_the_last_whole_line(target, tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "_GROUP", 4)
    data = tmp_path / "p.jsonl"
    data.write_text("".join(json.dumps({"prompt": "x" * (n + 1)}) + "\n" for n in range(11)))
    prompts, settings = read_prompts([data]), AnswerSettings(temperature=0.5, seed=7, max_prompt=9)
    whole, path = Tiny(target), tmp_path / "a.jsonl"
    samples = write_answers(whole, prompts, settings, path, lambda *_: None)
    assert len(samples) == 9  # two prompts are too long
    assert [s.tokens[-1] for s in samples] == [5 + 7 + n for n in range(9)]
    text = path.read_bytes()
    path.write_bytes(text[: len(text) * 2 // 3])  # killed in the middle of a line
    half = Tiny(target)
    assert write_answers(half, prompts, settings, path, lambda *_: None) == samples
    assert path.read_bytes() == text
    assert 0 < half.asked < whole.asked
    assert list(read_answers(path)) == samples


def test_short_answers_are_samples_without_rows(target, tmp_path):
    """They keep their numbers, so that states on disk stay theirs."""
    short = Sample((5, 9, 11), 2)
    head, _ = new_head("eagle3", target)
    batch = join([short, SAMPLES[0]], store_of(target, head, samples=[short, SAMPLES[0]]).get([0, 1]))
    assert batch.rows(0).counts == (0, 8)
    alone = join([short], store_of(target, head, samples=[short]).get([0]))
    judged = FeatureObjective(head, Teacher(target, IDS), Weights(depths=3), cross_entropy)(
        alone, torch.Generator()
    )
    judged.loss.backward()
    assert float(judged.loss.detach()) == 0


def test_a_new_head_begins_at_the_target_s_last_layer(target, model_folder):
    """Its output for a row is what the last layer makes of the state that it reads last."""
    folder = model_folder("llama", **head_files.TARGET)
    config = head_files.llama_config(num_hidden_layers=head_files.LAYERS)
    made = Shape(config, target.num_layers, None, len(IDS), folder=folder)
    head = RECIPES["eagle3"].make(made, head_rows(target, IDS).clone())
    weight = reference_heads.read(folder)[1]
    at = f"model.layers.{target.num_layers - 1}."
    assert torch.equal(head.block.mlp.down.weight, weight[f"{at}mlp.down_proj.weight"])
    q_HW, embed_HW = head.block.attention.qkv.weight[:32, 32:], head.block.attention.qkv.weight[:, :32]
    assert torch.equal(q_HW, weight[f"{at}self_attn.q_proj.weight"])
    assert not embed_HW.any()
    assert torch.equal(head.norm.weight, weight["model.norm.weight"])
    last = max(head.config.aux_layers)
    aux = {layer: torch.zeros(1, 32) for layer in head.config.aux_layers} | {last: torch.ones(1, 32)}
    assert float((head.features(None, aux) - 1).abs().max()) < 1
    again = RECIPES["eagle3"].make(Shape(config, target.num_layers, None, len(IDS)), head_rows(target, IDS))
    assert not torch.equal(again.block.mlp.down.weight, weight[f"{at}mlp.down_proj.weight"])
