"""Old versions of torch are refused; CPUs that have no LSTM in half precision run it in float32."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import undrop
from undrop import torch_compat
from undrop.errors import TorchVersionError


@pytest.mark.parametrize("version", ["1.13.1", "2.0.0+cu117", "2.7.1+cu126"])
def test_an_older_torch_is_refused_in_one_sentence(version):
    with pytest.raises(TorchVersionError) as caught:
        torch_compat.check_version(version)
    assert str(caught.value) == (
        f"undrop needs torch 2.8 or later, but torch {version} is installed: "
        "pip install --upgrade torch."
    )


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cu128", "2.15.0a0+git1234", "10.0"])
def test_the_oldest_supported_torch_and_later_ones_are_accepted(version):
    torch_compat.check_version(version)


def test_the_oldest_torch_is_the_one_that_the_package_asks_for():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, torch_compat.OLDEST))}"' in text


@pytest.mark.parametrize("name", ["Analytic", "diagnose", "sites"])
def test_every_entry_point_refuses_an_old_torch(name):
    program = f"import torch; torch.__version__ = '2.1.0'; from undrop import {name}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "undrop needs torch 2.8 or later, but torch 2.1.0 is installed" in run.stderr


HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(params=HALF, ids=str)
def unsupported_dtype(request, monkeypatch):
    """A CPU without an LSTM in half precision, under an autocast that requests one."""
    monkeypatch.setattr(torch_compat, "_has_kernel", lambda dtype: dtype is not request.param)
    with torch.autocast("cpu", request.param):
        yield request.param


def tagger():
    torch.manual_seed(0)
    return nn.LSTM(3, 4, num_layers=2, bidirectional=True, dropout=0.3)


def in_float32(model, x):
    with torch.autocast("cpu", enabled=False):
        return model(x)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_under_autocast_an_lstm_runs_in_float32(unsupported_dtype, packed):
    model, x = tagger().eval(), torch.randn(5, 2, 3)
    x = pack_sequence([x[:, 0], x[:3, 1]]) if packed else x
    with torch_compat.portable_lstm():
        out, state = model(x)
    expected, last = in_float32(model, x)
    assert type(out) is type(expected)
    torch.testing.assert_close((out, state), (expected, last), rtol=0, atol=0)


def test_an_lstm_in_float32_takes_half_precision_input(unsupported_dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4))
    with torch_compat.portable_lstm():
        out, _ = model(torch.randn(5, 2, 3))
    assert out.dtype is torch.float32


def test_an_lstm_is_only_intercepted_if_the_cpu_lacks_a_kernel(monkeypatch):
    monkeypatch.setattr(torch_compat, "_has_kernel", lambda dtype: True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not isinstance(torch_compat.portable_lstm(), torch_compat._PortableLSTM)
    monkeypatch.setattr(torch_compat, "_has_kernel", lambda dtype: False)
    assert not isinstance(torch_compat.portable_lstm(), torch_compat._PortableLSTM)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = tagger(), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


OBJECTIVES = {
    "dropout": undrop.Dropout,
    "drop": lambda: undrop.Dropout(k=2),
    "none": undrop.NoRegularization,
    **{
        engine: lambda engine=engine: undrop.Analytic(engine=engine)
        for engine in ("auto", "tangent", "reverse", "antithetic")
    },
}


@pytest.mark.portable
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_an_lstm_under_bfloat16_autocast(name):
    model, x, y = Tagger(), torch.randn(5, 2, 3), torch.randint(3, (5, 2))
    with torch.autocast("cpu", torch.bfloat16):
        step = OBJECTIVES[name]()(model, x, y)
    step.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


OLDER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
PROGRAM = """
import logging, sys, torch
from undrop.torch_compat import portable_lstm
logging.basicConfig(format="%(message)s", level="INFO", stream=sys.stdout)
model, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
with torch.autocast("cpu", torch.bfloat16):
    try:
        model(x)
        print("torch runs it")
    except RuntimeError:
        print("torch raises")
    for _ in range(2):
        with portable_lstm():
            print(model(x)[0].dtype)
"""


@pytest.mark.portable
def test_an_older_cpu_logs_once_that_lstms_run_in_float32():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | OLDER,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.split("\n")[:-1]
    if lines[0] == "torch runs it":
        pytest.skip("this machine can't be made to look like an older CPU")
    message = "undrop runs LSTM layers in float32: this CPU has no bfloat16 LSTM."
    assert lines == ["torch raises", message, "torch.float32", "torch.float32"]


def test_the_check_for_a_bfloat16_lstm_runs_once(monkeypatch, caplog):
    def refused(*_):
        raise RuntimeError("could not create a primitive descriptor")

    torch_compat._has_kernel.cache_clear()
    monkeypatch.setattr(torch, "lstm", refused)
    with caplog.at_level(logging.INFO, "undrop"):
        assert [torch_compat._has_kernel(torch.bfloat16) for _ in range(2)] == [False, False]
    torch_compat._has_kernel.cache_clear()
    assert len(caplog.messages) == 1
