"""Drafts across vocabularies: what the draft reads is the text, what it proposes are the target's tokens,
and answers stay plain decoding's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers

from foretell.api import LLM
from foretell.drafters.translate import TokenMap
from foretell.models.tokenizer import Piece, Tokenizer
from foretell.types import SamplingParams
from tests import zoo

TEXT = {
    "code": "def add(first, second):\n    return first + second\n\nfor item in items:\n    print(item)\n"
    * 20,
    "prose": "The quick brown fox returns; the first item was added, and then the second. Ünïcödé 中文 ☃\n"
    * 20,
}
SPECIAL = {"code": ["<|im_end|>", "<|code|>"], "prose": ["<s>", "<|im_end|>"]}


def train(kind: str, folder) -> None:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size={"code": 330, "prose": 380}[kind],
        special_tokens=SPECIAL[kind],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([TEXT[kind]], trainer)
    fast.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two random models with tokenizers of their own."""
    out = {}
    for kind, seed in (("code", 1), ("prose", 2)):
        folder = tmp_path_factory.mktemp(kind)
        zoo.save_random("llama", folder, vocab_size=400, num_hidden_layers=2, seed=seed)
        train(kind, folder)
        out[kind] = folder
    return out


@pytest.fixture(scope="module")
def mapping(folders):
    return TokenMap(Tokenizer(folders["prose"]), Tokenizer(folders["code"]), 400, torch.device("cpu"))


def test_pieces_are_bytes_and_special_names(folders):
    pieces = Tokenizer(folders["code"]).pieces()
    assert Piece(b"<|im_end|>", True) in pieces
    assert Piece(b" return", False) in pieces
    assert {bytes([b]) for b in range(256)} <= {piece.data for piece in pieces if piece is not None}


def test_common_tokens_stand_for_the_same_bytes(folders, mapping):
    prose, code = Tokenizer(folders["prose"]).pieces(), Tokenizer(folders["code"]).pieces()
    pairs = list(zip(mapping.draft_ids.tolist(), mapping.target_ids.tolist(), strict=True))
    assert all(prose[own] == code[other] for own, other in pairs)
    assert len(pairs) == len(set(map(str, prose)) & set(map(str, code)))
    assert 257 < len(pairs) < 330


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="def return(first)\n brownÜ中☃\x00", max_size=40))
def test_the_draft_reads_the_text_whole_and_token_by_token(text, folders, mapping):
    target, draft = Tokenizer(folders["code"]), Tokenizer(folders["prose"])
    ids = target.encode(text)
    assert draft.decode(mapping.prompt(ids)) == text
    assert draft.decode(mapping.more(ids)) == text, "also where a token holds half a character"


def test_special_tokens_go_by_name_and_unknown_ones_as_text(folders, mapping):
    target, draft = Tokenizer(folders["code"]), Tokenizer(folders["prose"])
    end, other = (target._fast.token_to_id(name) for name in SPECIAL["code"])
    assert mapping.more([end]) == [draft._fast.token_to_id("<|im_end|>")]
    assert draft.decode(mapping.more([other])) == "<|code|>"
    assert mapping.more([399]) == [], "padding of the target's logits"
    assert (
        draft.decode(mapping.prompt([*target.encode("first"), end, *target.encode("second")]))
        == "firstsecond"
    )


def test_scores_lie_at_the_targets_ids(mapping):
    logits = torch.arange(400.0)
    scores = mapping.scores(logits)
    assert torch.equal(scores[mapping.target_ids], logits[mapping.draft_ids])
    assert int((scores > -torch.inf).sum()) == len(mapping.draft_ids)


@pytest.mark.parametrize("way", ["auto", "tokens", "text"])
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=4)]
)
def test_answers_are_plain_decodings(way, params, folders):
    prompts = ["def add(first", "for item in items:\n    print", "x", "☃ first 中"]
    plain = LLM(folders["code"], drafter="none", kv_tokens=512)
    drafted = LLM(
        plain.loaded,
        drafter=f"draft:{folders['prose']}",
        drafter_options={"across": way},
        draft_tokens=5,
        kv_tokens=512,
    )
    for _ in range(2):  # the second time with prefix hits
        wanted, got = plain.generate(prompts, params), drafted.generate(prompts, params)
        assert [a.token_ids for a in got] == [a.token_ids for a in wanted]
    assert drafted.engine.stats.drafted > 0
    assert not drafted.engine._drafter._states


def test_the_same_weights_in_another_vocabulary_are_accepted(folders, tmp_path):
    """A draft with the target's own weights, its tokens renamed by a permutation: what it says is right
    almost always, and the map brings it home."""
    import json

    from safetensors.torch import load_file, save_file

    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    tensors = load_file(folders["code"] / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["code"] / "config.json").read_text())
    new = {int(old): place for place, old in enumerate(order.tolist())}
    spec = json.loads((folders["code"] / "tokenizer.json").read_text())
    spec["model"]["vocab"] = {token: new[i] for token, i in spec["model"]["vocab"].items()}
    for added in spec["added_tokens"]:
        added["id"] = new[added["id"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    llm = LLM(folders["code"], drafter=f"draft:{tmp_path}", draft_tokens=5, kv_tokens=512)
    params = SamplingParams(max_tokens=40, logit_bias=dict.fromkeys(range(330, 400), -100))
    llm.generate(["def add(first", "for item in"], params)
    assert llm.engine.stats.al > 3
