from functools import partial

import pytest

from tiny_run import tiny_config, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with three splits of a language in which each word depends on the previous one."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(text, cache):
    """A function of ``section={key: value}`` that returns the config of a run of about a second."""
    return partial(tiny_config, text)
