import json
import os
import signal

import pytest

from undrop.lab.cli import main
from undrop.lab.train import RunFolder

SMALL = [
    *("--set", "model.embedding_size=6", "--set", "model.hidden_size=6", "--set", "model.layers=2"),
    *("--set", "data.batch_size=4", "--set", "data.eval_batch_size=2", "--set", "data.length=5"),
    *("--set", "optimizer.lr=2", "--set", "train.epochs=1"),
]


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tales"
    folder.mkdir()
    for split, lines in (("train", 40), ("valid", 8), ("test", 8)):
        (folder / f"{split}.txt").write_text("once upon a time there was a king\n" * lines)
    return folder


@pytest.fixture
def trained(text, capsys):
    assert main(["train", "--data", str(text), "--objective", "none", *SMALL, "--out", "r"]) == 0
    capsys.readouterr()
    return "r"


def test_train_writes_progress_to_stderr_and_the_summary_to_stdout(text, capsys):
    assert main(["train", "--data", str(text), "--objective", "none", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("best validation perplexity ")
    assert out.strip().endswith("runs/awd-lstm-tales-none-1")
    assert "epoch 1/1" in err
    assert "validation" in err


def test_train_json_is_the_summary(text, capsys):
    command = ["train", "--data", str(text), "--objective", "dropout", "--seed", "5", *SMALL]
    assert main([*command, "--out", "r", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["seed"], summary["objective"], summary["out"]) == (5, "dropout", "r")
    assert {"best_valid_ppl", "test_ppl", "seconds", "epochs"} <= summary.keys()


def test_resume_needs_no_other_option_and_can_add_epochs(trained, capsys):
    assert main(["train", "--resume", "--out", trained, "--set", "train.epochs=2"]) == 0
    assert RunFolder(trained).read_summary()["epochs"] == 2
    assert RunFolder(trained).read_config()["train"]["epochs"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name what to train: --preset NAME, or --model NAME and --data NAME."),
        (["train", "--preset", "ptb-awd-lsmt"], "did you mean 'ptb-awd-lstm'?"),
        (["train", "--model", "awd-lsmt"], "unknown model 'awd-lsmt': did you mean 'awd-lstm'?"),
        (["train", "--data", "pydoc"], "unknown corpus 'pydoc': did you mean 'pydocs'?"),
        (["train", "--data", "pydocs", "--objective", "drop"], "unknown objective 'drop'"),
        (["train", "--data", "pydocs", "--set", "train.epochs=0"], "greater than or equal to 1"),
        (["train", "--data", "pydocs", "--seed", "-1"], "train.seed must be greater than or equal"),
        (["train", "--data", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (
            ["train", "--resume", "--out", "none"],
            "none holds no run to resume: give the folder",
        ),
        (["train", "--resume"], "--resume needs --out, the folder of the run to resume."),
        (
            ["watch", "--resume", "--out", "none"],
            "none holds no run to resume: give the folder",
        ),
        (["eval", "none"], "none holds no run: it has no config.json."),
        (["generate", "none"], "none holds no run"),
        (["plot", "none"], "none holds no run"),
        (["runs", "none"], "there is no folder none: give a folder of runs"),
        (["demo", "--out", "tales"], "tales is not empty: give --out a new folder."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(text, capsys, arguments, message):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_train_refuses_a_folder_that_holds_a_run(trained, text, capsys):
    assert main(["train", "--data", str(text), *SMALL, "--out", trained]) == 2
    assert "already holds a run: resume it with --resume" in capsys.readouterr().err


def test_the_error_for_a_folder_that_cannot_be_written_is_one_sentence(text, capsys):
    (text / "file").write_text("")
    assert main(["train", "--data", str(text), *SMALL, "--out", str(text / "file" / "r")]) == 2
    assert "can't be written: not a directory." in capsys.readouterr().err


def test_runs_lists_the_best_run_first_and_names_unreadable_runs(trained, text, capsys):
    main(["train", "--data", str(text), "--objective", "none", *SMALL[:-2], "--out", "s"])
    (text / "broken").mkdir()
    (text / "broken" / "config.json").write_text("{")
    capsys.readouterr()
    assert main(["runs", str(text.parent), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["path"].rpartition("/")[2] for row in rows] == ["s", "r", "broken"]
    assert rows[0]["best_valid_ppl"] < rows[1]["best_valid_ppl"]
    assert rows[1]["status"] == "finished"
    assert "not a JSON file" in rows[2]["status"]
    assert main(["runs", str(text.parent)]) == 0
    out = capsys.readouterr().out
    assert "finished" not in out  # only a run that is not finished shows its status
    assert "not a JSON file" in out


def test_eval_agrees_with_the_summary_of_the_run(trained, capsys):
    assert main(["eval", trained, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    summary = RunFolder(trained).read_summary()
    assert results["valid"]["perplexity"] == pytest.approx(summary["best_valid_ppl"], rel=1e-6)
    assert results["test"]["perplexity"] == pytest.approx(summary["test_ppl"], rel=1e-6)
    assert main(["eval", trained, "--split", "train", "--batch-size", "1"]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["eval", trained, "--split", "dev"]) == 2
    assert "unknown split 'dev'" in capsys.readouterr().err


def test_resume_starts_a_run_that_does_not_exist_yet(text):
    words = ["--data", str(text), "--objective", "none", *SMALL]
    assert main(["train", "--resume", *words, "--out", "new"]) == 0
    assert RunFolder("new").read_summary()["epochs"] == 1


def test_eval_uses_the_precision_of_the_run(text, capsys):
    words = ["--data", str(text), "--objective", "none", *SMALL]
    assert main(["train", *words, "--set", "train.precision=bfloat16", "--out", "half"]) == 0
    capsys.readouterr()
    assert main(["eval", "half", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["valid"]["perplexity"] == RunFolder("half").read_summary()["best_valid_ppl"]


def test_eval_explains_that_the_run_was_evaluated_on_parts_of_the_splits(text, capsys):
    words = ["--data", str(text), "--objective", "none", *SMALL, "--set", "data.eval_tokens=20"]
    assert main(["train", *words, "--out", "r"]) == 0
    capsys.readouterr()
    assert main(["eval", "r", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["valid"]["tokens"] == 72
    assert "The run evaluated only the first 20 tokens of each split (data.eval_tokens)" in err
    words[-1] = "data.eval_tokens=72"
    assert main(["train", *words, "--out", "s"]) == 0
    capsys.readouterr()
    assert main(["eval", "s"]) == 0
    assert not capsys.readouterr().err


def test_eval_names_a_damaged_file_of_weights(trained, capsys):
    weights = RunFolder(trained).path / "best.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert main(["eval", trained]) == 2
    assert "best.safetensors was truncated or modified" in capsys.readouterr().err


def test_generate_draws_more_words_than_the_context_of_a_gpt(text, capsys):
    model = ("model.size=8", "model.layers=1", "model.heads=1", "model.context=16")
    data = (
        "data.batch_size=4",
        "data.eval_batch_size=2",
        "data.length=5",
        "train.epochs=1",
        "optimizer.lr=0.1",
    )
    settings = [word for setting in (*model, *data) for word in ("--set", setting)]
    line = ["train", "--data", str(text), "--model", "gpt", "--objective", "none", "--out", "g"]
    assert main([*line, *settings]) == 0
    capsys.readouterr()
    assert main(["generate", "g", "--words", "40", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["words"]) == 40


def test_generate_depends_on_the_seed_alone(trained, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", trained, "--words", "30", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main(["generate", trained, "--prompt", "once upon", "--words", "5", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["words"]) == 5
    assert main(["generate", trained, "--temperature", "-1"]) == 2
    assert "temperature must be finite and not negative" in capsys.readouterr().err


def test_plot_writes_a_figure(trained, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["plot", trained, "--out", "c.png"]) == 0
    assert capsys.readouterr().out == "c.png\n"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", trained, "--value", "lss"]) == 2
    assert "unknown curve 'lss': did you mean 'loss'?" in capsys.readouterr().err
    assert main(["plot", trained, "--out", "c.xyz"]) == 2
    assert "c.xyz can't be drawn" in capsys.readouterr().err


def test_demo_trains_three_ways_and_draws_them(text, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["demo", "--out", "d", "--set", f"data.name={text}", *SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["rows"]] == ["none", "dropout", "analytic"]
    assert result["rows"][1]["times_dropout"] == 1.0
    assert (tmp_path / "d" / "curves.png").exists()
    assert main(["demo", "--out", "e", "--set", f"data.name={text}", *SMALL]) == 0
    assert "Analytic, no dropout" in capsys.readouterr().out


def test_demo_without_matplotlib_has_no_curves_and_says_so(text, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert main(["demo", "--out", "d", "--set", f"data.name={text}", *SMALL]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "no curves, because matplotlib is not installed: pip install 'undrop[plot]'."


def test_ctrl_c_in_a_demo_says_that_it_cannot_be_resumed(text, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    step = "undrop.lab.cli._progress.DemoProgress.step"
    monkeypatch.setattr(step, lambda self, done, tokens, parts: os.kill(os.getpid(), signal.SIGINT))
    assert main(["demo", "--out", "d", "--set", f"data.name={text}", *SMALL]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        "stopped: a demo can't be resumed; its runs are in d. `undrop demo` starts a new one."
    )


def test_ctrl_c_in_training_says_how_to_resume_and_exits_with_130(text, capsys, monkeypatch):
    from undrop.lab.train import Callback

    class Impatient(Callback):
        def step(self, done, tokens, parts):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("undrop.lab.cli._progress.TrainingProgress", Impatient)
    assert main(["train", "--data", str(text), *SMALL, "--out", "r"]) == 130
    message = "stopped at step 1 with everything saved: resume with undrop train --resume --out r\n"
    assert capsys.readouterr().err == message


def test_train_takes_your_own_callback_and_loggers(text, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from undrop.lab.train import Callback\n"
        "class Mine(Callback):\n"
        "    def observe(self, trainer, inputs, targets):\n"
        "        return {'step_squared': trainer.step**2.0}\n"
        "model = 3\n"
    )
    arguments = ["train", "--data", str(text), "--objective", "none", *SMALL, "--out", "r"]
    arguments += ["--set", "train.loggers=csv", "--set", "train.max_steps=3"]
    assert main([*arguments, "--callback", "mine.py:Mine"]) == 0
    rows = (tmp_path / "r" / "csv" / "callback.csv").read_text().splitlines()
    assert [row.split(",")[:3] for row in rows[1:]] == [
        ["1", "1", "1.0"],
        ["1", "2", "4.0"],
        ["1", "3", "9.0"],
    ]
    capsys.readouterr()
    assert main([*arguments, "--resume", "--callback", "mine.py:model"]) == 2
    assert (
        "--callback mine.py:model must be a Callback of undrop.lab.train" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.hidden_size=99999999999999", "the model awd-lstm does not fit in memory"),
        (f"model.hidden_size={'9' * 5000}", "model.hidden_size must be a smaller number"),
        ("model.layers=true", "model.layers must be a number and not a boolean, got True."),
    ],
    ids=["too large", "5000 digits", "boolean"],
)
def test_impossible_numbers_are_refused_in_one_short_sentence(text, capsys, setting, message):
    assert main(["train", "--data", str(text), *SMALL, "--set", setting, "--out", "r"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error) < 300
    assert not os.path.exists("r")


def test_resume_with_deleted_checkpoints_is_refused(trained, capsys):
    for path in RunFolder(trained).checkpoints.folder.iterdir():
        path.unlink()
    assert main(["train", "--resume", "--out", trained, "--set", "train.epochs=2"]) == 2
    assert "r can't be resumed: its checkpoints are gone" in capsys.readouterr().err
