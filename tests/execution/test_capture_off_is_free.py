"""Capture off is the build without the feature; capture on is that build with one output more.

"Without the feature" means here: the decoder, the programs and the runner's table are read as source, every name of the
feature is cut out of the syntax tree (the argument, the scan's carry, the branch, the output, the imports), and what is
left is run as modules of its own. That source holds no name of the feature, so a trace of capture that the real build
leaves in its lowered StableHLO cannot be in both texts. The same test fails on a build that does leave a trace. What
the TPU compiler makes of both: test_tpu_programs.py."""

import ast
import collections
import dataclasses
import functools
import inspect
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from routed_experts.engine.build.backends import ATTENTION, KERNELS
from routed_experts.execution import aot_programs, programs, sampler
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder import (
    decoder,
    family_config,
    feed_forward,
    fused_layers,
    fused_path,
    layer_counts,
    layer_parts,
    sparse_block,
)
from routed_experts.models.families import common_config, qwen3_moe
from support.small_runner import DECODE, EXTEND, NUM_PAGES, NUM_SLOTS, PAGE_SIZE

LAYER_NAMES = frozenset({"capture", "moe_layer"})
# The modules of the decoder that know the feature, and those that must import these; each after what it imports.
MODEL_NAMES = {
    layer_parts: frozenset({"moe_layer"}),
    sparse_block: frozenset({"capture", "moe_layer", "recorded"}),
    feed_forward: LAYER_NAMES,
    family_config: frozenset(),
    layer_counts: frozenset(),
    fused_layers: frozenset({"capture", "recorded"}),
    fused_path: frozenset({"capture", "recorded"}),
    decoder: LAYER_NAMES,
    common_config: frozenset(),
    qwen3_moe: frozenset(),
}
PROGRAM_NAMES = frozenset({"capture", "rows", "counts", "rerouting"})
DEVICE_CACHE = "RoutedExpertsDeviceCache"
SIZES = dict(
    vocab_size=313,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=16,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    mlp_only_layers=[0, 3],
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=32,
)  # dense, MoE, dense, MoE: four runs, so columns and layers differ


class WithoutNames(ast.NodeTransformer):
    """Cuts variables out of a module: as parameters, arguments, fields, parts of tuples, assignments, and the branches
    on them."""

    def __init__(self, names):
        self._names = names

    def _is_cut(self, node):
        nodes = list(ast.walk(node))
        typed = any(isinstance(part, ast.Name) and part.id == DEVICE_CACHE for part in nodes)
        return typed or (isinstance(node, ast.Name) and node.id in self._names)

    def visit_ImportFrom(self, node):
        return None if node.module.startswith("routed_experts.capture") else node

    def visit_arguments(self, node):
        node.args = [argument for argument in node.args if argument.arg not in self._names]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        return None if self._is_cut(node.target) else self.generic_visit(node)

    def visit_Assign(self, node):
        return None if all(map(self._is_cut, node.targets)) else self.generic_visit(node)

    def visit_If(self, node):
        on_feature = any(isinstance(part, ast.Name) and part.id in self._names for part in ast.walk(node.test))
        return [self.visit(part) for part in node.orelse] if on_feature else self.generic_visit(node)

    def visit_Tuple(self, node):
        node.elts = [part for part in node.elts if not self._is_cut(part)]
        return self.generic_visit(node)

    def visit_Call(self, node):
        node.args = [argument for argument in node.args if not self._is_cut(argument)]
        return self.generic_visit(node)


def names_in(text):
    """Every identifier of a module: variables, attributes, parameters, imports; docstrings and comments are none."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
                | ast.alias(name=name)
                | ast.ImportFrom(module=name)
            ):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def without(module, names):
    return ast.unparse(WithoutNames(names).visit(ast.parse(inspect.getsource(module))))


def make_module(name, text):
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(text, name, "exec"), vars(module))
    return module


def without_capture(router):
    """A fused router that takes no block of ids and gives none."""

    def run(logits, routed, spec):
        routing, block = router.run(logits, routed, None, None, spec)
        assert block is None
        return (routing,)

    return run


def stack_without_capture(whole):
    """A run of layers that takes no block of ids and gives none."""

    def run(x, arrays, step, attend, cache, routed, offsets, spec):
        x, normed, cache, block = whole.run(x, arrays, step, attend, cache, None, routed, offsets, spec)
        assert block is None
        return x, normed, cache

    return run


@dataclasses.dataclass(frozen=True)
class Build:
    """A package of its own: its family, its decoder, its programs, its table."""

    family: types.ModuleType
    decoder: types.ModuleType
    programs: types.ModuleType
    runner: types.ModuleType
    has_feature: bool

    def spec(self, *, capture=False, weights_dtype=None, moe="tiled", attention="paged", **sizes):
        """The program spec and the weights' shapes of a small model with a dense layer among MoE layers."""
        config = self.family.read_qwen3_moe(ConfigReader(SIZES | sizes, "SIZES"))
        graphdef, state = nnx.split(
            nnx.eval_shape(lambda: self.decoder.FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        )
        recorded = dataclasses.replace(config.capture_spec, weights_dtype=weights_dtype) if capture else None
        feature = {"capture": recorded} if self.has_feature else {}
        kernels = KERNELS[moe].load()
        if not self.has_feature and kernels.router is not None:
            kernels = dataclasses.replace(
                kernels, router=dataclasses.replace(kernels.router, run=without_capture(kernels.router))
            )
        if not self.has_feature and kernels.layer_stack is not None:
            kernels = dataclasses.replace(
                kernels,
                layer_stack=dataclasses.replace(kernels.layer_stack, run=stack_without_capture(kernels.layer_stack)),
            )
        backends = {"kernels": kernels, "attention": ATTENTION[attention].load()}
        return self.programs.ProgramSpec(
            graphdef=graphdef, num_pages=NUM_PAGES, raw_logprobs=False, **feature, **backends
        ), state

    def jobs(self, **how):
        """The runner's table of programs, each as the call that lowers it."""
        spec, state = self.spec(**how)
        return self.runner.lowerings(state, spec, RUNNER)


POOL = KVPoolSpec(
    num_layers=5, num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_kv_heads=2, head_dim=16, dtype=jnp.dtype(jnp.bfloat16)
)
RUNNER = aot_programs.RunnerConfig(pool=POOL, num_request_slots=NUM_SLOTS, shapes=(DECODE, EXTEND), vocab_size=313)
REAL = Build(qwen3_moe, decoder, programs, aot_programs, has_feature=True)


def model_texts():
    """The source of each module of the decoder without the feature."""
    return {module.__name__: without(module, names) for module, names in MODEL_NAMES.items()}


def build_from(texts, programs_text):
    """Modules made of text, wired to one another and to the rest of the package."""
    made = {}
    for name, text in texts.items():
        for other in made:
            text = text.replace(f"from {other} import", f"from never.{other} import")
        made[name] = make_module(f"never.{name}", text)
    own_programs = make_module("never.programs", programs_text)
    make_module(
        "never.sampler", inspect.getsource(sampler)
    )  # jitted for itself, so that what is compared is not one program twice
    table = inspect.getsource(aot_programs)
    for name in ("programs", "sampler"):
        table = table.replace(f"routed_experts.execution.{name}", f"never.{name}")
    own_table = make_module("never.program_table", table)
    return Build(made[qwen3_moe.__name__], made[decoder.__name__], own_programs, own_table, has_feature=False)


@functools.cache
def never():
    """The build without the feature."""
    return build_from(model_texts(), without(programs, PROGRAM_NAMES))


def test_nothing_of_the_feature_is_left_in_the_build_without_it():
    for module, names in (MODEL_NAMES | {programs: PROGRAM_NAMES}).items():
        before, after = set(names_in(inspect.getsource(module))), set(names_in(without(module, names)))
        assert names <= before and names.isdisjoint(after)
        # CaptureSpec describes a model to its readers; a config's property of that name is not part of a program.
        left = {
            name
            for name in after
            if re.search("capture|routed_?experts", name.removeprefix("routed_experts."), re.IGNORECASE)
        }
        assert left <= {"capture_spec", "CaptureSpec", "routed_experts.core.capture_spec"}, left
    assert not [name for name in names_in(inspect.getsource(sampler)) if "capture" in name.lower()]
    assert "rows" not in {field.name for field in dataclasses.fields(never().programs.ForwardOut)}


@pytest.mark.parametrize(
    ("moe", "attention"), [("tiled", "paged"), ("reference", "reference"), ("grouped", "paged"), ("native", "native")]
)
def test_off_is_the_build_without_the_feature(moe, attention):
    expected, got = never().jobs(moe=moe, attention=attention), REAL.jobs(moe=moe, attention=attention)
    assert got.keys() == expected.keys()
    forward_only = moe != "tiled"  # what follows the forward pass runs no expert
    for key in got:
        if key[0] == "forward" or not forward_only:
            text = got[key]().as_text()
            assert len(text.splitlines()) > 20
            assert text == expected[key]().as_text(), key


def test_a_build_that_leaves_a_trace_is_detected():
    texts, name = model_texts(), feed_forward.__name__
    call = "step.kernels.group.all_reduce(self.add_shared(y, x, params))"
    assert texts[name].count(call) == 1
    texts[name] = texts[name].replace(call, f"{call} * (routing.ids[:1, :1] >= 0).astype(x.dtype)")
    tracing = build_from(texts, without(programs, PROGRAM_NAMES))
    key = "forward", DECODE
    assert tracing.jobs()[key]().as_text() != REAL.jobs()[key]().as_text()


def outputs(lowered):
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]
    }


@pytest.mark.parametrize(
    ("num_experts", "dtype", "shape"),
    [
        pytest.param(16, jnp.uint8, DECODE, id="16-uint8-decode"),
        pytest.param(16, jnp.uint8, EXTEND, id="16-uint8-extend", marks=pytest.mark.thorough),
        pytest.param(257, jnp.uint16, DECODE, id="257-uint16-decode", marks=pytest.mark.thorough),
        pytest.param(257, jnp.uint16, EXTEND, id="257-uint16-extend"),
    ],
)
def test_on_has_one_output_more(shape, num_experts, dtype):
    on, off = (REAL.jobs(capture=capture, num_experts=num_experts)["forward", shape]() for capture in (True, False))
    on_outputs, off_outputs = outputs(on), outputs(off)
    [name] = on_outputs.keys() - off_outputs.keys()
    assert name == "[1].rows"
    assert (on_outputs[name].shape, on_outputs[name].dtype) == ((shape.num_tokens, 3 * 4), dtype)
    assert on.in_avals == off.in_avals, "no input more: nothing is carried from step to step"
    for lowered in (on, off):  # one argument, the pool, may become an output, and that is the pool
        assert re.findall(r"tf\.aliasing_output = (\d+)", lowered.as_text()) == ["0"]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param("float32", DECODE, id="float32-decode"),
        pytest.param("float32", EXTEND, id="float32-extend", marks=pytest.mark.thorough),
        pytest.param("bfloat16", DECODE, id="bfloat16-decode", marks=pytest.mark.thorough),
        pytest.param("bfloat16", EXTEND, id="bfloat16-extend"),
    ],
)
def test_combine_weights_are_written_as_ids_are_and_leave_in_the_same_output(shape, dtype):
    """Beside ids alone: one more write for each of ids', no input more, and one output of packed words."""
    both, ids = (
        REAL.jobs(capture=True, weights_dtype=name, moe="reference")["forward", shape]() for name in (dtype, None)
    )
    assert both.in_avals == ids.in_avals
    [rows] = [leaf for name, leaf in outputs(both).items() if name == "[1].rows"]
    words = 3 + (12 if dtype == "float32" else 6)  # twelve ids of a byte, and as many weights
    assert (rows.shape, rows.dtype) == ((shape.num_tokens, words), jnp.int32)
    writes = "stablehlo.dynamic_update_slice"
    texts = [operations(lowered.as_text()) for lowered in (both, ids, REAL.jobs(moe="reference")["forward", shape]())]
    assert texts[0][writes] - texts[1][writes] == texts[1][writes] - texts[2][writes] > 0


def test_programs_after_the_forward_pass_do_not_know_capture():
    on, off = (REAL.jobs(capture=capture) for capture in (True, False))
    for key in on:
        if key[0] != "forward":
            assert on[key]().as_text() == off[key]().as_text(), key


@pytest.mark.parametrize("shape", [DECODE, EXTEND], ids=["decode", "extend"])
def test_on_without_its_output_is_off(shape):
    """JAX's own dead code elimination takes away what only `rows` needs; what is left must lower to the other
    program."""

    def lower_live_part(capture):
        spec, state = REAL.spec(capture=capture)
        inputs = aot_programs.abstract_inputs(state, spec, RUNNER, shape)
        traced = jax.make_jaxpr(functools.partial(programs.forward, spec=spec, shape=shape))(*inputs)
        used = [True] * len(traced.out_avals)
        used[-1] = not capture
        left = ClosedJaxpr(partial_eval.dce_jaxpr(traced.jaxpr, used, instantiate=True)[0], traced.consts)
        return jax.jit(jaxpr_as_fun(left)).lower(*traced.in_avals).as_text(), len(used)

    (on, num_on), (off, num_off) = lower_live_part(True), lower_live_part(False)
    assert num_on == num_off + 1
    assert on == off


def operations(text):
    return collections.Counter(re.findall(r"\b(stablehlo\.\w+|call) ", text.replace('"', " ")))


@pytest.mark.parametrize("shape", [DECODE, EXTEND], ids=["decode", "extend"])
def test_on_adds_a_write_a_run_of_layers_and_a_conversion_a_step(shape):
    on, off = (operations(REAL.jobs(capture=capture)["forward", shape]().as_text()) for capture in (True, False))
    assert not off - on
    added = on - off
    print(dict(added))
    runs = 2  # of MoE layers, each a scan with one body
    assert added["stablehlo.dynamic_update_slice"] == runs  # of the ids of a layer
    assert added["stablehlo.convert"] == 1  # of all ids, once a step
    assert not added.keys() & {
        "stablehlo.while",
        "stablehlo.sort",
        "stablehlo.gather",
        "stablehlo.scatter",
        "stablehlo.dot_general",
    }
    assert added.total() <= 40, added  # measured 32; most are constants, broadcasts and index arithmetic, which fuse
