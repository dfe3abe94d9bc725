"""Every method of the installed peft: trained, predicted, saved and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training, snapshot
from peft import PeftModel, get_peft_model
from small_models import byte_tokenizer, difference, logits, plain, save_base
from test_meta import LENGTHS, llama, measured, training

from lowmem import (
    AdamW8bit,
    Adapter,
    ChunkedCrossEntropy,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Quantization,
    Trainer,
    TrainingConfig,
    UserError,
    load_run,
)
from lowmem.batches import collate
from lowmem.memory.meta_adapters import UNPREDICTABLE
from lowmem.memory.predict import record
from lowmem.merge import merge
from lowmem.peft_methods import (
    FLOAT32_TABLES,
    IN_PATH,
    MERGED_BY_LAYER,
    ON_QUANTISED,
    REFUSED,
    bring_home,
    make_config,
    method_names,
)

PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE")
# settings that fit a model of width 32; what is not here takes three kinds of linear layers and defaults
SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 6, "tinit": 1, "tfinal": 2, "init_r": 4, "target_r": 2},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LILY": {"r": 4, "stride_A": 1, "num_B": 2},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "MISS": {"r": 4},
    "OFT": {"r": 0, "oft_block_size": 4},
    "FROD": {"progressbar": False},
    "PSOFT": {"r": 8},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2, "random_seed": 0},
    "TRAINABLE_TOKENS": {"token_indices": list(range(40)), "target_modules": "model.embed_tokens"},
    "VBLORA": {"num_vectors": 16, "vector_length": 16, "topk": 2},
    "WAVEFT": {"n_frequency": 16},
    **{method: {"num_virtual_tokens": 4} for method in ("PROMPT_TUNING", "PREFIX_TUNING", "CARTRIDGE")},
}
TRAINED = [method for method in method_names() if method not in REFUSED]
PREDICTED = [method for method in TRAINED if method not in UNPREDICTABLE]
needs_clustering = {"ADAMSS": "sklearn"}


def settings(method: str) -> dict[str, Any]:
    found = dict(SETTINGS.get(method, {}))
    if method not in PROMPTS:
        found.setdefault("target_modules", ["q_proj", "v_proj", "down_proj"])
    return {name: value for name, value in found.items() if value is not None}


def adapter(method: str) -> Adapter:
    if method in needs_clustering:
        pytest.importorskip(needs_clustering[method])
    return Adapter(method, settings(method))


def seed_at_start(event: Any) -> None:
    """PVeRA draws random numbers in every pass."""
    if event.kind == "begin":
        torch.manual_seed(7)


def test_the_list_of_refused_methods_is_that_of_peft() -> None:
    assert set(REFUSED) <= set(method_names())
    known = {*FLOAT32_TABLES, *IN_PATH, *MERGED_BY_LAYER, *ON_QUANTISED["8bit"], *UNPREDICTABLE, *SETTINGS}
    assert known <= set(TRAINED)


@pytest.mark.parametrize("method", TRAINED)
def test_it_trains_as_pefts_own_loop_does_and_peft_loads_it(method: str, tmp_path: Path) -> None:
    """Same weights after three steps of a loop written out by hand, in which peft itself computes the loss."""
    strategy, rows = adapter(method), make_rows(12)
    model = make_llama()
    before = snapshot(model)
    base = dict(model.named_parameters())
    numbers: dict[str, Any] = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    trained = run_training([strategy], model=model, rows=rows, observers=[seed_at_start], **numbers)
    assert trained.losses[0] != trained.losses[-1]
    assert any(trained.moved.values())
    moved_base = [n for n, p in base.items() if n in before and not torch.equal(p, before[n])]
    assert moved_base == []  # adapters alone

    plain_model = make_llama()
    torch.manual_seed(TrainingConfig().seed)
    by_hand: Any = get_peft_model(plain_model, make_config(method, settings(method))).train()
    parameters = [p for n, p in by_hand.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    torch.manual_seed(7)
    for step in range(3):
        batch = collate([{k: torch.tensor(v).numpy() for k, v in row.items()} for row in rows[4 * step : 4 * step + 4]])
        by_hand(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
        optimizer.step()
        if method == "ADALORA":
            by_hand.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    ours = {n: p for n, p in trained.trainer.model.named_parameters() if p.requires_grad}
    theirs = {n: p for n, p in by_hand.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.allclose(parameter, theirs[name], rtol=1e-4, atol=2e-5), name

    trained.trainer.save_model(tmp_path)
    reloaded = PeftModel.from_pretrained(make_llama(), str(tmp_path))
    assert difference(logits(reloaded), logits(trained.trainer.model)) <= 1e-6
    assert difference(logits(reloaded)[:, -10:], logits(make_llama())) > 1e-4  # it does something


@pytest.mark.parametrize("method", PREDICTED)
def test_the_peak_on_meta_is_that_of_the_real_step(method: str) -> None:
    predicted = record(llama("meta"), training(), [adapter(method)], "cpu", LENGTHS).peak()[0]
    real = measured([adapter(method)]).peak()[0]
    assert abs(predicted - real) <= 0.0005 * real


@pytest.mark.parametrize("method", sorted(UNPREDICTABLE))
def test_what_cannot_be_predicted_says_why(method: str) -> None:
    with pytest.raises(UserError, match=f"adapter: {method} cannot be predicted: "):
        record(llama("meta"), training(), [adapter(method)], "cpu", LENGTHS)


# -- beside other strategies ------------------------------------------------------------------------------------------


def on_base(method: str, format: str, dequantised: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of an adapter moved off its start, on quantised weights or on what they stand for."""
    from peft.utils.integrations import dequantize_module_weight

    from lowmem.run import Run

    options = {} if format == "int8" else {"compute_dtype": "float32"}
    strategy = Quantization(format=format, **options)  # type: ignore[arg-type]
    model = make_llama(hidden_size=64, intermediate_size=64)
    strategy.wrap_model(model, Run(TrainingConfig(), torch.device("cpu"), frozenset()))
    for name, module in list(model.named_modules()) if dequantised else []:
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            weight = dequantize_module_weight(module).detach().float().clone()
            linear = torch.nn.Linear(*weight.T.shape, bias=False)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, linear)
    torch.manual_seed(0)
    adapted: Any = get_peft_model(model, make_config(method, settings(method))).train()
    bring_home(adapted, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    out = adapted(input_ids=torch.arange(20).view(2, 10)).logits[:, -10:]
    out.pow(2).mean().backward()
    return out.detach(), [p.grad for p in trained if p.grad is not None]


@pytest.mark.parametrize(("kind", "format"), [("4bit", "nf4"), ("8bit", "int8")])
def test_on_quantised_weights_it_is_what_it_is_on_their_values(kind: str, format: str) -> None:
    for method in ON_QUANTISED[kind]:
        (out, grads), (wanted, wanted_grads) = (on_base(method, format, plain) for plain in (False, True))
        assert difference(out, wanted) <= 1e-5 * float(wanted.abs().max()), method
        for one, other in zip(grads, wanted_grads, strict=True):
            assert difference(one, other) <= 1e-3 * float(other.abs().max()) + 1e-12, method


@pytest.mark.parametrize("method", ["HIRA", "UNILORA", "OSF", "HRA"])
def test_other_methods_are_refused_on_quantised_weights(method: str) -> None:
    with pytest.raises(UserError, match=f"adapter.peft_type: {method} cannot be trained on 4bit weights; drop quant"):
        make_trainer([Quantization(), adapter(method)])


def test_it_stands_in_a_full_recipe() -> None:
    strategies = [
        Quantization(),
        adapter("IA3"),
        GradientCheckpointing(),
        GradientAccumulation(steps=2),
        MixedPrecision(),
        ChunkedCrossEntropy(chunk_size=8),
        AdamW8bit(),
        Packing(),
    ]
    trained = run_training(strategies, learning_rate=1e-2)
    assert all(trained.moved.values())


@pytest.mark.parametrize("method", ["PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADALORA", "ADAPTION_PROMPT"])
def test_splitting_and_chunking_change_nothing(method: str) -> None:
    """A prompt in front of the rows has no target, and AdaLoRA's penalty counts once however the batch is split."""
    plain = run_training([adapter(method)])
    split = run_training([adapter(method), GradientAccumulation(steps=3), ChunkedCrossEntropy(chunk_size=8)])
    assert split.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, parameter in plain.trainer.run.trainable.items():
        assert torch.allclose(parameter, split.trainer.run.trainable[name], atol=2e-5), name


@pytest.mark.parametrize("method", ["IA3", "ADAPTION_PROMPT", "LN_TUNING", "LOHA"])
def test_packed_rows_train_alike(method: str) -> None:
    plain, packed = run_training([adapter(method)]), run_training([adapter(method), Packing()])
    assert packed.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "partner", "message"),
    [
        (
            "PROMPT_TUNING",
            Packing,
            "packing needs the positions of a row's tokens to reach the model, and adapter",
        ),
        (
            "PREFIX_TUNING",
            GradientCheckpointing,
            "adapter needs no block to be run again in backward, and gr",
        ),
        ("ADALORA", OptimizerInBackward, "adapter needs all gradients of the step to be there"),
        ("VERA", PureBF16, "adapter needs what is trained to be float32, and pure_bf16 takes that away"),
    ],
)
def test_what_it_cannot_stand_beside(method: str, partner: Any, message: str) -> None:
    with pytest.raises(ConflictError, match=message):
        make_trainer([adapter(method), partner()])


@pytest.mark.parametrize("method", [m for m in TRAINED if m not in (*FLOAT32_TABLES, *needs_clustering, "FROD")])
def test_in_bfloat16(method: str) -> None:
    assert all(
        p.dtype is torch.bfloat16 for p in run_training([adapter(method), PureBF16()], max_steps=1).weights.values()
    )
    if method in IN_PATH:
        with pytest.raises(UserError, match=f"the weights of {method}: they are trained in float32 and the model is 1"):
            make_trainer([adapter(method)], model=make_llama(torch.bfloat16))


def test_adalora_takes_ranks_away_and_keeps_its_shape(tmp_path: Path) -> None:
    """peft would cut the saved file; here every file has all ranks, those taken away with a zero."""
    trained = run_training([Adapter("ADALORA", {**settings("ADALORA")})], max_steps=6, learning_rate=1e-2)
    values = [p for n, p in trained.weights.items() if ".lora_E." in n]
    left = sum(int((v != 0).sum()) for v in values)
    assert left == 2 * len(values) < sum(v.numel() for v in values)  # target_r of init_r 4
    trained.trainer.save_model(tmp_path)
    assert (
        difference(logits(PeftModel.from_pretrained(make_llama(), str(tmp_path))), logits(trained.trainer.model)) == 0
    )


def test_adalora_takes_its_length_from_the_run() -> None:
    plan = {k: v for k, v in settings("ADALORA").items() if k != "total_step"}
    trainer = make_trainer([Adapter("ADALORA", plan)], max_steps=6)
    assert trainer.strategies[0]._loop.config.total_step == 6  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"adapter.config.total_step: ADALORA plans its ranks by it"):
        make_trainer([Adapter("ADALORA", plan)], max_steps=None, num_train_epochs=1)


# -- the life of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["LOHA", "VERA", "P_TUNING", "ADALORA"])
def test_a_run_is_loaded_used_and_merged_or_says_why_not(method: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", make_llama(vocab_size=300), byte_tokenizer())
    numbers = TrainingConfig(batch_size=4, max_steps=3, learning_rate=1e-2, output_dir=str(tmp_path / "run"))
    trainer = Trainer(str(base), make_rows(), training=numbers, strategies=[adapter(method)])
    trainer.train()
    loaded = load_run(tmp_path / "run")
    assert difference(logits(loaded.model), logits(trainer.model)) <= 1e-6
    held_out = make_rows(3, seed=5)
    assert loaded.evaluate(held_out)["eval_loss"] == pytest.approx(trainer.evaluate(held_out)["eval_loss"], rel=1e-6)
    assert len(loaded.generate(["hello"], max_new_tokens=3)) == 1
    if method in MERGED_BY_LAYER:
        merge(tmp_path / "run", tmp_path / "merged", probe=False)
        assert difference(logits(plain(tmp_path / "merged")), logits(trainer.model)) < 1e-5
    else:
        with pytest.raises(UserError, match=f"merge: an adapter of {method} cannot be added to the base weights layer"):
            merge(tmp_path / "run", tmp_path / "merged")


@pytest.mark.parametrize("method", MERGED_BY_LAYER)
def test_its_layers_merge_one_by_one(method: str, tmp_path: Path) -> None:
    from lowmem.adapter_layers import AdapterLayers

    trained = run_training([adapter(method)], learning_rate=1e-2)
    trained.trainer.save_model(tmp_path)
    with torch.device("meta"):
        empty = make_llama()
    layers, merged = AdapterLayers(empty, tmp_path), make_llama()
    base = dict(merged.state_dict())
    with torch.no_grad():
        for name in layers.changed & base.keys():
            base[name].copy_(layers.merged(name, lambda key: make_llama().state_dict()[key]))
    assert difference(logits(merged), logits(trained.trainer.model)) < 1e-5


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_methods_that_need_another_loop_are_refused(method: str) -> None:
    with pytest.raises(UserError, match=rf"adapter.peft_type: {method} cannot be trained here: \w+"):
        Adapter(method)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peft_type": "ia3"}, "adapter.peft_type: peft has no method ia3; did you mean IA3?"),
        ({"peft_type": "XYZZY"}, "adapter.peft_type: peft has no method XYZZY; peft has ADALORA, "),
        ({"config": {"r": 4}}, "adapter.config: has no effect without peft_type"),
        ({"peft_type": "IA3", "config": {"r": 4}}, "adapter.config: IA3 has no setting r; "),
        ({"peft_type": "LOHA", "rank": 4}, "adapter.config: LOHA has no setting rank; "),
        ({"peft_type": "OFT", "oft_block_sise": 4}, "adapter.config: OFT has no setting oft_block_sise; did you"),
        ({"peft_type": "LOHA", "config": {"r": 4}, "r": 4}, "adapter.config: r is given twice"),
        ({"peft_type": "LOHA", "inference_mode": True}, "adapter.config.inference_mode: is set by lowmem"),
        ({"peft_type": "IA3", "target_modules": ["k"], "feedforward_modules": ["v"]}, "adapter.config: IA3: `feedforw"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "adapter.config.init_lora_weights: pissa cannot b"),
        ({"peft_type": "LORA", "init_lora_weights": "eva"}, "adapter.config.init_lora_weights: eva cannot be"),
        ({"peft_type": "PVERA", "generator_seed": 1}, "adapter.config.generator_seed: 1 cannot be had"),
    ],
)  # fmt: skip
def test_settings_that_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Adapter(**arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Adapter(), r"adapter.peft_type: name a method of peft's: ADALORA, "),
        (Adapter("LOHA", target_modules=["q_proj", "v_prj"]), r"no module is called v_prj; near it: .*v_proj"),
        (Adapter("LOHA", modules_to_save=["head"]), r"config.modules_to_save: no module is called head; near"),
        (Adapter("C3A", block_size=5, target_modules=["q_proj"]), r"adapter: .*block size should be a factor"),
        (Adapter("LOHA", target_modules="nothing.*"), r"adapter: .*not found in the base model"),
    ],
    ids=lambda value: value.peft_type if isinstance(value, Adapter) else "",
)  # fmt: skip
def test_settings_that_the_model_does_not_take(strategy: Adapter, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer([strategy])


def test_all_linear_means_the_decoder_layers() -> None:
    trainer = make_trainer([Adapter("LOHA", target_modules="all-linear", r=2)])
    adapted = {n.split(".hada_")[0].rsplit(".", 1)[-1] for n in trainer.run.trainable}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_mapping_becomes_what_peft_wants() -> None:
    """Settings of LoRA that `lora` has not: block-diagonal factors come as a mapping."""
    strategy = Adapter(
        "LORA", r=4, target_modules=["q_proj"], use_bdlora={"target_modules_bd_a": ["q_proj"], "nblocks": 2}
    )
    trained = run_training([strategy], learning_rate=1e-2)
    assert any(trained.moved.values())
    shapes = {tuple(p.shape) for n, p in trained.trainer.run.trainable.items() if ".lora_A." in n}
    assert shapes == {(4, 16)}  # half as wide as the layer


def test_rows_of_new_tokens_are_not_forgotten() -> None:
    model: Any = make_llama()
    model.lowmem_new_token_ids = [126, 127]
    with pytest.raises(UserError, match=r"rows of 2 new tokens would stay untrained; name model\.embed_tokens"):
        make_trainer([adapter("IA3")], model=model)
    whole = {**settings("IA3"), "modules_to_save": ["embed_tokens", "lm_head"]}
    assert any("modules_to_save" in n for n in make_trainer([Adapter("IA3", whole)], model=model).run.trainable)
