import json

import pytest

from undrop.lab.cli import main


@pytest.fixture(autouse=True)
def _own_cache_and_a_wide_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(f"the words of {split}\nand the end\n")
    return folder


def run(capsys, *words):
    code = main(["data", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_data_list_shows_all_corpora_and_which_are_on_this_machine(capsys):
    code, out, _ = run(capsys, "list")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert list(rows) == ["name", "pydocs", "ptb", "wikitext-2", "wikitext-103"]
    assert " yes " in rows["pydocs"]
    assert " no " in rows["ptb"]
    assert "103,227,021  267,735" in rows["wikitext-103"]


def test_data_list_prints_json(capsys):
    rows = json.loads(run(capsys, "list", "--json")[1])
    assert [row["name"] for row in rows if row["here"]] == ["pydocs"]
    assert rows[1]["tokens"] == {"train": 929_589, "valid": 73_760, "test": 82_430}


def test_data_info_shows_tokens_words_and_files(capsys, folder):
    code, out, _ = run(capsys, "info", folder)
    title, _, train, valid, _ = out.splitlines()
    assert code == 0
    assert title.startswith("small: 8 words, encoded in ")
    assert train.split() == ["train", "9", "7", "0.00%", str(folder / "train.txt")]
    assert valid.split()[:4] == ["valid", "9", "7", "11.11%"]


def test_data_info_prints_json_with_every_option(capsys, folder):
    options = ("--limit-tokens", 8, "--max-vocab", 6, "--fraction", 0.5, "--check", "--json")
    code, out, _ = run(capsys, "info", folder, *options)
    facts = json.loads(out)
    assert code == 0
    assert (facts["vocabulary"], facts["limit_tokens"], facts["max_vocab"]) == (6, 8, 6)
    assert facts["splits"]["train"]["tokens"] == 4
    assert facts["splits"]["valid"]["tokens"] == 9
    assert facts["splits"]["valid"]["as_released"] is None


def test_data_info_recognizes_a_text_that_is_not_the_released_one(capsys, folder):
    facts = json.loads(run(capsys, "info", "ptb", "--data-dir", folder, "--json")[1])
    assert facts["splits"]["train"]["as_released"] is False


def test_data_get_encodes_corpora_and_prints_the_folder(capsys, folder, tmp_path):
    code, out, err = run(capsys, "get", folder, "pydocs", "--cache-dir", tmp_path / "other")
    assert code == 0
    assert err.splitlines() == [f"getting {folder}", "getting pydocs"]
    assert out.startswith(f"small: 9 training tokens, {tmp_path / 'other'}")


def test_data_info_check_finds_a_changed_file(capsys, folder):
    facts = json.loads(run(capsys, "info", folder, "--json")[1])
    with open(f"{facts['folder']}/test.bin", "r+b") as file:
        file.write(b"\7")
    code, _, err = run(capsys, "info", folder, "--check")
    assert code == 2
    assert err.startswith(f"error: test.bin in {facts['folder']} changed after being written")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("info", "ptbb"), "unknown corpus 'ptbb': did you mean 'ptb'? There are pydocs, ptb, wi"),
        (("get", "pydocs", "ptbb"), "unknown corpus 'ptbb': did you mean 'ptb'?"),
        (("info", "ptb"), "ptb is not on this machine: get it with undrop data get ptb"),
        (("info", "./nowhere"), "there is no folder nowhere"),
        (("info", "pydocs", "--fraction", "2"), "fraction must lie in (0, 1], got 2.0."),
        (("info", "pydocs", "--max-vocab", "2"), "max_vocab must be at least 3, got 2."),
        (
            ("info", "ptb", "--data-dir", "."),
            "has no train split: add a text file such as ptb.trai",
        ),
    ],
)
def test_bad_input_to_data_is_one_sentence(capsys, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "train.txt is empty"), (b"caf\xe9\n", "train.txt is not UTF-8 text: byte 3")],
)
def test_a_bad_text_file_is_one_sentence(capsys, folder, content, sentence):
    (folder / "train.txt").write_bytes(content)
    code, _, err = run(capsys, "get", folder)
    assert code == 2
    assert sentence in err.splitlines()[-1]
    assert len(err.splitlines()) == 2
