"""Sample text from a run's best weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.lab.cli._output import print_json, working

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop generate``."""
    app.command("generate", help=__doc__)(generate)


def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    prompt: Annotated[str, typer.Option(help="Words to begin with.")] = "",
    words: Annotated[int, typer.Option(min=0, help="How many to draw.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Below 1 is safer, above 1 wilder; 0 takes the likeliest.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw from the so many likeliest words only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 1,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where its corpus is, if not where it was.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with the single words.")] = False,
) -> None:
    """Sample words one by one, each line of text on its own."""
    import torch

    from undrop.lab.corpora import EOS
    from undrop.lab.train.runs import open_run
    from undrop.lab.train.sampling import sample

    opened = open_run(run, data_dir=data_dir)
    with working(f"drawing {words} words"):
        drawn = list(
            sample(
                opened.model,
                opened.corpus.vocabulary,
                prompt=prompt,
                words=words,
                temperature=temperature,
                top_k=top_k,
                generator=torch.Generator().manual_seed(seed),
            )
        )
    if json:
        print_json({"prompt": prompt, "seed": seed, "words": drawn})
        return
    text = " ".join([prompt, *("\n" if word == EOS else word for word in drawn)])
    typer.echo(text.replace(" \n ", "\n").strip())
