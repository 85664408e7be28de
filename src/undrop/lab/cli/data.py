"""The corpora: list them, get them, look into them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli._output import print_json, print_table

if TYPE_CHECKING:
    from undrop.lab.corpora import Corpus

__all__ = ["register"]

data = typer.Typer(no_args_is_help=True, help=__doc__)

CacheDir = Annotated[
    Path | None, typer.Option(help="Where corpora are kept.", show_default="UNDROP_CACHE")
]
DataDir = Annotated[Path | None, typer.Option(help="Read from this folder, do not download.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    """Add ``undrop data``."""
    app.add_typer(data, name="data")


@data.command("list")
def list_corpora(cache_dir: CacheDir = None, json: Json = False) -> None:
    """List the corpora that go by a name; any folder of text files is one too."""
    from undrop.lab.corpora.catalogue import CATALOGUE
    from undrop.lab.corpora.corpus import is_here

    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "about": entry.about,
            "licence": entry.licence,
            "tokens": dict(entry.tokens) or None,
            "vocabulary": entry.vocabulary,
            "here": is_here(entry, cache_dir),
        }
        for entry in CATALOGUE.values()
    ]
    if json:
        print_json(rows)
        return
    print_table(
        ["name", "training tokens", "words", "here", "licence", "what it is"],
        [
            [
                row["name"],
                _number((row["tokens"] or {}).get("train")),
                _number(row["vocabulary"]),
                "yes" if row["here"] else "no",
                row["licence"],
                row["about"],
            ]
            for row in rows
        ],
        numbers={"training tokens", "words"},
    )


@data.command("get")
def get_corpora(
    names: Annotated[list[str], typer.Argument(help="Names, or folders of text files.")],
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Download corpora if they are not here, and encode them."""
    from undrop.lab.corpora import load
    from undrop.lab.corpora.corpus import find

    for name in names:
        find(name, data_dir)  # an unknown one is told before any other is downloaded
    for name in names:
        typer.echo(f"getting {name}", err=True)
        corpus = load(name, data_dir=data_dir, cache_dir=cache_dir)
        typer.echo(f"{corpus.name}: {_number(len(corpus.train))} training tokens, {corpus.folder}")


@data.command("info")
def describe_corpus(
    name: Annotated[str, typer.Argument(help="A name, or a folder of text files.")],
    data_dir: DataDir = None,
    limit_tokens: Annotated[
        int | None, typer.Option(help="Only so many training tokens, and their words.")
    ] = None,
    fraction: Annotated[
        float, typer.Option(help="Only this part of the training tokens, but all words.")
    ] = 1.0,
    max_vocab: Annotated[int | None, typer.Option(help="The most words there may be.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the encoded files with their checksums.")
    ] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Show a corpus's tokens, words and files."""
    from undrop.lab.corpora import UNK, load

    corpus = load(
        name,
        data_dir=data_dir,
        limit_tokens=limit_tokens,
        fraction=fraction,
        max_vocab=max_vocab,
        cache_dir=cache_dir,
        download=False,
    )
    if check:
        _check(corpus)
    facts = _facts(corpus)
    if json:
        print_json(facts)
        return
    released = {True: "yes", False: "no", None: ""}
    print_table(
        ["split", "tokens", "words", UNK, "as released", "text"],
        [
            [
                split,
                _number(info["tokens"]),
                _number(info["words"]),
                f"{info['unknown']:.2%}",
                released[info["as_released"]],
                info["source"],
            ]
            for split, info in facts["splits"].items()
        ],
        title=f"{corpus.name}: {corpus.vocabulary.size:,} words, encoded in {corpus.folder}",
        numbers={"tokens", "words", UNK},
    )


def _check(corpus: Corpus) -> None:
    from undrop.errors import DataError
    from undrop.lab.corpora.encode import damaged

    if bad := damaged(corpus.folder):
        raise DataError(
            f"{', '.join(bad)} in {corpus.folder} changed after being written: delete that folder, "
            "and the corpus is encoded anew."
        )


def _facts(corpus: Corpus) -> dict[str, Any]:
    import numpy as np

    from undrop.lab.corpora import CATALOGUE, UNK

    released = CATALOGUE[corpus.name].sha256 if corpus.name in CATALOGUE else {}
    unknown = corpus.vocabulary.words.index(UNK) if UNK in corpus.vocabulary else None
    splits = {}
    for split, tokens in corpus.splits.items():
        counts = np.bincount(tokens, minlength=corpus.vocabulary.size)
        info = corpus.header.splits[split]
        splits[split] = {
            **asdict(info),
            "tokens": len(tokens),
            "words": int(np.count_nonzero(counts)),
            "unknown": 0.0 if unknown is None else float(counts[unknown] / len(tokens)),
            "as_released": released[split] == info.source_sha256 if split in released else None,
        }
    header = {key: value for key, value in asdict(corpus.header).items() if key != "splits"}
    return {**header, "folder": str(corpus.folder), "splits": splits}


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
