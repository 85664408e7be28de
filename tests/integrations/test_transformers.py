"""UndropTrainer: real training runs of one-layer models, a few steps each."""

import copy
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

import undrop
from integrations.families import FAMILIES, Family
from integrations.two_trainers import UndropTrainer, run
from undrop.errors import (
    CheckpointError,
    MissingExtraError,
    OptionError,
    RecomputationError,
    TargetError,
)
from undrop.integrations.transformers import UndropMixin
from undrop.losses import CrossEntropy, Task


@pytest.fixture(autouse=True)
def precision_of_each_test():
    """Older Trainers leave their settings in the environment, where the next Trainer finds them."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def check_loss(logged: float, loss: float, parts: float) -> None:
    """The parts add up to the loss, and the log holds this loss, which older Trainers round."""
    assert parts == pytest.approx(loss, abs=1e-5)
    assert logged == pytest.approx(loss, abs=1e-5) or logged == round(loss, 4)


def examples(family: Family, n: int = 8) -> list[dict[str, Tensor]]:
    batch = family.data(n)
    return [{name: value[i] for name, value in batch.items()} for i in range(n)]


def arguments(folder, **options) -> hf.TrainingArguments:
    given = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        **options,
    }
    return hf.TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **given)


def seeded(**options) -> undrop.Analytic:
    return undrop.Analytic(generator=torch.Generator().manual_seed(3), **options)


def trained(folder, family="gpt2", objective=None, model=None, data=None, cls=UndropTrainer, **how):
    """A trainer after training; the model is the same for the same family."""
    family = FAMILIES[family]
    trainer = cls(
        family.model() if model is None else model,
        arguments(folder, **how),
        train_dataset=examples(family) if data is None else data,
        objective=seeded() if objective is None else objective,
    )
    trainer.train()
    return trainer


def weights(trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_takes_steps_and_logs_the_parts(name, tmp_path):
    before = torch.cat([p.flatten() for p in FAMILIES[name].model().parameters()])
    trainer = trained(tmp_path, name)
    assert not torch.equal(before, weights(trainer))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2
    for log, loss in zip(logs, trainer.losses, strict=True):
        parts = [log[f"undrop/{part}"] for part in ("loss", "explicit", "implicit")]
        assert parts[1] > 0
        check_loss(log["loss"], loss, sum(parts))


def test_the_first_step_of_the_trainer_logs_that_undrop_is_active(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "undrop"):
        trained(tmp_path)
    lines = [r.message for r in caplog.records if "undrop is active" in r.message]
    assert len(lines) == 1
    assert lines[0].startswith("undrop is active: Analytic on GPT2LMHeadModel, 4 sites, loss = ")
    assert "explicit = " in lines[0]


def sgd(model: torch.nn.Module, batches: list[dict[str, Tensor]], scales: list[float]) -> Tensor:
    """The weights after one plain step on the scaled sum over micro-batches."""
    objective = seeded()
    for batch, scale in zip(batches, scales, strict=True):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        objective(model, inputs, batch["labels"]).backward(scale)
    return torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in model.parameters()])


def stacked(data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([example[name] for example in data]) for name in data[0]}


def shares(trainer, batches: list[dict[str, Tensor]]) -> list[float]:
    """The targets of each batch, over the number that the Trainer counts.

    Older Trainers also count the first token of a language model, which is no target.
    """
    counted = float(trainer._get_num_items_in_batch(batches, torch.device("cpu")))
    return [int((batch["labels"][:, 1:] != -100).sum()) / counted for batch in batches]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_trainer_step_equals_that_of_a_plain_loop(tmp_path, attention):
    data, model = examples(FAMILIES["llama"], 4), FAMILIES["llama"].model(attention)
    trainer = trained(tmp_path, "llama", model=copy.deepcopy(model), data=data, max_steps=1)
    batches = [stacked(data)]
    torch.testing.assert_close(weights(trainer), sgd(model, batches, shares(trainer, batches)))


def uneven(family: Family) -> list[dict[str, Tensor]]:
    """Two micro-batches of two examples, with 4 and with 1 target."""
    data = examples(family, 4)
    for example in data[2:]:
        example["labels"] = torch.full_like(example["labels"], -100)
    data[2]["labels"][1] = 3
    return data


def test_accumulated_micro_batches_count_by_their_targets(tmp_path):
    """The total of each micro-batch, including the noise, is scaled by its share of the targets."""
    data, model = uneven(FAMILIES["llama"]), FAMILIES["llama"].model()
    two = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = trained(tmp_path, "llama", model=copy.deepcopy(model), data=data, **two)
    batches = [stacked(data[:2]), stacked(data[2:])]
    torch.testing.assert_close(weights(trainer), sgd(model, batches, shares(trainer, batches)))


@pytest.mark.parametrize("name", ["gpt2", "bert-tokens", "bert-sequence"])
def test_accumulation_in_the_trainer_gives_the_step_of_one_large_batch(tmp_path, name):
    """With the exact engine, which draws no noise, the two are the same step."""
    family = FAMILIES[name]
    data = uneven(family) if name == "gpt2" else examples(family, 4)
    exact = lambda: undrop.Analytic(engine="exact")  # noqa: E731
    one = trained(tmp_path, name, exact(), data=data, max_steps=1)
    two = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    accumulated = trained(tmp_path, name, exact(), data=data, **two)
    torch.testing.assert_close(weights(accumulated), weights(one))
    first, second = one.state.log_history[0], accumulated.state.log_history[0]
    for key in ("loss", "undrop/loss", "undrop/explicit"):
        assert second[key] == pytest.approx(first[key], rel=1e-4)


def test_micro_batches_count_equally_if_the_model_takes_no_count_of_targets(tmp_path):
    """The Trainer divides by the number of micro-batches, and so do the logged parts."""
    data, model = uneven(FAMILIES["gpt2"]), FAMILIES["gpt2"].model()
    model.accepts_loss_kwargs = False
    two = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = trained(tmp_path, model=copy.deepcopy(model), data=data, **two)
    batches = [stacked(data[:2]), stacked(data[2:])]
    torch.testing.assert_close(weights(trainer), sgd(model, batches, [0.5, 0.5]))
    log = trainer.state.log_history[0]
    parts = sum(log[f"undrop/{part}"] for part in ("loss", "explicit", "implicit"))
    check_loss(log["loss"], sum(trainer.losses), parts)


@pytest.mark.portable
@pytest.mark.parametrize("engine", ["tangent", "antithetic"])
def test_a_trainer_step_in_bfloat16_is_close_to_one_in_float32(tmp_path, engine):
    full = trained(tmp_path, "bert-sequence", seeded(engine=engine), max_steps=1)
    half = trained(tmp_path, "bert-sequence", seeded(engine=engine), max_steps=1, bf16=True)
    assert next(half.model.parameters()).dtype == torch.float32
    first, second = full.state.log_history[0], half.state.log_history[0]
    assert first["undrop/loss"] != second["undrop/loss"]
    assert second["undrop/loss"] == pytest.approx(first["undrop/loss"], rel=1e-2)
    # bfloat16 keeps 8 bits, and the antithetic engine takes a difference of two passes
    assert second["undrop/explicit"] == pytest.approx(first["undrop/explicit"], rel=0.1)


def test_the_engine_runs_inside_autocast(tmp_path, monkeypatch):
    """Accelerate's autocast is inside ``forward``, where the engine would not see it."""
    seen = []
    evaluate = undrop.engines.Antithetic.evaluate

    def watching(self, request):
        seen.append(torch.is_autocast_enabled("cpu"))
        return evaluate(self, request)

    monkeypatch.setattr(undrop.engines.Antithetic, "evaluate", watching)
    trained(tmp_path, objective=seeded(engine="antithetic"), bf16=True)
    assert seen == [True, True]


@pytest.mark.parametrize("name", ["gpt2", "bert-masked", "llama", "t5"])
def test_gradient_checkpointing_does_not_change_the_trainers_step(tmp_path, name):
    plain = trained(tmp_path, name, seeded(engine="antithetic"))
    how = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    checkpointed = trained(tmp_path, name, seeded(engine="antithetic"), **how)
    torch.testing.assert_close(weights(checkpointed), weights(plain), rtol=1e-5, atol=1e-7)


def test_reentrant_gradient_checkpointing_is_refused(tmp_path):
    with pytest.raises(RecomputationError, match="use_reentrant=False"):
        trained(
            tmp_path,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )


def test_evaluation_equals_that_of_a_plain_trainer(tmp_path):
    family = FAMILIES["bert-sequence"]
    trainers = [
        cls(family.model(), arguments(tmp_path), eval_dataset=examples(family))
        for cls in (hf.Trainer, UndropTrainer)
    ]
    plain, ours = (trainer.evaluate() for trainer in trainers)
    assert ours["eval_loss"] == plain["eval_loss"]
    predicted = [trainer.predict(examples(family)).predictions for trainer in trainers]
    assert (predicted[0] == predicted[1]).all()


@pytest.mark.parametrize("options", [{}, {"samples": 2, "interval": 2, "engine": "antithetic"}])
def test_the_trainer_resumes_exactly(tmp_path, options):
    how = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5, "data": None}
    whole = trained(tmp_path / "whole", objective=undrop.Analytic(**options), **how)
    family = FAMILIES["gpt2"]
    torch.manual_seed(99)  # must not matter
    objective = undrop.Analytic(**options)
    resumed = UndropTrainer(
        family.model(),
        arguments(tmp_path / "resumed", max_steps=5),
        train_dataset=examples(family),
        objective=objective,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(weights(resumed), weights(whole))
    assert objective.steps == 5
    last = [trainer.state.log_history[-2] for trainer in (whole, resumed)]
    assert last[0]["undrop/loss"] == last[1]["undrop/loss"]


def test_resuming_from_a_checkpoint_without_a_saved_objective_logs_a_warning(tmp_path, caplog):
    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trained(tmp_path, **how)
    (tmp_path / "checkpoint-1" / "undrop.safetensors").unlink()
    trainer = UndropTrainer(
        FAMILIES["gpt2"].model(), arguments(tmp_path), train_dataset=examples(FAMILIES["gpt2"])
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "start again" in caplog.text
    (tmp_path / "checkpoint-2" / "undrop.safetensors").write_bytes(b"cut")
    trainer.args.max_steps = 3
    with pytest.raises(CheckpointError, match="truncated or modified"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_label_smoothing_equals_that_of_a_plain_trainer(tmp_path):
    """Without noise the loss is what a plain Trainer reports in eval mode."""
    family, how = FAMILIES["llama"], {"label_smoothing_factor": 0.3, "max_steps": 1}
    ours = trained(tmp_path, "llama", seeded(engine="tangent"), **how)
    plain = hf.Trainer(
        family.model(), arguments(tmp_path, **how), eval_dataset=examples(family)[:4]
    )
    expected = plain.evaluate()["eval_loss"]
    (share,) = shares(ours, [stacked(examples(family)[:4])])
    assert ours.state.log_history[0]["undrop/loss"] == pytest.approx(share * expected, rel=1e-4)


class OnLabels(UndropTrainer):
    """A task that differs from the model's: predict the token itself instead of the next one."""

    def undrop_task(self, model, labels):
        return Task(CrossEntropy(), lambda labels: labels)


def test_a_trainer_may_override_the_task(tmp_path):
    how = {"per_device_train_batch_size": 2, "max_steps": 1}
    trainer = trained(tmp_path, cls=OnLabels, **how)
    model, batch = FAMILIES["gpt2"].model().eval(), stacked(examples(FAMILIES["gpt2"])[:2])
    labels = batch.pop("labels")
    expected = torch.nn.functional.cross_entropy(
        model(**batch).logits.detach().flatten(0, 1), labels.view(-1)
    )
    assert trainer.state.log_history[0]["undrop/loss"] == pytest.approx(float(expected), rel=1e-4)


class Mine(UndropMixin, hf.Trainer):
    """A custom Trainer that also uses the outputs."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.seen = outputs.logits.shape
        return (loss, outputs) if return_outputs else loss


def test_your_own_trainer_can_return_outputs(tmp_path):
    assert trained(tmp_path, cls=Mine).seen == (4, 3, 7)


def test_the_trainer_takes_any_objective(tmp_path, caplog):
    for objective in (undrop.NoRegularization(), undrop.Dropout(2), undrop.L2(0.01)):
        trainer = trained(tmp_path, objective=objective, max_steps=1)
        assert "undrop/loss" in trainer.state.log_history[0]
    assert "NoRegularization on GPT2LMHeadModel" in caplog.text


def test_a_model_without_dropout_is_an_error(tmp_path):
    model = FAMILIES["llama"].model()
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    with pytest.raises(undrop.errors.NoDropoutError):
        trained(tmp_path, "llama", model=model)


def test_options_that_undrop_cannot_honor_are_refused(tmp_path):
    model, args = FAMILIES["gpt2"].model(), arguments(tmp_path)
    with pytest.raises(OptionError, match=r"compute_loss_func.*override `undrop_task`"):
        UndropTrainer(model, args, compute_loss_func=lambda *_, **__: None)
    with pytest.raises(OptionError, match=r"the loss MSE, but the model's head determines it"):
        UndropTrainer(model, args, objective=undrop.Analytic(loss=undrop.MSE()))
    trainer = UndropTrainer(model, args)
    with pytest.raises(TargetError, match=r"needs `labels` in the batch, got input_ids"):
        trainer.compute_loss(model, {"input_ids": torch.ones(1, 2, dtype=torch.long)})


def test_importing_the_trainer_without_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "undrop.integrations.transformers")
    with pytest.raises(MissingExtraError, match=r"pip install 'undrop\[transformers\]'"):
        import undrop.integrations.transformers  # noqa: F401


def test_a_trainer_on_two_processes_takes_the_step_of_one(launch, tmp_path):
    """With the exact engine, which draws no noise, and targets that are unevenly spread."""
    launch(Path(__file__).with_name("two_trainers.py"), tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    alone = run(tmp_path / "alone", processes=1)
    torch.testing.assert_close(
        torch.tensor(found["weights"]), torch.tensor(alone["weights"]), rtol=1e-4, atol=1e-6
    )
    for key in ("loss", "undrop/loss", "undrop/explicit"):
        assert found["log"][key] == pytest.approx(alone["log"][key], rel=1e-4)
    states = sorted(path.name for path in tmp_path.glob("checkpoint-2/undrop*"))
    assert states == ["undrop_0.safetensors", "undrop_1.safetensors"]


def tuned(folder, steps, resume=None, **how):
    family = FAMILIES["gpt2"]
    data = examples(family, 16)
    trainer = UndropTrainer(
        family.model(),
        arguments(folder, max_steps=steps, per_device_eval_batch_size=4, **how),
        train_dataset=data[:8],
        objective=undrop.Dropout(generator=torch.Generator().manual_seed(3)),
        tune=data[8:],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_p_is_tuned_on_other_examples_logged_and_resumed_bit_for_bit(tmp_path):
    torch.manual_seed(5)
    whole = tuned(tmp_path / "whole", 205, save_strategy="steps", save_steps=95)
    assert [e.step for e in whole.tuner.history.entries] == [100, 200]
    logged = [entry for entry in whole.state.log_history if "loss" in entry][-1]
    site, p = next(iter(whole.tuner.probabilities.items()))
    assert logged[f"undrop/p/{site}"] == pytest.approx(p)
    torch.manual_seed(6)
    again = tuned(tmp_path / "whole", 205, resume=str(tmp_path / "whole" / "checkpoint-95"))
    assert again.tuner.probabilities == whole.tuner.probabilities
    assert torch.equal(weights(again), weights(whole))


class Weighted(hf.Trainer):
    """A Trainer with a loss that differs from the model's."""

    factor = 1.5

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (self.factor * loss, outputs) if return_outputs else self.factor * loss


def test_a_trainer_with_a_custom_loss_is_refused(tmp_path):
    class Both(UndropMixin, Weighted):
        pass

    with pytest.raises(
        OptionError,
        match=r"Both's own compute_loss, with GPT2LMHeadModel, computes a loss of .* but undrop's "
        r"CrossEntropy is .*override `undrop_task`",
    ):
        trained(tmp_path, cls=Both)
    Both.factor = 1.0
    assert trained(tmp_path, cls=Both).objective.steps == 2


def test_the_check_of_the_loss_includes_label_smoothing(tmp_path):
    """The Trainer smooths labels itself, so undrop compares with its loss."""
    for name in ("gpt2", "bert-sequence"):
        trainer = trained(tmp_path, name, label_smoothing_factor=0.2, max_steps=1)
        assert trainer._undrop_verified


def tokenizer():
    """Words w0 … w6."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(7)}, unk_token="w0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "eos_token": "w0", "unk_token": "w0"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_loss_type_of_trl_is_never_silently_replaced(tmp_path, loss_type):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class Tuner(UndropMixin, trl.SFTTrainer):
        pass

    given = {
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "loss_type": loss_type,
        "max_length": 6,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    config = trl.SFTConfig(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **given
    )
    data = datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4", "w2 w5 w6 w1"]})
    trainer = Tuner(
        FAMILIES["gpt2"].model(),
        config,
        train_dataset=data,
        processing_class=tokenizer(),
        objective=seeded(),
    )
    if loss_type == "dft":
        with pytest.raises(OptionError, match="Tuner's own compute_loss"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.objective.steps == 1


def test_a_model_that_the_trainer_compiles_trains_like_the_model_itself(tmp_path):
    plain = trained(tmp_path / "plain")
    how = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compiled = trained(tmp_path / "compiled", **how)
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
