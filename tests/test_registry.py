import pytest

from undrop.errors import UnknownNameError
from undrop.registry import Registry


def test_a_registered_value_is_found_under_each_key():
    registry = Registry("shape")
    registry.register("circle", "disc")(1)
    assert dict(registry) == {"circle": 1, "disc": 1}


def test_registering_a_key_twice_is_an_error():
    registry = Registry("shape")
    registry.register("circle")(1)
    with pytest.raises(ValueError, match="'circle' is already registered as a shape"):
        registry.register("circle")(2)


def test_an_unknown_key_names_the_nearest_one():
    registry = Registry("shape")
    registry.register("circle")(1)
    with pytest.raises(UnknownNameError, match="unknown shape 'circel': did you mean 'circle'"):
        registry["circel"]


def test_an_empty_registry_says_that_there_is_nothing():
    with pytest.raises(UnknownNameError, match=r"unknown shape 'circle': there are none\.$"):
        Registry("shape")["circle"]
