"""The exact engine against full Jacobians and Hessians of nets written out by hand."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad

from brute_force import LOSSES, NETS, explicit
from engine_helpers import BOTH, EXPLICIT, evaluate, gradient, relative, seeded
from problems import problem
from undrop.engines import Exact
from undrop.losses import FORMS

MASKS = ("as-declared", "independent")


def check(name, loss, form, mask):
    p = problem(name, loss)
    w = {key: value.detach() for key, value in p.model.named_parameters()}
    how = {"loss": loss, "form": form, "mask": mask}

    def reference(w):
        return explicit(NETS[name], w, p.inputs, p.targets, **how)

    found = evaluate(Exact(), p, seeded(0, mask), EXPLICIT, form)
    expected = torch.cat([g.flatten() for g in grad(reference)(w).values()])
    assert found.total.item() == pytest.approx(reference(w).item(), rel=1e-9)
    assert relative(gradient(found.total, p.model), expected) < 1e-9


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NETS)
def test_the_exact_expectation_matches_brute_force_on_every_network(name, form, mask):
    check(name, "cross-entropy", form, mask)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_exact_expectation_matches_brute_force_for_every_loss_and_form(loss, form):
    check("lstm" if loss == "generic" else "mlp", loss, form, "as-declared")


@pytest.mark.parametrize("name", NETS)
def test_the_reference_network_computes_what_the_model_does(name):
    p = problem(name)
    w = {key: value.detach() for key, value in p.model.named_parameters()}
    net = NETS[name]
    output = evaluate(Exact(), p, seeded(0)).output
    output = output if isinstance(output, torch.Tensor) else output[0]
    torch.testing.assert_close(output, net.function(w, net.zeros("as-declared"), p.inputs))


@pytest.mark.parametrize("name", NETS)
def test_the_parts_of_the_exact_engine_add_up_and_the_implicit_part_is_zero(name):
    p = problem(name)
    found = evaluate(Exact(), p, seeded(0), BOTH)
    assert float(found.parts["implicit"]) == 0.0
    assert float(sum(found.parts.values())) == pytest.approx(found.total.item(), rel=1e-12)


def test_the_exact_explicit_part_of_an_empty_batch_is_zero():
    p = problem("mlp")
    p = replace(p, inputs=p.inputs[:0], targets=p.targets[:0])
    found = evaluate(Exact(), p, seeded(0), BOTH)
    assert float(found.parts["explicit"]) == 0.0
