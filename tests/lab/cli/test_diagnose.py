"""The commands that measure dropout in a model: sites, check, diagnose, bound, and watch."""

import inspect
import json
import random
import re
import sys

import pytest

import undrop
from undrop.diagnosis import Diagnosis
from undrop.errors import RunError
from undrop.lab import cli
from undrop.lab.cli import check as check_command
from undrop.lab.cli import diagnose as diagnose_command

TINY = [
    *("--set", "model.embedding_size=8", "--set", "model.hidden_size=8", "--set", "model.layers=2"),
    *("--set", "data.batch_size=4", "--set", "data.eval_batch_size=4", "--set", "data.length=6"),
    *("--set", "optimizer.lr=5", "--set", "train.epochs=1", "--set", "train.threads=1"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(1)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        words = ("<b>", "w1", "w2", "w3", "w4")
        page = [" ".join(draw.choice(words) for _ in range(9)) for _ in range(lines)]
        (folder / f"{split}.txt").write_text("\n".join(page) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A trained and watched run."""
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setenv("UNDROP_CACHE", str(folder / "cache"))
    out = folder / "run"
    words = ["watch", "--model", "awd-lstm", "--data", str(text), "--out", str(out)]
    assert cli.main([*words, "--interval", "5", *TINY]) == 0
    yield out
    patch.undo()


def answer(capsys, *words):
    """Return the JSON that a command prints."""
    capsys.readouterr()
    assert cli.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_message(capsys, *words):
    """Return the error message of a command."""
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == 2
    return capsys.readouterr().err


def test_watch_adds_lines_to_the_metrics(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    watched = [record for record in records if record["kind"] == "watch"]
    assert [record["step"] for record in watched] == [5, 10, 15, 20, 25]
    for record in watched:
        shares = {key: value for key, value in record.items() if key.startswith("share/")}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert "share/output_dropout" in shares
        assert record["half_quadratic"] > 0.0
        assert record["xi_norm"] > 0.0


def test_watch_does_not_change_the_run(run, text, tmp_path):
    words = ["train", "--model", "awd-lstm", "--data", str(text), "--out", str(tmp_path / "run")]
    assert cli.main([*words, *TINY]) == 0
    watched, alone = (
        (folder / "best.safetensors").read_bytes() for folder in (run, tmp_path / "run")
    )
    assert watched == alone


def test_tensorboard_shows_the_measurements_of_watch(text, tmp_path):
    pytest.importorskip("tensorboard")
    words = ["watch", "--model", "awd-lstm", "--data", str(text), "--out", str(tmp_path / "run")]
    more = ["--interval", "10", "--set", "train.tensorboard=true"]
    assert cli.main([*words, *more, *TINY]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"watch/half_quadratic", "watch/xi_norm", "watch/share/output_dropout"} <= tags


def test_sites_lists_every_dropout(run, capsys):
    found = answer(capsys, "sites", run)["sites"]
    assert [site["name"] for site in found] == [
        *("input_dropout", "layers.0.weight_hh_l0", "hidden_dropouts.0"),
        *("layers.1.weight_hh_l0", "output_dropout"),
    ]
    assert cli.main(["sites", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "per weight" in shown
    assert "shared over time" in shown


def test_diagnose_prints_json_and_writes_json_a_figure_and_a_page(run, capsys, tmp_path):
    files = [tmp_path / f"d.{suffix}" for suffix in ("json", "png", "html")]
    options = ["--seconds", 1, "--batches", 2, "--no-progress"]
    outputs = ["--save", files[0], "--plot", files[1], "--html", files[2]]
    found = answer(capsys, "diagnose", run, *options, *outputs)
    assert set(found["explicit"]["parts"]["r_drop"]) == {"value", "stderr", "low", "high"}
    assert found["explicit"]["batches"] >= 1
    assert {c["name"] for c in found["explicit"]["classes"]} >= {"<b>", "w1"}
    assert json.loads(files[0].read_text()) == found
    assert files[1].stat().st_size > 10_000
    assert "&lt;b&gt;" in files[2].read_text()
    assert cli.main(["diagnose", str(run), "--seconds", "0.5", "--batches", "1"]) == 0
    assert "What dropout does in AWDLSTM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--save", "."), ". can't be written: it is a folder; give the name of a file."),
        (("--html", ".."), ".. can't be written: it is a folder; give the name of a file."),
        (("--plot", "nodir/x.png"), "nodir/x.png can't be written: there is no folder nodir."),
        (("--plot", "x.xyz"), "x.xyz can't be drawn: .xyz is not a picture format; use .png, .pdf"),
        (("--plot", "x"), "x can't be drawn: it has no suffix; use .png, .pdf or .svg."),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    run, tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(undrop, "diagnose", None, raising=False)  # calling it would fail
    shown = error_message(capsys, "diagnose", run, *words)
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_figure_without_matplotlib_is_refused_before_the_work(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (("--plot", tmp_path / "x.png"), ("--html", tmp_path / "x.html")):
        message = "a figure needs matplotlib: pip install 'undrop[plot]'."
        assert message in error_message(capsys, "diagnose", run, *words)


def test_a_diagnosis_is_printed_before_it_is_written(run, tmp_path, monkeypatch, capsys):
    def full(path):
        raise RunError(f"the disk is full: {path}.")

    monkeypatch.setattr(Diagnosis, "save", lambda self, path: full(path))
    words = ["diagnose", run, "--seconds", 0.5, "--batches", 1, "--save", tmp_path / "d.json"]
    assert cli.main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert "What dropout does in AWDLSTM" in out
    assert "the disk is full" in err


def test_check_compares_the_analytic_terms_with_dropout(run, capsys):
    found = answer(capsys, "check", run, "--seconds", 0.5)
    assert found["objective"] == "Analytic"  # the run's own is dropout, which has none
    assert found["verdict"] in ("good", "rough", "poor", "unclear")
    explicit = answer(capsys, "check", run, "--objective", "explicit", "--seconds", 0.5)
    assert explicit["noise_ratio"] is None
    assert cli.main(["check", str(run), "--seconds", "0.5"]) == 0
    assert "R_drop by Monte Carlo" in capsys.readouterr().out


def test_bound_compares_runs_side_by_side(run, text, capsys, tmp_path):
    other = tmp_path / "none"
    words = ["train", "--model", "awd-lstm", "--data", text, "--objective", "none", "--out", other]
    assert cli.main([*map(str, words), *TINY]) == 0
    found = answer(capsys, "bound", run, other, "--batches", 4)
    assert list(found) == [str(run), str(other)]
    for result in found.values():
        assert result["examples"] == 96
        assert result["terms"].keys() == {"gradient", "hessian", "tail", "zeta"}
        assert result["gap"]["stderr"] > 0.0
    assert cli.main(["bound", str(run), str(other), "--batches", "4"]) == 0
    shown = capsys.readouterr().out
    assert "measured test - 1.01 · training" in shown
    assert "constants are universal and unknown" in shown


def test_bound_refuses_a_missing_run_before_it_evaluates_the_others(run, monkeypatch, capsys):
    monkeypatch.setattr(undrop, "bound", None, raising=False)  # calling it would fail
    assert "nowhere holds no run" in error_message(capsys, "bound", run, "nowhere")


OWN = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))

def batches():
    yield torch.ones(2, 3), torch.tensor([0, 1])

def absolute(output, target):
    return (output - target[:, None]).abs().pow(3).mean()

number = 3
"""


def test_commands_open_your_own_model_as_module_and_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    own = ["--model", "mine:net", "--data", "mine:batches"]
    assert [site["name"] for site in answer(capsys, "sites", *own)["sites"]] == ["1"]
    found = answer(capsys, "diagnose", *own, "--seconds", 1, "--no-implicit")
    assert found["implicit"] is None
    assert found["explicit"]["parts"]["half_quadratic"]["value"] > 0.0
    assert answer(capsys, "diagnose", *own, "--loss", "mine:absolute", "--seconds", 1)
    assert "must be a torch module or a function that returns one" in error_message(
        capsys, "sites", "--model", "mine:number", "--data", "mine:batches"
    )
    assert "mine has no 'nothing': give the name of something in it." in error_message(
        capsys, "sites", "--model", "mine:nothing", "--data", "mine:batches"
    )
    assert "give both as MODULE:NAME or path/to/file.py:NAME" in error_message(
        capsys, "sites", "--model", "mine:net", "--data", "ptb"
    )


def test_a_loss_can_be_a_class(tmp_path, monkeypatch, capsys):
    (tmp_path / "classes.py").write_text(
        OWN
        + "pairs = [(torch.ones(2, 3), torch.ones(2, 2))]\n"
        + "class Scaled(nn.MSELoss):\n    def __init__(self, scale):\n        super().__init__()\n"
        + "class Broken(nn.MSELoss):\n    def __init__(self):\n        raise ValueError('no loss')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--model", "classes:net", "--data", "classes:pairs", "--seconds", 0.2]
    for command in ("check", "diagnose"):
        assert answer(capsys, command, *own, "--loss", "torch.nn:BCEWithLogitsLoss")
        assert "for other targets choose a loss (loss=, in a shell --loss" in error_message(
            capsys, command, *own
        )
    assert "classes:Scaled is a class with the argument 'scale': give the path" in error_message(
        capsys, "check", *own, "--loss", "classes:Scaled"
    )
    assert "classes:Broken can't be called: ValueError: no loss" in error_message(
        capsys, "check", *own, "--loss", "classes:Broken"
    )


def test_commands_open_your_own_model_in_a_file(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "parts.py").write_text("from torch import nn\n\nlayer = nn.Dropout(0.25)\n")
    text = OWN.replace("nn.Dropout(0.5)", "layer").replace(
        "import torch\n", "import torch\nfrom parts import layer\n", 1
    )
    (folder / "my_net.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = ["--model", "code/my_net.py:net", "--data", str(folder / "my_net.py:batches")]
    assert [site["p"] for site in answer(capsys, "sites", *own)["sites"]] == [0.25]
    own[1] = "code/my_net.py:nett"
    assert "did you mean code/my_net.py:net?" in error_message(capsys, "sites", *own)
    own[1] = "code/my_nett.py:net"
    assert "there is no file code/my_nett.py; did you mean code/my_net.py?" in error_message(
        capsys, "sites", *own
    )
    monkeypatch.chdir(folder)
    own[1] = "my_nett:net"
    assert "No module named 'my_nett'; did you mean my_net?" in error_message(capsys, "sites", *own)
    monkeypatch.chdir(tmp_path)
    own[1] = "code/nothing.py:net"
    assert "code/nothing.py:net can't be imported: there is no file" in error_message(
        capsys, "sites", *own
    )


def test_the_error_for_a_misspelled_path_names_the_nearest_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before.json").write_text("{}")
    (tmp_path / "small").mkdir()
    compare = ["diagnose", "--compare", "befor.json", "before.json"]
    assert "no such file or directory. Did you mean before.json?" in error_message(capsys, *compare)
    assert "there is no folder smal: did you mean small?" in error_message(capsys, "report", "smal")


def test_the_error_for_a_misspelled_run_names_the_nearest_folder(run, capsys):
    wrong = run.parent / "runn"
    assert f"there is no run {wrong}: did you mean {run}?" in error_message(capsys, "sites", wrong)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def model(:\n", "can't be imported: SyntaxError: invalid syntax (broken.py, line 1)"),
        ("model = modle", "can't be imported: NameError: name 'modle' is not defined"),
        ("raise RuntimeError('no\\n  GPU.')", "can't be imported: RuntimeError: no GPU;"),
        ("import sys\nsys.exit(3)", "can't be imported: SystemExit: 3;"),
        ("import nothing_of_the_kind", "can't be imported: No module named 'nothing_of_the_kind'."),
        ("def model():\n    return 1 / 0", "can't be called: ZeroDivisionError: division by zero;"),
    ],
)
def test_an_exception_in_your_own_code_is_one_sentence(
    tmp_path, monkeypatch, capsys, code, message
):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine", "broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    shown = error_message(capsys, "sites", "--model", "broken:model", "--data", "mine:batches")
    assert f"broken:model {message}" in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("command", ["sites", "diagnose", "check"])
def test_a_model_that_cannot_run_on_your_data_is_one_sentence(
    tmp_path, monkeypatch, capsys, command
):
    (tmp_path / "misfit.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(20, 5), torch.nn.Dropout(0.5))\n"
        "def batches():\n"
        "    yield torch.randn(8, 7), torch.randint(5, (8,))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "misfit", raising=False)
    shown = error_message(capsys, command, "--model", "misfit:model", "--data", "misfit:batches")
    reason = (
        "(addmm: )?mat1 and mat2 shapes cannot be multiplied"  # from torch 2.15 on with its name
    )
    sentence = rf"misfit:model can't be called on the first batch: RuntimeError: {reason}"
    assert re.search(sentence, shown)
    assert "--debug shows where" in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model", "mine", "--data", "mine:batches"),
            "qrnn, transformer-xl, or give your own as MODULE:NAME or path/to/file.py:NAME.",
        ),
        (("--model", "gpt", "--data", "mine:batches"), "gpt is one of undrop's language models"),
        (
            ("mine:net",),
            "there is no run mine:net: give the folder of a run, or a model with --model",
        ),
        (("mine:net", "--data", "mine:batches"), "write --model mine:net, or leave out"),
    ],
)
def test_a_name_given_to_the_wrong_option_names_the_right_option(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    assert message in error_message(capsys, "sites", *words)


def test_sites_lists_the_dropouts_of_a_new_model_by_name(text, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path))
    found = answer(capsys, "sites", "--model", "awd-lstm", "--data", text)
    assert len(found["sites"]) == 7


def test_diagnose_and_check_have_the_defaults_of_their_functions():
    for command, function, names in (
        (diagnose_command.diagnose, undrop.diagnose, ("seconds", "weight_decay")),
        (check_command.check, undrop.check, ("seconds",)),
    ):
        ours, theirs = (inspect.signature(f).parameters for f in (command, function))
        for name in names:
            assert ours[name].default == theirs[name].default
    default = inspect.signature(undrop.diagnose).parameters["max_batches"].default
    assert inspect.signature(diagnose_command.diagnose).parameters["batches"].default == default


def test_diagnose_measures_benefit_and_compares_two_files(run, capsys, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        words = ["diagnose", run, "--seconds", 1, "--batches", 2, "--save", file]
        assert cli.main([*map(str, words)]) == 0
        assert f"written: {file}" in capsys.readouterr().err
    saved = json.loads(files[0].read_text())
    assert set(saved["benefit"]["sites"]) == {site["name"] for site in saved["sites"]}
    config = json.loads((run / "config.json").read_text())
    assert saved["benefit"]["learning_rate"] == config["optimizer"]["lr"]
    found = answer(capsys, "diagnose", "--compare", *files)
    assert found["before"] == found["after"] == "AWDLSTM"
    assert cli.main(["diagnose", "--compare", *map(str, files)]) == 0
    out = capsys.readouterr().out
    starred = any(line.endswith(" *") for line in out.splitlines())
    assert ("95 % interval of the change" in out) == starred
    assert "R_drop" in out
    assert "c.json can't be read" in error_message(
        capsys, "diagnose", "--compare", files[0], tmp_path / "c.json"
    )


def test_a_command_without_a_model_asks_for_one(run, capsys, tmp_path):
    assert "give a RUN, or --model and --data." in error_message(capsys, "diagnose")
    assert "give either a RUN or --model, not both." in error_message(
        capsys, "diagnose", run, "--model", "gpt"
    )
    assert "holds no run" in error_message(capsys, "diagnose", tmp_path)
    assert "seconds must be more than 0" in error_message(capsys, "diagnose", run, "--seconds", 0)


def test_a_run_is_a_table_in_a_notebook(run):
    from undrop.lab.train.runs import open_run

    shown = open_run(run)._repr_html_()
    assert "<table" in shown
    assert "objective" in shown
    assert "validation perplexity" in shown


def test_the_epochs_of_a_run_are_a_frame(run):
    pytest.importorskip("pandas")
    from undrop.lab.train.runs import describe_run, open_run

    opened = open_run(run)
    frame = opened.to_frame()
    assert frame["valid_ppl"].min() == describe_run(opened.folder)["best_valid_ppl"]
    assert frame["seconds"].is_monotonic_increasing
    assert "time" not in frame
