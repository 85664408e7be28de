"""Sample text from a run's best weights."""

from __future__ import annotations

from typing import Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import DataDir, RunFolderArgument
from undrop.lab.cli._output import status_line


@COMMANDS.register("generate")
def generate(
    folder: RunFolderArgument,
    prompt: Annotated[str, typer.Option(help="Words to start with.")] = "",
    words: Annotated[int, typer.Option(min=0, help="The number of words to sample.")] = 100,
    temperature: Annotated[
        float,
        typer.Option(
            help="Below 1 favors likely words, above 1 gives more variety, and 0 always takes the "
            "most likely word."
        ),
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample only from the K most likely words.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the samples.")] = 1,
    data_dir: DataDir = None,
) -> Answer:
    """Sample words one by one and print them as text."""
    import torch

    from undrop.lab.corpora import EOS
    from undrop.lab.train.runs import open_run, sample

    run = open_run(folder, data_dir=data_dir)
    samples = sample(
        run.model,
        run.corpus.vocabulary,
        prompt=prompt,
        words=words,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )
    with status_line(f"sampling {words} words"):
        sampled = list(samples)
    text = " ".join([prompt, *("\n" if word == EOS else word for word in sampled)])
    result = {"prompt": prompt, "seed": seed, "words": sampled}
    return Answer(result, text.replace(" \n ", "\n").strip())
