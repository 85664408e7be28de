from functools import partial

import pytest

from tiny_run import tiny_config, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with three splits of a language in which each word depends on the one before."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(text, cache):
    """Makes the config of a run of about a second; pass settings as ``section={key: value}``."""

    return partial(tiny_config, text)
