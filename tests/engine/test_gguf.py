"""GGUF files as checkpoints, and checkpoints as GGUF files; the independent reader is ``transformers``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from areno.config.paths import base_of, ckpt_problem, tokenizer_of
from areno.engine.checkpoint.export import export_model
from areno.errors import UsageError
from areno.storage.gguf import gguf_folder
from areno.training.objectives.reference import checkpoint_digest
from tests.support.examples import some_quick
from tests.support.limits import file_size_limit
from tests.support.loops import save_classifier
from tests.support.tiny import save_tiny_checkpoint

gguf = pytest.importorskip("gguf")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
OWN_TOKENIZERS = ("qwen2", "gemma2", "gemma3")  # transformers loads their families' own, not a test's
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3_SPLIT = WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "What is 12 plus 345?  It's\n\n\tnaïve 🙂 <|user|>Hello"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "cache"))


def tiny(tmp_path: Path, family: str = "llama", **config: object) -> Path:
    """Save a checkpoint that GGUF can represent."""
    scale = {"query_pre_attn_scalar": 32} if family.startswith("gemma") else {}
    folder = save_tiny_checkpoint(tmp_path / "model", family, hidden=64, **scale, **config)
    if family == "qwen2":  # its tokenizer class adds <|endoftext|>
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(model.config.vocab_size + 1)
        model.save_pretrained(folder)
    if family == "gemma3":  # llama.cpp supports only one pattern of its layers
        change_config(folder, layer_types=["sliding_attention"] * 2)
    return folder


def change_config(folder: Path, **values: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


def written(folder: Path, kind: str = "f32") -> Path:
    return export_model(str(folder), str(folder.parent / f"out-{kind}"), gguf=kind) / f"model-{kind}.gguf"


def logits(model: object, apart: int = 1) -> torch.Tensor:
    """Return the logits of a few tokens, whose positions are ``apart`` apart."""
    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([[5, 9, 300, 17, 42, 42, 8]])
        return model.eval()(input_ids=ids, position_ids=apart * torch.arange(7)[None]).logits


def set_fields(file: Path, **values: str) -> None:
    """Replace strings in a file's header by others of the same length."""
    raw = file.read_bytes()
    for old, new in values.items():
        assert len(old) == len(new)
        assert raw.count(old.encode())
        raw = raw.replace(old.encode(), new.encode())
    file.write_bytes(raw)


@pytest.mark.parametrize("family", some_quick(FAMILIES, "llama", "gemma3"))
def test_a_written_model_keeps_its_logits_tokens_and_template(family, tmp_path):
    folder = tiny(tmp_path, family)
    file = written(folder)
    expected = logits(folder)
    # transformers reads some configurations only in part, and a Mistral model as a Llama model.
    own = None if family == "mistral" else AutoConfig.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, config=own, dtype=torch.float32)
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
    again = base_of(str(file))
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)
    if family not in OWN_TOKENIZERS:
        mine, original = (PreTrainedTokenizerFast.from_pretrained(place) for place in (again, folder))
        assert mine(TEXT)["input_ids"] == original(TEXT)["input_ids"]
        assert mine.chat_template == original.chat_template
        assert mine.eos_token_id == original.eos_token_id


def test_every_architecture_that_is_offered_is_tested():
    from areno.engine.checkpoint.gguf_export import ARCHITECTURES

    assert {"gemma3_text" if name == "gemma3" else name for name in FAMILIES} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "extra", [{"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}, {"attention_bias": True}]
)
def test_scaled_positions_of_llama_3_and_biases_survive(extra, tmp_path):
    folder = tiny(tmp_path, **extra)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    again = base_of(str(written(folder)))
    torch.testing.assert_close(logits(again, 500), logits(folder, 500), rtol=1e-5, atol=1e-5)


def test_a_tokenizer_with_byte_fallback_is_read_back(tmp_path):
    """Like the SentencePiece tokenizers of Llama 2 and Gemma: ids are ranks, and a space is an ordinary symbol."""
    folder = tiny(tmp_path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "c", "ab", "▁ab", "abc", "▁abc"]
    vocab = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    merges = [("a", "b"), ("▁", "ab"), ("ab", "c"), ("▁", "abc"), ("▁ab", "c")]
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    theirs.save_pretrained(folder)
    mine = AutoTokenizer.from_pretrained(gguf_folder(written(folder)))
    for text in ("abc ab", "ab cab é"):
        assert mine(text, add_special_tokens=False)["input_ids"] == theirs(text)["input_ids"], text
    assert len(mine) == size


@pytest.mark.parametrize(("kind", "gap"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 2e-2)])
def test_logits_of_smaller_types_stay_close(kind, gap, tmp_path):
    folder = tiny(tmp_path)
    file = written(folder, kind)
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert stored["blk.0.attn_q.weight"] == kind.upper()
    assert stored["blk.0.attn_norm.weight"] == "F32"
    expected, got = logits(folder), logits(gguf_folder(file))
    assert 0 < float((got - expected).norm() / expected.norm()) < gap


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
    folder = tiny(tmp_path)
    file = written(folder)
    first = gguf_folder(file)
    made = (first / "config.json").stat().st_mtime_ns
    assert gguf_folder(file) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    digest = checkpoint_digest(str(file))
    assert digest == checkpoint_digest(str(file))
    file.write_bytes(written(folder, "f16").read_bytes())
    assert gguf_folder(file) != first
    assert checkpoint_digest(str(file)) != digest
    assert tokenizer_of(str(file)) == str(gguf_folder(file))


@pytest.mark.parametrize(
    ("step", "name", "pieces"),
    [
        (pre_tokenizers.Digits(individual_digits=True), "smollm", ["2", "0", "2", "4"]),
        (pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), "llama-bpe", ["202", "4"]),
    ],
)
def test_digits_are_split_as_they_were_in_training(step, name, pieces, tmp_path):
    """The merges of this tokenizer alone would join them."""
    folder = tiny(tmp_path, texts=["2024 2024 202 12 345 345"] * 9, vocab=300)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("2024") == ["2024"]
    steps = [step, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "smollm")]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save_pretrained(folder)
    file = written(folder)
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == name
    again = AutoTokenizer.from_pretrained(gguf_folder(file))
    assert len(again) == len(tokenizer)
    made = json.loads(again.backend_tokenizer.to_str())["model"]
    assert made["ignore_merges"] is (name == "llama-bpe")  # as in Llama 3's own tokenizer
    assert again.tokenize("2024") == tokenizer.tokenize("2024") == pieces


def test_unreadable_files_are_refused_with_the_option_the_file_and_the_remedy(tmp_path):
    file = written(tiny(tmp_path))
    whole = file.read_bytes()
    cut = {"a header": whole[:1000], "weights": whole[:-5000], "all": b"GGUF\x03\x00\x00\x00" + b"\xff" * 64}
    for raw in (*cut.values(), b"<html>404</html>", b""):
        file.write_bytes(raw)
        problem = ckpt_problem(str(file), "actor.path")
        assert problem.startswith(f"actor.path {file} could not be read: ")
        assert "download the file again" in problem
    changes = {
        "llama": "llana",
        "blk.1.attn_k.weight": "blk.1.attn_z.weight",
        "blk.1.ffn_up.weight": "blk.2.ffn_up.weight",
    }
    for (old, new), reason in zip(
        changes.items(), ("architecture llana", "do not belong to a", "do not belong to a"), strict=True
    ):
        file.write_bytes(whole)
        set_fields(file, **{old: new})
        assert reason in ckpt_problem(str(file))
    assert "folder does not exist" in ckpt_problem(str(tmp_path / "absent.gguf"))
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_unsupported_position_scaling_is_refused(tmp_path):
    file = written(tiny(tmp_path))
    for scaling, factors, reason in (
        ("yarn", None, "the RoPE scaling yarn of the model is unsupported"),
        ("none", [1.0] * 15 + [3.0], "Llama 3"),
    ):
        changed = tmp_path / f"{scaling}.gguf"
        reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(changed, "llama")
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
        writer.add_string("llama.rope.scaling.type", scaling)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data)
        if factors:
            writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        assert reason in ckpt_problem(str(changed))


def test_without_the_package_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for problem in (ckpt_problem(str(file)), *export_problems()):
        assert "pip install" in problem
        assert "[gguf]" in problem


def export_problems() -> list[str]:
    from areno.config.eval_options import parse_export

    with pytest.raises(UsageError, match="--gguf needs") as raised:
        parse_export(["--ckpt", "a/b", "--output", "out", "--gguf", "f16"])
    return [str(raised.value)]


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("reward", {}, "the weight score.weight"),
        ("phi3", {}, "models of type phi3"),
        ("gemma3", {"layer_types": ["full_attention"] * 2}, "layers in this order"),
        ("gemma3", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar 168"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, "type linear"),
    ],
)
def test_unsupported_models_are_refused_before_anything_is_written(family, change, reason, tmp_path, tiny_checkpoint):
    folder = tiny(tmp_path, family) if family != "reward" else save_classifier(tmp_path / "model", tiny_checkpoint)
    change_config(folder, **change)
    with pytest.raises(UsageError, match=reason) as raised:
        written(folder)
    assert "convert_hf_to_gguf.py" in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_full_disk_is_not_called_a_damaged_file(tmp_path):
    file = written(tiny(tmp_path))
    with file_size_limit(100_000), pytest.raises(UsageError, match="Free disk space, or set ARENO_CACHE_DIR") as caught:
        gguf_folder(file)
    assert "Download" not in str(caught.value)
    assert gguf_folder(file).is_dir()
