"""UndropMixin on the trainers of TRL: their losses, metrics and log-probabilities."""

import copy

import pytest
import torch

import undrop
from undrop.errors import OptionError

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
hf = pytest.importorskip("transformers", reason="transformers is not installed")

from integrations import trl_models  # noqa: E402
from undrop.integrations.policy import label_statistics  # noqa: E402
from undrop.integrations.transformers import UndropMixin  # noqa: E402


class SFT(UndropMixin, trl.SFTTrainer):
    pass


class DPO(UndropMixin, trl.DPOTrainer):
    pass


class GRPO(UndropMixin, trl.GRPOTrainer):
    pass


TEXTS = datasets.Dataset.from_dict(
    {
        "prompt": ["a b c", "d e", "f g h", "i j a"] * 2,
        "completion": [" d e f", " a b c d", " b", " c d"] * 2,
    }
)
PAIRS = datasets.Dataset.from_dict(
    {
        "prompt": ["a b c", "d e", "f g h", "i j a"],
        "chosen": [" d e f", " a b c d", " b", " c d"],
        "rejected": [" a", " f f", " c a b", " j j i"],
    }
)


def seeded(**options):
    return undrop.Analytic(generator=torch.Generator().manual_seed(3), **options)


def sft(folder, cls=SFT, objective=None, model=None, data=TEXTS, **options):
    extra = {} if cls is trl.SFTTrainer else {"objective": objective or seeded()}
    return cls(
        model or trl_models.model(),
        trl.SFTConfig(**trl_models.arguments(folder, max_length=16, **options)),
        train_dataset=data,
        processing_class=trl_models.tokenizer(),
        **extra,
    )


def dpo(folder, cls=DPO, objective=None, model=None, **options):
    extra = {} if cls is trl.DPOTrainer else {"objective": objective or seeded()}
    options = {"beta": 0.5, "disable_dropout": False, **options}
    return cls(
        model or trl_models.model(),
        trl_models.model(p=0.0, seed=1),
        args=trl.DPOConfig(**trl_models.arguments(folder, max_length=16, **options)),
        train_dataset=PAIRS,
        processing_class=trl_models.tokenizer(),
        **extra,
    )


def logs(trainer):
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def sums_up(log):
    parts = sum(log[f"undrop/{part}"] for part in ("loss", "explicit", "implicit"))
    return parts == pytest.approx(log["loss"], abs=1e-5)


KEPT = ("entropy", "mean_token_accuracy", "num_tokens")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"completion_only_loss": False},
        {"packing": True, "packing_strategy": "wrapped"},
        {"packing": True, "packing_strategy": "bfd"},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    ],
    ids=["completion only", "all tokens", "wrapped", "packed", "accumulated"],
)
def test_sft_keeps_its_loss_and_its_metrics(tmp_path, how):
    """With the exact output the first step's loss and metrics are those of a plain SFTTrainer."""
    ours = logs(sft(tmp_path, objective=seeded(exact_output=True), **how))
    plain = sft(tmp_path, trl.SFTTrainer, model=trl_models.model(p=0.0), **how)
    theirs = logs(plain)
    assert len(ours) == len(theirs) == 2
    assert all(sums_up(log) for log in ours)
    assert ours[0]["undrop/explicit"] > 0
    assert ours[0]["undrop/loss"] == pytest.approx(theirs[0]["loss"], rel=1e-4)
    for key in KEPT:
        assert ours[0][key] == pytest.approx(theirs[0][key], rel=1e-4), key
    assert ours[1]["num_tokens"] == theirs[1]["num_tokens"]


def test_label_statistics_equal_those_of_the_fused_head(tmp_path):
    model = trl_models.model(p=0.0)
    trainer = sft(tmp_path, trl.SFTTrainer, model=model)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        theirs = trainer.model(**batch, fused_lm_head=True)
        logits = trainer.model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    ours = label_statistics(logits, batch["labels"])
    for name in ("log_probs", "entropy", "is_top1", "label_mask"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


def test_the_dft_loss_of_trl_is_refused(tmp_path):
    with pytest.raises(OptionError, match="computes a loss of"):
        sft(tmp_path, loss_type="dft").train()


def test_dpo_logs_the_parts_and_its_own_metrics(tmp_path):
    plain = logs(dpo(tmp_path, trl.DPOTrainer, model=trl_models.model(p=0.0)))
    ours = logs(dpo(tmp_path, objective=seeded(exact_output=True)))
    assert all(sums_up(log) for log in ours)
    assert ours[0]["undrop/explicit"] > 0
    assert ours[0]["undrop/loss"] == pytest.approx(plain[0]["loss"], rel=1e-5)
    for key in (*KEPT, "logps/chosen", "logps/rejected", "rewards/margins", "logits/chosen"):
        assert ours[0][key] == pytest.approx(plain[0][key], rel=1e-5, abs=1e-6), key
    assert ours[1]["loss"] != plain[1]["loss"]


def first_step(trainer, monkeypatch):
    """The step of the first batch, the arguments of the objective, and the trainer's total."""
    found, step_of = [], undrop.Analytic.__call__

    def watched(self, *args):
        found.append((step_of(self, *args), args))
        return found[-1][0]

    monkeypatch.setattr(undrop.Analytic, "__call__", watched)
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    total = trainer.compute_loss(trainer.model.train(), batch)
    monkeypatch.undo()
    return *found[0], total


@pytest.mark.parametrize("exact_output", [True, False])
def test_log_probabilities_of_dpo_stay_reproducible(tmp_path, exact_output, monkeypatch):
    """The policy's log-probabilities equal those without dropout."""
    trainer = dpo(tmp_path, objective=seeded(exact_output=exact_output))
    step, (_, inputs, _), _ = first_step(trainer, monkeypatch)
    trainer.model.eval()
    with torch.no_grad():
        plain = trainer.model(**inputs).log_probs
    off = (step.output[..., 0] - plain).abs().max()
    assert off <= 1e-6 if exact_output else 1e-6 < off < 0.05


def difference(log_probs):
    chosen, rejected = log_probs.sum(1).chunk(2)
    return chosen - rejected


def test_the_parts_of_dpo_equal_their_closed_form(tmp_path, monkeypatch):
    """ℓ = -log σ(β·m): uᵀHu = β²σ(1-σ)·u_m² and ∂ℓ/∂ε = -β(1-σ)·u_m, with m the margin of a pair."""
    trainer = dpo(tmp_path, objective=seeded(exact_output=True))
    reference = copy.deepcopy(trainer.ref_model).eval()
    step, (policy, inputs, order), total = first_step(trainer, monkeypatch)
    taken = {}
    loss = trainer.objective.loss
    grab = loss.derivatives

    def derivatives(output, u, *args, **kwargs):
        taken["u"], taken["f"] = u, output
        return grab(output, u, *args, **kwargs)

    loss.derivatives = derivatives
    trainer.objective.generators = seeded().generators
    again = trainer.objective(policy, inputs, order)
    assert again.parts == pytest.approx(step.parts, rel=1e-5)
    margin, u = (difference(taken[name][..., 0]) for name in ("f", "u"))
    with torch.no_grad():
        m = margin - difference(reference(**inputs).log_probs)
    s = torch.sigmoid(0.5 * m)
    explicit, implicit = (0.25 * s * (1 - s) * u**2).mean(), (-0.5 * (1 - s) * u).mean()
    assert step.parts["explicit"] == pytest.approx(explicit.item(), rel=1e-4)
    assert step.parts["implicit"] == pytest.approx(implicit.item(), rel=1e-4)
    assert total.item() == pytest.approx(sum(step.parts.values()), rel=1e-5)


def reward(completions, **_):
    return [float(len(set(c))) for c in completions]


def test_grpo_takes_steps_and_keeps_its_metrics(tmp_path):
    options = {"num_generations": 4, "max_completion_length": 4, "disable_dropout": False}
    trainer = GRPO(
        trl_models.model(),
        reward_funcs=reward,
        args=trl.GRPOConfig(**trl_models.arguments(tmp_path, **options)),
        train_dataset=TEXTS.remove_columns("completion"),
        processing_class=trl_models.tokenizer(),
        objective=seeded(explicit="identity"),
    )
    before = copy.deepcopy(trainer.model.state_dict())
    found = logs(trainer)
    assert all(sums_up(log) for log in found)
    assert found[0]["undrop/explicit"] > 0
    assert {"reward", "entropy", "completions/mean_length"} <= found[0].keys()
    assert any(not torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())


def scorer(p):
    config = trl_models.model(p).config
    config.num_labels = 1
    torch.manual_seed(0)
    return hf.GPT2ForSequenceClassification(config)


def kto(cls, p, folder, **extra):
    rated = TEXTS.add_column("label", [True, False] * 4)
    config = trl.KTOConfig(**trl_models.arguments(folder, max_length=16, disable_dropout=False))
    models = trl_models.model(p), trl_models.model(p=0.0, seed=1)
    return cls(*models, args=config, train_dataset=rated, **extra)


def reward_model(cls, p, folder, **extra):
    config = trl.RewardConfig(**trl_models.arguments(folder, max_length=16, disable_dropout=False))
    return cls(scorer(p), args=config, train_dataset=PAIRS, **extra)


@pytest.mark.parametrize(
    ("make", "base"),
    [(kto, trl.KTOTrainer), (reward_model, trl.RewardTrainer)],
    ids=["kto", "reward"],
)
def test_kto_and_reward_models_keep_their_own_loss(tmp_path, make, base):
    words = {"processing_class": trl_models.tokenizer()}
    plain = logs(make(base, 0.0, tmp_path, **words))
    cls = type("Ours", (UndropMixin, base), {})
    ours = logs(make(cls, 0.2, tmp_path, objective=seeded(exact_output=True), **words))
    assert sums_up(ours[0])
    assert ours[0]["undrop/explicit"] != 0  # KTO's loss is not convex, so it may be negative
    assert ours[0]["undrop/loss"] == pytest.approx(plain[0]["loss"], rel=1e-4)


def test_a_trainer_that_switches_dropout_off_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="DPO has set every p to 0: pass disable_dropout=False"):
        dpo(tmp_path, disable_dropout=True)


def test_engines_that_differentiate_the_fused_head_are_refused(tmp_path):
    with pytest.raises(
        OptionError, match="the tangent engine can't differentiate the fused output"
    ):
        dpo(tmp_path, objective=seeded(engine="tangent")).train()


def test_a_loss_that_does_not_call_the_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        trl.DPOTrainer, "compute_loss", lambda self, model, inputs, **_: torch.zeros(())
    )
    with pytest.raises(OptionError, match="computes its loss without calling the model"):
        dpo(tmp_path).train()


def test_a_loss_that_calls_the_model_twice_is_refused(tmp_path, monkeypatch):
    compute = trl.DPOTrainer.compute_loss

    def twice(self, model, inputs, **kwargs):
        return compute(self, model, inputs, **kwargs) + compute(self, model, inputs, **kwargs)

    monkeypatch.setattr(trl.DPOTrainer, "compute_loss", twice)
    with pytest.raises(OptionError, match="calls the model more than once with gradients"):
        dpo(tmp_path).train()
