"""The table of op rules: which ops it has, which it leaves out, and how users add to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from streambp_fx.passes.rules import (
    Call,
    Spec,
    elementwise_spec,
    register_rule,
    registry,
    rule_for,
    ruled_targets,
)
from streambp_fx.passes.rules.arguments import is_functional_tensor_op
from streambp_fx.passes.rules.left_out import LEFT_OUT, why_left_out

aten = torch.ops.aten

# The ops that at least 20 of 193 causal language models of transformers have in their joint graph
# after Inductor's decompositions.
IN_MODELS = """
aten.add.Tensor aten.alias.default aten.amax.default aten.clone.default aten.div.Tensor
aten.exp.default aten.full.default aten.gather.default aten.log.default aten.mm.default
aten.mul.Tensor aten.ne.Scalar aten.neg.default aten.permute.default aten.scalar_tensor.default
aten.scatter.value aten.squeeze.dim aten.sub.Tensor aten.sum.default aten.sum.dim_IntList
aten.unsqueeze.default aten.view.default aten.where.self prims.convert_element_type.default
aten.ge.Scalar aten._unsafe_masked_index_put_accumulate.default aten.bitwise_and.Tensor
aten.embedding.default aten.lt.Scalar aten.rsqrt.default prims.iota.default aten.expand.default
aten.slice.Tensor aten.constant_pad_nd.default aten.mul.Scalar aten.cat.default
aten.cumsum.default aten.le.Tensor aten.index.Tensor aten.slice_scatter.default aten.eq.Tensor
aten.pow.Tensor_Scalar aten._scaled_dot_product_flash_attention_for_cpu.default
aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten.div.Scalar aten.mean.dim
aten.cos.default aten.sin.default aten.sigmoid.default aten.bmm.default aten.split.Tensor
prims.fma.default aten.gt.Scalar aten.var_mean.correction aten.index_put.default
aten.topk.default aten.div.Tensor_mode aten.empty.memory_format aten.addmm.default
aten.sort.default aten.histc.default aten.select.int aten.le.Scalar aten.gt.Tensor
aten.rand.default aten.erf.default aten.eq.Scalar aten.split_with_sizes.default
aten.logical_and.default aten.scatter_add.default aten.copy.default aten.select_scatter.default
aten.scatter.src aten.new_empty_strided.default aten.bitwise_not.default aten.convolution.default
aten.convolution_backward.default aten.log1p.default aten.tanh.default aten.logical_not.default
aten.any.dim aten.clamp_min.default prims.rev.default
""".split()


def overload(name: str) -> Any:
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


@pytest.mark.parametrize("name", IN_MODELS)
def test_every_op_of_models_is_ruled_or_left_out_with_a_reason(name: str) -> None:
    target = overload(name)
    ruled, reason = rule_for(target) is not None, why_left_out(target)
    assert ruled != (reason is not None), f"ruled: {ruled}, left out because: {reason}"


def test_nothing_ruled_is_also_left_out() -> None:
    both = {str(target) for target in ruled_targets() if why_left_out(target) is not None}
    # A single random integer is a seed, which has no chunks; more of them are left out.
    assert both <= {"aten.randint.low"}
    assert all(LEFT_OUT.values())


def test_ops_that_torch_tags_as_pointwise_have_the_pointwise_rule() -> None:
    tagged = 0
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, kind = rest.partition(".")
        if namespace != "aten":
            continue
        try:
            target = getattr(getattr(aten, name), kind or "default")
        except AttributeError:  # registered from C++ alone
            continue
        if torch.Tag.pointwise in target.tags and is_functional_tensor_op(target):
            random = torch.Tag.nondeterministic_seeded in target.tags
            assert rule_for(target) is (None if random else elementwise_spec), target
            tagged += 1
    assert tagged > 100


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    yield


@pytest.mark.usefixtures("own_table")
def test_a_later_registration_replaces_an_earlier_one() -> None:
    @register_rule(aten.neg.default, aten.histc.default)
    def nothing(call: Call) -> Spec | None:
        return None

    assert rule_for(aten.neg.default) is nothing
    assert rule_for(aten.histc.default) is nothing
    assert aten.histc.default in ruled_targets()


def test_an_op_without_a_rule_has_none() -> None:
    assert rule_for(aten.linalg_inv_ex.default) is None
    assert rule_for(len) is None
    assert rule_for("placeholder") is None


def test_registering_something_else_than_an_op_says_so() -> None:
    with pytest.raises(TypeError, match=r"op overloads such as .* got 'aten\.add'"):
        register_rule("aten.add")


def test_a_users_op_that_is_tagged_pointwise_needs_no_rule() -> None:
    with torch.library._scoped_library("streambp_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
        library.define("mystery(Tensor x) -> Tensor")
        assert rule_for(torch.ops.streambp_test.double.default) is elementwise_spec
        assert rule_for(torch.ops.streambp_test.mystery.default) is None
