"""Loop bodies lowered for GPUs that are not there: kernels, extern calls, sizes of buffers.

Lengths are primes that divide no other size, so that a dim of a whole sequence can be told from
all others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from streambp_fx import last_report
from streambp_fx._torch import torch_triton
from streambp_fx.gpu import (
    TARGETS,
    Buffer,
    LoweredBody,
    TritonMissingError,
    compile_to_ptx,
    find_target,
    lower_for_gpu,
    write_lowered,
)
from streambp_fx.gpu.device import pretended_gpu
from streambp_fx.gpu.wrapper_code import Tensors, read_wrapper
from streambp_fx.options import OptionError
from tests.models import build, loss_of
from tests.own_models import NanoGPT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")

SMALL = {"layers": 4, "length": 389, "chunk_size": 16}
WIDTH, KEYS_WIDTH, MLP, VOCAB, HEADS = 64, 32, 192, 512, 4


class Shape:
    """The widths that the memory model of a decoder layer is in terms of."""

    def __init__(self, width: int, keys: int, mlp: int, vocabulary: int, heads: int) -> None:
        self.width, self.keys, self.mlp = width, keys, mlp
        self.vocabulary, self.heads = vocabulary, heads

    def forward(self) -> int:
        """bf16 values a token of a layer's forward: the MLP, beside what enters it."""
        return 2 * self.mlp + 2 * self.width

    def backward(self) -> int:
        """The same of its backward: gate, up, their product, and the gradients of all three; the
        normed inputs, query, attention's output and its projection, and the MLP's input."""
        return 6 * self.mlp + 6 * self.width + 2 * self.keys

    def statistics(self) -> int:
        """Bytes a token of fp32 norms' statistics and attention's logsumexp."""
        return 4 * (4 + 4 * self.heads)


def llama(shape: Shape, layers: int, device: str = "cpu") -> nn.Module:
    """A bf16 Llama with grouped-query heads and a head of its own."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads * shape.keys // shape.width,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.train()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(model(input_ids=ids, labels=ids))


def ids_of(length: int, batch: int = 1) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


SMALL_SHAPE = Shape(WIDTH, KEYS_WIDTH, MLP, VOCAB, HEADS)


@pytest.fixture(scope="module")
def small_and_loops() -> tuple[list[LoweredBody], list[str]]:
    """The bodies of the small model, and the loops that the backend reports of it."""
    bodies = lower_for_gpu(
        loss,
        llama(SMALL_SHAPE, SMALL["layers"]),
        ids_of(SMALL["length"]),
        target="h100",
        options={"chunk_size": SMALL["chunk_size"], "on_barrier": "error"},
    )
    report = last_report()
    assert report is not None
    return bodies, [spec.name for spec in report.loops]


@pytest.fixture(scope="module")
def small(small_and_loops: tuple[list[LoweredBody], list[str]]) -> list[LoweredBody]:
    return small_and_loops[0]


def body_with(bodies: Sequence[LoweredBody], *externs: str) -> LoweredBody:
    """The one body that calls all of the ops ``externs`` of this project."""
    wanted = {f"torch.ops.streambp.{name}.default" for name in externs}
    (body,) = [body for body in bodies if wanted <= set(body.externs)]
    return body


def layer_forward(bodies: Sequence[LoweredBody]) -> LoweredBody:
    return body_with(bodies, "write_chunk_", "attention_chunk")


def layer_backward(bodies: Sequence[LoweredBody]) -> LoweredBody:
    return body_with(bodies, "attention_chunk_backward")


def head(bodies: Sequence[LoweredBody]) -> LoweredBody:
    """The body of the loop that holds the logits."""
    return max(bodies, key=lambda body: body.peak_bytes(size0=1))


def in_terms_of_sequence(
    tensors: Sequence[Buffer], body: LoweredBody, length: int, **sizes: int
) -> list[Buffer]:
    """Those of ``tensors`` with a dim that is a multiple of the sequence's length."""
    at = {**body.sizes, **sizes}
    return [
        tensor for tensor in tensors if any(dim and dim % length == 0 for dim in tensor.dims(at))
    ]


def given_to_kernels(body: LoweredBody) -> list[Buffer]:
    return [tensor for launch in body.launches for tensor in launch.tensors]


def check_sizes(bodies: Sequence[LoweredBody], length: int, *, masked: bool = False) -> None:
    """No buffer, and nothing that a generated kernel touches, is as long as the sequence.

    Of a mask that is data (``masked``), the rows of a chunk exist, with all keys.
    """
    for body in bodies:
        for tensor in in_terms_of_sequence((*body.buffers, *given_to_kernels(body)), body, length):
            assert masked and tensor.dtype is torch.bool, (body.name, tensor)
            assert body.sizes["size0"] in tensor.dims(body.sizes), (body.name, tensor)


def check_memory(bodies: Sequence[LoweredBody], shape: Shape) -> None:
    """The chunk's and the head's terms of the memory model hold, a token, and grow linearly."""
    for chunk in (32, 64, 512):
        forward = layer_forward(bodies).peak_bytes(size0=chunk)
        backward = layer_backward(bodies).peak_bytes(size0=chunk)
        assert forward <= chunk * (2 * shape.forward() + shape.statistics())
        assert forward >= chunk * 2 * 2 * shape.mlp, "the MLP is alive"
        assert backward <= chunk * (2 * shape.backward() + shape.statistics())
        assert backward >= chunk * 2 * 3 * shape.mlp, "the MLP is alive"
        logits = head(bodies).peak_bytes(size0=chunk)
        # Logits in bf16, their gradient, and one copy in fp32.
        assert logits <= chunk * (8 * shape.vocabulary + 8 * shape.width + 4 * 64)
        assert logits >= chunk * 2 * shape.vocabulary, "the logits are alive"


def compile_all(bodies: Sequence[LoweredBody], target: str) -> None:
    gpu = find_target(target)
    for body in bodies:
        for name, source in body.kernels.items():
            ptx = compile_to_ptx(name, source, gpu)
            assert f".target sm_{gpu.capability}" in ptx
            assert f".visible .entry {name}" in ptx


def test_each_loop_has_a_lowered_body(
    small_and_loops: tuple[list[LoweredBody], list[str]],
) -> None:
    bodies, loops = small_and_loops
    assert sorted(name for body in bodies for name in body.loops) == sorted(loops)
    for body in bodies:
        assert body.kernels and {launch.kernel for launch in body.launches} == set(body.kernels)


def test_layers_share_their_bodies(small: list[LoweredBody]) -> None:
    assert len(layer_forward(small).loops) == SMALL["layers"]
    assert len(layer_backward(small).loops) == SMALL["layers"]


def test_externs_are_products_and_ops_of_this_project(small: list[LoweredBody]) -> None:
    allowed = ("extern_kernels.mm", "extern_kernels.addmm", "torch.ops.streambp.")
    for body in small:
        assert all(name.startswith(allowed) for name in body.externs), body.externs
    assert layer_forward(small).externs.count("torch.ops.streambp.attention_chunk.default") == 1
    # Query, key, value, output, gate, up, down.
    assert layer_forward(small).externs.count("extern_kernels.mm") == 7


def test_nothing_but_keys_and_values_is_as_long_as_the_sequence(small: list[LoweredBody]) -> None:
    check_sizes(small, SMALL["length"])
    whole = in_terms_of_sequence(
        layer_forward(small).operands, layer_forward(small), SMALL["length"]
    )
    heads = HEADS * KEYS_WIDTH // WIDTH
    keys = (1, heads, SMALL["length"], WIDTH // HEADS)
    assert [tensor.dims({}) for tensor in whole] == [keys, keys]


def test_a_chunk_as_long_as_the_sequence_would_be_seen(small: list[LoweredBody]) -> None:
    body, length = layer_forward(small), SMALL["length"]
    assert in_terms_of_sequence(body.buffers, body, length, size0=length)
    assert in_terms_of_sequence(given_to_kernels(body), body, length, size0=length)


def test_buffers_of_bodies_follow_the_memory_model(small: list[LoweredBody]) -> None:
    check_memory(small, SMALL_SHAPE)


def test_kernels_compile_for_h100(small: list[LoweredBody]) -> None:
    compile_all(small, "h100")


def test_bodies_of_a_batch_with_biases_compile_for_a100() -> None:
    model, ids = NanoGPT(layers=1).bfloat16(), ids_of(389, batch=2)
    bodies = lower_for_gpu(model, ids, ids, target="A100", options={"chunk_size": 8})
    check_sizes(bodies, 389)
    assert {body.target for body in bodies} == {TARGETS["a100"]}
    assert "cc=80" in "".join(layer_forward(bodies).kernels.values())
    compile_all([layer_backward(bodies)], "a100")


def test_no_weight_is_needed(small: list[LoweredBody]) -> None:
    on_meta = lower_for_gpu(
        loss,
        llama(SMALL_SHAPE, 2, device="meta"),
        ids_of(SMALL["length"]).to("meta"),
        options={"chunk_size": SMALL["chunk_size"]},
    )
    for part in (layer_forward, layer_backward, head):
        assert sorted(part(on_meta).externs) == sorted(part(small).externs)
        assert part(on_meta).kernels.keys() == part(small).kernels.keys()


def test_the_program_and_the_process_are_left_as_they_were(small: list[LoweredBody]) -> None:
    from triton.runtime import driver

    model = NanoGPT(layers=1).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    active = driver._active
    lower_for_gpu(model, ids_of(37), ids_of(37), options={"chunk_size": 8})
    assert driver._active is active
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert not torch_triton.has_triton()
    for name, value in model.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, before[name])
    x = torch.randn(5, 7)
    compiled = torch.compile(lambda x: x.sin().sum(-1) * 2)
    torch.testing.assert_close(compiled(x), x.sin().sum(-1) * 2)


def test_a_fault_leaves_no_gpu_behind() -> None:
    with pytest.raises(ZeroDivisionError), pretended_gpu(TARGETS["h200"]):
        assert torch.cuda.is_available() and torch_triton.has_triton()
        assert torch.cuda.get_device_capability() == (9, 0)
        raise ZeroDivisionError
    assert not torch.cuda.is_available() and not torch_triton.has_triton()
    assert torch.Tensor.copy_ is torch._C.TensorBase.copy_


def test_graphs_after_a_break_are_lowered() -> None:
    def broken(model: NanoGPT, ids: Tensor) -> Tensor:
        x = model.features(ids)
        torch._dynamo.graph_break()
        return model.head(x).float().logsumexp(-1).mean()

    bodies = lower_for_gpu(
        broken, NanoGPT(layers=1).bfloat16(), ids_of(37), options={"chunk_size": 8}
    )
    loops = [name for body in bodies for name in body.loops]
    assert any(name.startswith("graph1.") for name in loops)
    assert any(not name.startswith("graph1.") for name in loops)


@pytest.mark.parametrize("name", ["qwen3", "gpt2_dropout", "trilgpt"])
@pytest.mark.slow
def test_other_models_lower_and_compile(name: str) -> None:
    bodies = lower_for_gpu(
        loss, build(name).bfloat16(), ids_of(389, batch=2), options={"chunk_size": 16}
    )
    check_sizes(bodies, 389, masked=name == "trilgpt")
    compile_all(bodies, "h200")


@pytest.mark.slow
def test_a_model_of_8b_parameters_lowers_and_compiles() -> None:
    shape, length = Shape(4096, 1024, 14336, 128256, 32), 32749
    bodies = lower_for_gpu(loss, llama(shape, 2, device="meta"), ids_of(length))
    check_sizes(bodies, length)
    check_memory(bodies, shape)
    compile_all(bodies, "h200")


def test_files_are_written(small: list[LoweredBody], tmp_path: Path) -> None:
    paths = write_lowered(small, tmp_path / "new" / "folder")
    assert len(paths) == sum(2 + len(body.kernels) for body in small)
    for body in small:
        folder = tmp_path / "new" / "folder"
        assert (folder / f"{body.name}.py").read_text() == body.wrapper
        assert (folder / f"{body.name}.externs.txt").read_text().splitlines() == list(body.externs)
        for name, source in body.kernels.items():
            assert (folder / f"{body.name}.{name}.py").read_text() == source


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_triton(name: str) -> Any:
        return None if name == "triton" else find_spec(name)

    monkeypatch.setattr("streambp_fx.gpu.targets.find_spec", without_triton)
    with pytest.raises(TritonMissingError, match="pip install triton"):
        lower_for_gpu(NanoGPT(), ids_of(8), ids_of(8))


def test_wrong_targets_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'v100'; there are a100, h100, h200"):
        lower_for_gpu(NanoGPT(), ids_of(8), ids_of(8), target="v100")
    with pytest.raises(OptionError, match="max_autotune chooses kernels by their time"):
        lower_for_gpu(NanoGPT(), ids_of(8), ids_of(8), options={"max_autotune": True})


WRAPPER = """
def call(args):
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((4, ), (1, ), torch.float32)
        kernel.run(arg0, buf0, 4, stream=s)
        buf1 = torch.ops.streambp.attention_chunk.default(reinterpret_tensor(buf0, (2, 2), (2, 1)))
        buf2 = buf1[0]
        del buf1
        buf4 = reinterpret_tensor(buf0, (4, ), (1, ), 0); del buf0  # reuse
        del buf2
        extern_kernels.mm(arg0, buf4, out=buf4)
        del buf4
"""


def test_wrapper_code_is_read() -> None:
    buffers = {
        name: Buffer(name, (), torch.float32) for name in ("arg0", "buf0", "buf2", "buf3", "buf4")
    }
    operand = buffers.pop("arg0")
    tensors = Tensors(
        buffers, {"arg0": operand}, {"buf1": {0: buffers["buf2"], 1: buffers["buf3"]}}
    )
    wrapper = read_wrapper(WRAPPER, tensors)
    assert wrapper.externs == ("torch.ops.streambp.attention_chunk.default", "extern_kernels.mm")
    (launch,) = wrapper.launches
    assert (launch.kernel, launch.tensors) == ("kernel", (operand, buffers["buf0"]))
    assert [buffer.name for buffer in wrapper.buffers] == ["buf0", "buf2", "buf3"]
    assert [sorted(names) for names in wrapper.alive] == [
        [],
        ["buf0"],
        ["buf0", "buf2", "buf3"],
        ["buf0", "buf2"],
        ["buf0"],
        [],
    ]
    with pytest.raises(ValueError, match="no function 'call'"):
        read_wrapper("x = 1", tensors)
