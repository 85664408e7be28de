"""Bad bytes, the quick part; ``make faults`` has as many cases as one wants."""

import pytest

from faults.fuzz import campaigns, fuzz

KINDS = (
    *("checkpoint", "signed checkpoint", "checkpoint tensors", "weights", "config", "metrics"),
    *("summary", "record", "corpus header", "vocabulary", "corpus tokens", "text"),
    *("presets and --set", "command line"),
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fuzz")
        patch.setenv("UNDROP_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield campaigns(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_only_our_own_errors_come_out_of_bad_bytes(kinds, kind):
    check, strategies = kinds[kind]
    fuzz(check, strategies, cases=30, seed=1)
