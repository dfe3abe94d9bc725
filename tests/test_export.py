"""Exports: an adapter that stands on its own, a plain model, a GGUF file that reads back as the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from cases.helpers import here, llama
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from small_models import VOCABULARY, byte_tokenizer, difference, logits, plain, save_base
from test_merge import IDS, as_checkpoint, base_model, make_run, mixtral, qwen2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lowmem import ModelConfig, UserError
from lowmem.export import export
from lowmem.gguf_layout import Layout
from lowmem.gguf_tokenizer import portable_template
from lowmem.loading import load_model, load_tokenizer
from lowmem.merge import merge

TEXTS = ["Hello, world!", "  12 + 34\n\tend", "Grüße, 世界 🙂", "<u>Why?<a>Because.<eos>"]


def full_run(folder: Path, model: nn.Module, tokenizer: Any = None) -> Path:
    """A finished run that trained the whole model."""
    run = folder / "run"
    save_base(run / "model", model, tokenizer or byte_tokenizer())
    save_base(folder / "base", model, tokenizer or byte_tokenizer())
    (run / "recipe.yaml").write_text(f"model: {{name_or_path: {folder / 'base'}}}\n")
    return run


def read_back(path: Path) -> nn.Module:
    """A GGUF file as transformers reads it, its blocks unpacked."""
    from lowmem.config import LoadConfig

    return load_model(LoadConfig(ModelConfig(str(path)), dtype="float32")).eval()


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


# -- peft and transformers --------------------------------------------------------------------------------------------


def test_peft(tmp_path):
    run = make_run(tmp_path, base_model())
    export(run, tmp_path / "adapter", "peft")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    merge(run, tmp_path / "merged", probe=False)
    alone = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert difference(logits(alone, IDS), logits(plain(tmp_path / "merged"), IDS)) <= 1e-5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "adapter")) == len(byte_tokenizer())


def test_transformers_from_an_adapter_and_from_a_whole_model(tmp_path):
    run = make_run(tmp_path / "a", base_model())
    export(run, tmp_path / "one", "transformers", check=False)
    merge(run, tmp_path / "merged", probe=False)
    assert torch.equal(logits(plain(tmp_path / "one"), IDS), logits(plain(tmp_path / "merged"), IDS))
    whole = full_run(tmp_path / "b", base_model(tie_word_embeddings=True))
    report = export(whole, tmp_path / "two", "transformers")
    assert report["check"]["largest_logit_difference"] == 0
    assert difference(logits(plain(tmp_path / "two"), IDS), logits(plain(whole / "model"), IDS)) == 0
    export(whole, tmp_path / "half", "transformers", dtype="bfloat16", check=False)
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert plain(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "half").chat_template == byte_tokenizer().chat_template


def test_a_checkpoint_of_a_run_without_result(tmp_path):
    run = make_run(tmp_path, base_model())
    for file in (run / "model").glob("*token*"):
        file.unlink()
    as_checkpoint(run)
    export(run, tmp_path / "adapter", "peft", checkpoint="checkpoint-000003")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "adapter")) == len(byte_tokenizer())
    export(run, tmp_path / "m.gguf", "gguf", checkpoint="checkpoint-000003", check=False)


def test_a_whole_model_without_tokenizer_does_not_need_its_base(tmp_path):
    run = full_run(tmp_path, base_model())
    for file in (run / "model").glob("*token*"):
        file.unlink()
    (tmp_path / "base").rename(tmp_path / "moved")
    export(run, tmp_path / "out", "transformers")
    with pytest.raises(UserError, match="has no tokenizer, and a GGUF file needs one"):
        export(run, tmp_path / "m.gguf", "gguf")


# -- gguf -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gguf_reads_back_as_the_same_model(tmp_path, tied):
    run = make_run(tmp_path, base_model(tie_word_embeddings=tied, rms_norm_eps=1e-5, max_position_embeddings=128))
    report = export(run, tmp_path / "m.gguf", "gguf", quantization="f32", check=False)
    merge(run, tmp_path / "merged", probe=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert difference(logits(model, IDS), logits(plain(tmp_path / "merged"), IDS)) <= 1e-5
    assert report["bytes"] == (tmp_path / "m.gguf").stat().st_size
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == byte_tokenizer()(text)["input_ids"]
    found = fields(tmp_path / "m.gguf")
    assert ("output.weight" in {t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}) != tied
    assert found["general.architecture"] == "llama"
    assert found["llama.context_length"] == 128
    assert (found["llama.attention.head_count"], found["llama.attention.head_count_kv"]) == (4, 2)
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert found["llama.rope.freq_base"] == 10000.0
    assert found["llama.vocab_size"] == VOCABULARY == len(found["tokenizer.ggml.tokens"])
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.tokens"][-1] == f"[PAD{VOCABULARY - 1}]"
    assert found["tokenizer.ggml.token_type"][:6] == [3, 3, 3, 3, 3, 1]
    assert found["tokenizer.ggml.eos_token_id"] == byte_tokenizer().eos_token_id
    assert "{% generation" in byte_tokenizer().chat_template
    assert "{% generation" not in found["tokenizer.chat_template"]


@pytest.mark.parametrize(("quantization", "tolerance"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.4)])
def test_gguf_of_fewer_bits(tmp_path, quantization, tolerance):
    run = full_run(tmp_path, base_model())
    report = export(run, tmp_path / "m.gguf", "gguf", quantization=quantization)
    check = report["check"]
    assert 0 < check["largest_logit_difference"] < tolerance
    assert check["same_tokens"] is True
    exact = logits(plain(run / "model"), IDS)
    assert 0 < difference(logits(read_back(tmp_path / "m.gguf"), IDS), exact) < tolerance
    sizes = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
    matrices = sum(p.numel() for p in plain(run / "model").parameters() if p.dim() > 1)
    assert report["bytes"] == pytest.approx(matrices * sizes[quantization], rel=0.15)


def test_gguf_of_qwen2(tmp_path):
    run = full_run(tmp_path, qwen2())
    report = export(run, tmp_path / "m.gguf", "gguf", quantization="f32")
    assert report["check"]["largest_logit_difference"] <= 1e-5
    assert fields(tmp_path / "m.gguf")["general.architecture"] == "qwen2"


def test_a_gguf_file_as_base(tmp_path):
    """What was exported is a base again: it is read tensor by tensor, and merged into."""
    whole = full_run(tmp_path / "a", base_model(head_dim=16))
    export(whole, tmp_path / "base.gguf", "gguf", quantization="q8_0", check=False)
    run = make_run(tmp_path / "b", base_model())
    for strategies in ("{lora: {}}", "{lora: {}, quantization: {compute_dtype: float32}}"):
        recipe = f"model: {{name_or_path: {tmp_path / 'base.gguf'}, dtype: float32}}\nstrategies: {strategies}\n"
        (run / "recipe.yaml").write_text(recipe)
        out = tmp_path / f"out{len(strategies)}"
        report = merge(run, out)
        assert report["notices"] == []  # not loaded whole
        assert report["probe"]["largest_logit_difference"] <= 1e-3
        plain(out)
    last = export(run, tmp_path / "again.gguf", "gguf", base="original")
    assert fields(tmp_path / "again.gguf")["tokenizer.ggml.pre"] == fields(tmp_path / "base.gguf")["tokenizer.ggml.pre"]
    assert last["check"]["same_tokens"]


def test_rows_of_queries_and_keys_go_there_and_back():
    layout = Layout(llama(vocab_size=VOCABULARY).config)
    rows = torch.arange(64 * 3).reshape(64, 3).numpy()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.bias"):
        there = layout.to_gguf(name, rows)
        assert (there != rows).any()
        assert (layout.from_gguf(name, there) == rows).all()
    # the first head has 16 rows; rotary pairs (0, 8), (1, 9), ... become neighbours
    assert layout.to_gguf("model.layers.0.self_attn.q_proj.weight", rows)[:4, 0].tolist() == [0, 24, 3, 27]
    assert (layout.to_gguf("model.layers.0.self_attn.v_proj.weight", rows) == rows).all()


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """BPE over characters, with bytes for what it does not know, as the tokenizers of Llama 2 and Mistral are."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "k"), ("o", "n"), ("▁k", "on"), ("n", "o")]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {t: n for n, t in enumerate([*tokens, *letters, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_gguf_with_a_sentencepiece_tokenizer(tmp_path):
    tokenizer = sentencepiece_like()
    run = full_run(tmp_path, llama(vocab_size=len(tokenizer)), tokenizer)
    report = export(run, tmp_path / "m.gguf", "gguf", quantization="f32")
    found = fields(tmp_path / "m.gguf")
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    assert scores["▁k"] > scores["on"] > scores["▁kon"] > scores["no"] > scores["q"]
    back = load_tokenizer(ModelConfig(str(tmp_path / "m.gguf")))
    for text in ("konto", "konto no konto", "Ä"):
        assert back(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]
    assert report["check"]["largest_logit_difference"] <= 1e-5


def test_templates_without_marks_render_the_same():
    import jinja2

    template = "a\n{%- generation -%}\n  b {{ x }}\n{% endgeneration %} c"
    plain_text = jinja2.Template(template.replace("generation", "if true", 1).replace("endgeneration", "endif"))
    assert jinja2.Template(portable_template(template)).render(x=1) == plain_text.render(x=1)
    assert "generation" not in portable_template(template)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_families_that_gguf_export_does_not_know(tmp_path):
    run = make_run(tmp_path, mixtral(), target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"mixtral are not supported; supported: llama, mistral, qwen2"):
        export(run, tmp_path / "m.gguf", "gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_rotary_embeddings_that_gguf_export_does_not_know(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    run = full_run(tmp_path, base_model(rope_parameters=rope))
    with pytest.raises(UserError, match="type linear"):
        export(run, tmp_path / "m.gguf", "gguf")
    assert not list(tmp_path.glob("*m.gguf*")), "nothing is left behind"


def test_numbers_too_large_for_float16(tmp_path):
    model = base_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    run = full_run(tmp_path, model)
    with pytest.raises(UserError, match=r"65,504.*bf16"):
        export(run, tmp_path / "m.gguf", "gguf")
    export(run, tmp_path / "m.gguf", "gguf", quantization="bf16", check=False)


def test_tokenizers_that_gguf_export_does_not_know(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    run = full_run(tmp_path, base_model(), tokenizer)
    with pytest.raises(UserError, match="Punctuation and ByteLevel"):
        export(run, tmp_path / "m.gguf", "gguf")


def test_a_file_that_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    run = full_run(tmp_path, base_model())
    monkeypatch.setattr(Layout, "to_gguf", lambda self, name, rows: rows)  # rows in the wrong order
    with pytest.raises(UserError, match="read back, the logits differ"):
        export(run, tmp_path / "m.gguf", "gguf", quantization="f32")
    assert not list(tmp_path.glob("*m.gguf*"))


def test_command(tmp_path):
    run = full_run(tmp_path, base_model())
    done = here("export", str(run), str(tmp_path / "m.gguf"), "--format", "gguf", "--quantization", "f32", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["check"]["largest_logit_difference"]) == (0, 0.0)
    for arguments, words in (
        (["--format", "gguf"], "exists already"),
        (["--format", "peft"], "a whole model, no adapter"),
        (["--format", "gguf", "--dtype", "float32"], "--dtype has no effect"),
        (["--format", "transformers", "--quantization", "f16"], "--quantization has no effect"),
        (["--format", "transformers", "--base", "original"], "--base has no effect"),
    ):
        out = tmp_path / ("m.gguf" if "gguf" in arguments else "out")
        refused = here("export", str(run), str(out), *arguments)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert words in refused.stderr
    refused = here("export", str(run), str(tmp_path / "out"), "--format", "gguf")
    assert "ends with .gguf" in refused.stderr


def test_a_tokenizer_that_transformers_cannot_read_back_is_said(tmp_path, monkeypatch):
    def no_token(config):
        raise AttributeError("no attribute 'bos_token_id'")

    monkeypatch.setattr("lowmem.export.load_tokenizer", no_token)
    report = export(make_run(tmp_path, base_model()), tmp_path / "m.gguf", "gguf")
    assert "same_tokens" not in report["check"]
    assert any("cannot read the tokenizer back" in notice for notice in report["notices"])
    assert (tmp_path / "m.gguf").is_file()
