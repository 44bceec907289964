"""GGUF files: converted faithfully, refused clearly, never half."""

from __future__ import annotations

import errno

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foretell.errors import InputError
from foretell.models.catalog import locate
from foretell.models.decoder import load_decoder
from foretell.models.gguf import convert_gguf
from foretell.models.tokenizer import Tokenizer
from tests import gguf_files, zoo
from tests.test_parity import PROMPT, prefill_logits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_converted_model_gives_the_logits_of_the_original(arch, tied, tmp_path):
    model = gguf_files.write(tmp_path / "m.gguf", arch, "F16", tie_word_embeddings=tied)
    with torch.no_grad():  # the file holds fp16
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.half().float())
    folder = locate(str(tmp_path / "m.gguf"))
    ours = load_decoder(folder, torch.float32, CPU)
    torch.testing.assert_close(
        prefill_logits(ours, PROMPT), zoo.path_logits(model, PROMPT), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"])
def test_every_type_is_dequantised(kind, tmp_path):
    gguf_files.write(tmp_path / "m.gguf", "qwen2", kind)
    weights = load_file(locate(str(tmp_path / "m.gguf")) / "model.safetensors")
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        if tensor.name == "blk.1.ffn_up.weight":
            wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
            found = weights["model.layers.1.mlp.up_proj.weight"]
            assert torch.equal(found, torch.from_numpy(wanted)), "a matrix is stored as fp16 of its values"
            assert float(found.float().std()) > 0
    assert weights["model.norm.weight"].dtype == torch.float32


def test_a_second_look_uses_the_converted_folder(tmp_path, monkeypatch):
    gguf_files.write(tmp_path / "m.gguf")
    first = locate(str(tmp_path / "m.gguf"))
    monkeypatch.setattr("foretell.models.gguf.convert_gguf", lambda *_: pytest.fail("converted again"))
    assert locate(str(tmp_path / "m.gguf")) == first


def test_a_changed_file_is_converted_again(tmp_path):
    gguf_files.write(tmp_path / "m.gguf")
    first = locate(str(tmp_path / "m.gguf"))
    gguf_files.write(tmp_path / "m.gguf", num_hidden_layers=1)
    assert locate(str(tmp_path / "m.gguf")) != first


def test_tokenizer_and_template(tmp_path):
    gguf_files.write(tmp_path / "m.gguf")
    tokenizer = Tokenizer(locate(str(tmp_path / "m.gguf")))
    text = "<|im_start|>user\nthe 12 thé<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "user\nthe 12 thé"
    one, two = tokenizer.encode("1"), tokenizer.encode("2")
    assert [*one, *two] == tokenizer.encode("12"), "digits stand alone"
    assert tokenizer.end_ids == {2}
    rendered = tokenizer.render([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("keep", [0, 3, 100, 5_000, 0.3, 0.9, 0.999])
def test_truncated_file(keep, tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.write(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 or keep == 0 else keep * len(data))])
    with pytest.raises(InputError, match=r"damaged|truncated"):
        locate(str(path))
    assert not list((tmp_path / "home" / "models").iterdir()), "nothing half-written is left"


def test_damaged_header(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.write(path)
    data = bytearray(path.read_bytes())
    data[8:16] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        locate(str(path))


def test_not_gguf_at_all(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"hello world, this is no model file at all")
    with pytest.raises(InputError, match="not a readable GGUF"):
        locate(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "mamba"}, "holds a 'mamba' model; supported: llama, qwen2"),
        ({"pre": "klingon"}, "tokenizer is of kind gpt2/klingon"),
        ({"tokens": None}, "lacks its tokenizer"),
    ],
)
def test_unsupported_contents_are_named(change, message, tmp_path):
    gguf_files.write(tmp_path / "m.gguf", edit=lambda fields: fields.update(change))
    with pytest.raises(InputError, match=message):
        locate(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "home" / "models").iterdir())


def test_full_disk_is_seen_before_and_while_writing(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    gguf_files.write(path)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("foretell.models.gguf.shutil.disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"needs 0\.00 GB in .*, 0\.00 GB are free"):
        convert_gguf(path, tmp_path / "home" / "out")
    monkeypatch.undo()

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(InputError, match="the disk filled up"):
        convert_gguf(path, tmp_path / "home" / "out")
    assert not list((tmp_path / "home").iterdir())


def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    gguf_files.write(path)

    def interrupt(*_args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(path, tmp_path / "home" / "out", interrupt)
    assert not list((tmp_path / "home").iterdir())


def test_missing_file_and_unknown_name():
    with pytest.raises(InputError, match=r"nothing\.gguf does not exist"):
        locate("nothing.gguf")
    with pytest.raises(InputError, match="unknown model 'smollm9'") as caught:
        locate("smollm9")
    assert "smollm2-135m" in str(caught.value.hint)


def test_large_files_become_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("foretell.models.gguf._SHARD_BYTES", 400_000)
    model = gguf_files.write(tmp_path / "m.gguf", "llama", "F16")
    folder = locate(str(tmp_path / "m.gguf"))
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.half().float())
    ours = prefill_logits(load_decoder(folder, torch.float32, CPU), PROMPT)
    torch.testing.assert_close(ours, zoo.path_logits(model, PROMPT), atol=1e-4, rtol=1e-4)
