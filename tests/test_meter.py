"""The measured ledger: categories add up to what the tensors really hold."""

from __future__ import annotations

import json

import torch
from cases.helpers import Log, llama, rows

from lowmem import ChunkedCrossEntropy, GradientCheckpointing, LoRA, Quantization, Trainer, TrainingConfig
from lowmem.memory.meter import REST, MemoryLedger, ledger_of, timeline_of
from lowmem.memory.timeline import highest_moments
from lowmem.memory.trace import Trace


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
    with Trace() as meter:
        first = torch.zeros(1000)  # 4,000 bytes
        view = first[:10]
        second = first + 1  # 4,000 more: the peak
        del first, view, second
        torch.zeros(500)
    meter_peak = ledger_of(meter).peak_bytes
    assert meter_peak == 8000


def test_a_label_counts_in_hindsight():
    with Trace() as meter:
        kept = torch.zeros(1000)
        other = torch.zeros(10)
    meter.see(kept, "weights")
    assert ledger_of(meter).rows == {"weights": 4000, REST: 40}
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


def test_the_timeline_reaches_the_peak_and_ends_with_what_is_left():
    with Trace() as meter:
        kept = torch.zeros(1000)  # 4,000 bytes
        for size in (2000, 5000, 3000):
            torch.zeros(size)  # comes and goes
    meter.see(kept, "weights")
    timeline = timeline_of(meter)
    totals = [sum(sizes) for sizes in zip(*timeline.bytes.values(), strict=True)]
    assert max(totals) == ledger_of(meter).peak_bytes == 24_000
    assert totals[-1] == 4000
    assert timeline.bytes["weights"][-1] == 4000
    assert timeline.moments == 7  # four births, three deaths
    assert timeline.seconds == sorted(timeline.seconds)


def test_a_long_step_is_thinned_to_its_highest_moments():
    times = [i / 1000 for i in range(10_000)]
    changes = [("a", 10 if i % 2 == 0 else -10) for i in range(10_000)]
    changes[6000] = ("b", 500)
    changes[6001] = ("b", -500)
    timeline = highest_moments(times, changes, 400)
    assert 300 < len(timeline.seconds) <= 400
    totals = [a + b for a, b in zip(timeline.bytes["a"], timeline.bytes["b"], strict=True)]
    assert sorted(set(totals[:-1])) == [10, 500]
    assert (timeline.bytes["a"][-1], timeline.seconds[-1]) == (0, 9.999)


def test_the_timeline_lies_in_the_run_folder(tmp_path):
    log = Log()
    trainer = Trainer(
        llama(),
        rows(),
        training=TrainingConfig(batch_size=4, max_steps=3, output_dir=str(tmp_path / "run")),
        observers=[MemoryLedger(), log],
    )
    trainer.train()
    written = json.loads((tmp_path / "run" / "memory_timeline.json").read_text())
    assert written["step"] == 2
    totals = [sum(sizes) for sizes in zip(*written["bytes"].values(), strict=True)]
    assert max(totals) == trainer.result["peak_live_bytes"]
    assert len(written["seconds"]) == len(totals) <= 400
    assert written["moments"] > 400


def test_an_evaluation_between_two_steps_is_no_part_of_the_step():
    def peak(**options):
        trainer = Trainer(
            llama(vocab_size=2048),
            rows(4),
            eval_dataset=rows(32),
            training=TrainingConfig(batch_size=1, max_steps=3, eval_batch_size=32, **options),
            observers=[MemoryLedger()],
        )
        trainer.train()
        return trainer.result["peak_live_bytes"]

    assert peak(eval_steps=1) == peak()
