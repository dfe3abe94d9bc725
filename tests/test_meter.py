"""The measured ledger: categories add up to what the tensors really hold."""

from __future__ import annotations

import torch
from cases.helpers import Log, llama, rows

from lowmem import ChunkedCrossEntropy, GradientCheckpointing, LoRA, Quantization, Trainer, TrainingConfig
from lowmem.memory.meter import REST, MemoryLedger, StepMeter


def measured(*strategies, steps=3, model=None, batch_size=4):
    log = Log()
    trainer = Trainer(
        model or llama(),
        rows(),
        training=TrainingConfig(batch_size=batch_size, max_steps=steps, learning_rate=1e-3),
        strategies=list(strategies),
        observers=[MemoryLedger(), log],
    )
    trainer.train()
    return trainer, log.all("ledger", "rows")


def test_storages_are_counted_once_and_forgotten_when_they_die():
    with StepMeter() as meter:
        first = torch.zeros(1000)  # 4,000 bytes
        view = first[:10]
        second = first + 1  # 4,000 more: the peak
        del first, view, second
        torch.zeros(500)
    meter_peak = meter.ledger().peak_bytes
    assert meter_peak == 8000


def test_a_label_counts_in_hindsight():
    with StepMeter() as meter:
        kept = torch.zeros(1000)
        other = torch.zeros(10)
    meter.see(kept, "weights")
    assert meter.ledger().rows == {"weights": 4000, REST: 40}
    del other


def test_full_training_holds_weights_gradients_and_two_moments():
    trainer, (ledger,) = measured(batch_size=1)  # few activations, so that the peak is at the end of backward
    size = sum(p.nbytes for p in trainer.model.parameters())
    assert ledger["weights, trainable"] == size
    steps = 4 * len(trainer.run.trainable)  # AdamW's step counters
    assert ledger["optimizer state"] == 2 * size + steps
    assert ledger["gradients"] > 0.9 * size
    assert ledger[REST] > 0
    assert trainer.result["peak_live_bytes"] == sum(ledger.values())


def test_an_adapter_on_four_bits_has_little_to_hold():
    trainer, (ledger,) = measured(Quantization(), LoRA(r=4))
    adapters = sum(p.nbytes for p in trainer.run.trainable.values())
    assert ledger["weights, trainable"] == adapters
    assert ledger["optimizer state"] == 2 * adapters + 4 * len(trainer.run.trainable)
    plain = sum(p.nbytes for p in llama().parameters())
    assert ledger["weights, frozen"] < 0.6 * plain


def test_checkpointing_and_chunks_lower_the_rest():
    big = {"vocab_size": 4096, "num_hidden_layers": 4}
    _, (plain,) = measured(model=llama(**big))
    _, (lean,) = measured(GradientCheckpointing(), ChunkedCrossEntropy(chunk_size=8), model=llama(**big))
    assert lean[REST] < 0.6 * plain[REST]


def test_a_run_of_one_step_is_measured_too_and_a_second_one_says_nothing_more():
    _, ledgers = measured(steps=1)
    assert len(ledgers) == 1
    _, ledgers = measured(steps=5)
    assert len(ledgers) == 1
