"""Records of runs that never happened, and an executor without processes."""

from concurrent.futures import Future
from contextlib import nullcontext

from undrop.errors import UndropError
from undrop.lab.reproduce.campaign import Executor
from undrop.lab.reproduce.records import Curve, Record
from undrop.lab.reproduce.worker import execute_run


def fake_record(run, valid, *, seconds=1.0, probed=None):
    """Return a record of a run with a given validation curve and time per epoch."""
    epochs = range(1, len(valid) + 1)
    return Record(
        config=run.config.as_dict(),
        probe=run.probe,
        key=run.key,
        seed=run.config.train.seed,
        best_valid_ppl=min(valid),
        best_epoch=valid.index(min(valid)) + 1,
        test_ppl=min(valid),
        ended="epochs",
        steps=10 * len(valid),
        seconds=seconds * len(valid),
        parameters=100,
        curve=Curve(
            epoch=list(epochs),
            step=[10 * epoch for epoch in epochs],
            valid_ppl=valid,
            train_ppl=[0.9 * ppl for ppl in valid],
            seconds=[seconds * epoch for epoch in epochs],
            evaluation=[0.25 * seconds for _ in epochs],
        ),
        probed=probed or {},
        versions={"undrop": "0"},
        machine={"platform": "here", "device": "cpu"},
        commit="0123456789abcdef+",
        finished="2026-01-01T00:00:00+00:00",
    )


class InProcess(Executor):
    """Does the runs one after the other in this process, which is faster than starting workers."""

    def workers(self):
        return nullcontext()

    def start(self, run, folder):
        ended = Future()
        try:
            ended.set_result(execute_run(run, folder))
        except UndropError as error:
            ended.set_exception(error)
        return ended
