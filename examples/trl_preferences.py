"""TRL's DPOTrainer: a tiny model learns to prefer answers that repeat words, without a download.

pip install '.[transformers,zoo]' && python examples/trl_preferences.py

TRL switches dropout off, because log-probabilities must be reproducible. With `Analytic` they are.
"""

import argparse
import random
import statistics
import tempfile

import datasets
import tokenizers
import torch
import transformers
import trl

import undrop
from undrop.integrations.transformers import UndropMixin

WORDS = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(20))])}


class UndropDPO(UndropMixin, trl.DPOTrainer): ...


def pairs(count, seed):
    generator, words, rows = random.Random(seed), list(WORDS)[2:], []
    for _ in range(count):
        prompt = generator.choices(words, k=4)
        chosen, rejected = generator.choices(prompt, k=3), generator.choices(words, k=3)
        texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        rows.append({key: " " + " ".join(text) for key, text in texts.items()})
    return datasets.Dataset.from_list(rows)


def train(objective, steps, seed, folder):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    size = {"vocab_size": 22, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**size, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    transformers.set_seed(seed)
    policy, reference = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    batch = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 64, "use_cpu": True}
    schedule = {"max_steps": steps, "learning_rate": 3e-3, "beta": 0.3, "bf16": False, "seed": seed}
    trainer = UndropDPO(
        *(policy, reference),
        args=trl.DPOConfig(folder, **quiet, **batch, **schedule, disable_dropout=False),
        train_dataset=pairs(64, seed),
        eval_dataset=pairs(128, 1000),
        processing_class=tokenizer,
        objective=objective,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.evaluate()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # enough for a net this small
    datasets.disable_progress_bars()
    print(f"{'objective':16} loss on new pairs, by seed   mean   accuracy")
    for objective in (undrop.NoRegularization, undrop.Dropout, undrop.Analytic):
        runs = []
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(train(objective(), options.steps, seed, folder))
        row = "".join(f"{run['eval_loss']:8.3f}" for run in runs)
        loss = statistics.mean(run["eval_loss"] for run in runs)
        accuracy = statistics.mean(run["eval_rewards/accuracies"] for run in runs)
        print(f"{objective.__name__:16} {row:27} {loss:6.3f}   {accuracy:.3f}")


if __name__ == "__main__":
    main()
