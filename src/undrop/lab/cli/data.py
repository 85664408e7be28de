"""List corpora, download them, and show what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._names import check_corpus, completion, corpora
from undrop.lab.cli._options import DataDir
from undrop.report import Table

if TYPE_CHECKING:
    from undrop.lab.corpora import Corpus

CacheDir = Annotated[
    Path | None,
    typer.Option(
        help="The folder for downloaded and encoded corpora.",
        show_default="$UNDROP_CACHE, or the user's cache",
    ),
]
_COMPLETION = completion(corpora)


@COMMANDS.register("data list")
def list_corpora(cache_dir: CacheDir = None) -> Answer:
    """List the named corpora."""
    from undrop.lab.corpora.catalogue import CATALOGUE
    from undrop.lab.corpora.corpus import is_local

    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "about": CATALOGUE.about[entry.name],
            "license": entry.license,
            "tokens": dict(entry.tokens) or None,
            "vocabulary": entry.vocabulary,
            "here": is_local(entry, cache_dir),
        }
        for entry in CATALOGUE.values()
    ]
    cells = [
        [
            row["name"],
            _format_count((row["tokens"] or {}).get("train")),
            _format_count(row["vocabulary"]),
            "yes" if row["here"] else "no",
            row["license"],
            row["about"],
        ]
        for row in rows
    ]
    headings = ("name", "training tokens", "words", "local", "license", "what it is")
    return Answer(rows, Table(headings, cells, numbers=headings[1:3]))


@COMMANDS.register("data get")
def get_corpora(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="Names, or folders of text files.", autocompletion=_COMPLETION
        ),
    ],
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Encode corpora, and download those that are not on this machine."""
    for name in names:
        check_corpus(name, data_dir)  # refuses a wrong name before anything is downloaded
    from undrop.lab.corpora import load

    for name in names:
        typer.echo(f"getting {name}", err=True)
        corpus = load(name, data_dir=data_dir, cache_dir=cache_dir)
        typer.echo(f"{corpus.name}: {len(corpus.train):,} training tokens, {corpus.folder}")


@COMMANDS.register("data info")
def describe_corpus(
    name: Annotated[
        str, typer.Argument(help="A name, or a folder of text files.", autocompletion=_COMPLETION)
    ],
    data_dir: DataDir = None,
    limit_tokens: Annotated[
        int | None, typer.Option(help="Use only this many training tokens, and their vocabulary.")
    ] = None,
    fraction: Annotated[
        float,
        typer.Option(
            help="Use this share of the training tokens, with the vocabulary of all of them."
        ),
    ] = 1.0,
    max_vocab: Annotated[
        int | None, typer.Option(help="The maximum size of the vocabulary.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the encoded files with their checksums.")
    ] = False,
    cache_dir: CacheDir = None,
) -> Answer:
    """Show the tokens, words and files of a corpus."""
    check_corpus(name, data_dir)
    from undrop.errors import DataError
    from undrop.lab.corpora import load
    from undrop.lab.corpora.corpus import damaged_files

    corpus = load(
        name,
        data_dir=data_dir,
        limit_tokens=limit_tokens,
        fraction=fraction,
        max_vocab=max_vocab,
        cache_dir=cache_dir,
        download=False,
    )
    if check and (damaged := damaged_files(corpus.folder)):
        raise DataError(
            f"{', '.join(damaged)} in {corpus.folder} changed after being written: delete that folder "
            "to encode the corpus again."
        )
    facts = _facts(corpus)
    return Answer(facts, _table(corpus, facts))


def _table(corpus: Corpus, facts: dict[str, Any]) -> Table:
    from undrop.lab.corpora import UNK

    words = {True: "yes", False: "no", None: ""}
    rows = [
        [
            split,
            _format_count(info["tokens"]),
            _format_count(info["words"]),
            f"{info['unknown']:.2%}",
            words[info["as_released"]],
            info["source"],
        ]
        for split, info in facts["splits"].items()
    ]
    headings = ("split", "tokens", "words", UNK, "as released", "text")
    title = f"{corpus.name}: {corpus.vocabulary.size:,} words, encoded in {corpus.folder}"
    return Table(headings, rows, numbers=headings[1:4], title=title)


def _facts(corpus: Corpus) -> dict[str, Any]:
    import numpy as np

    from undrop.lab.corpora import CATALOGUE, UNK

    sha256 = CATALOGUE[corpus.name].sha256 if corpus.name in CATALOGUE else {}
    unknown = corpus.vocabulary.words.index(UNK) if UNK in corpus.vocabulary else None
    facts = {**corpus.header.model_dump(), "folder": corpus.folder}
    for split, tokens in corpus.splits.items():
        counts = np.bincount(tokens, minlength=corpus.vocabulary.size)
        source = corpus.header.splits[split].source_sha256
        facts["splits"][split] |= {
            "tokens": len(tokens),
            "words": int(np.count_nonzero(counts)),
            "unknown": 0.0 if unknown is None else float(counts[unknown] / len(tokens)),
            "as_released": sha256[split] == source if split in sha256 else None,
        }
    return facts


def _format_count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
