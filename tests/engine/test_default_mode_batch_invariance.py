"""With the default kernels of a CPU, the output of a request depends on that request alone, to the last bit: not on
other requests of a step, on arrivals, on how its prompt is cut, on the contents of the prefix cache, nor on the padded
sizes.

In bfloat16 and in float32, with a dense first layer; test_families_batch_invariance.py has the families, and greedy
requests beside sampled ones."""

import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from engine.test_exactness_grid import Cell, exact_outputs, prompts
from oracles.driver import Bench, request
from oracles.testbeds import random_prompt
from routed_experts.models.model_folder import ModelFolder
from support.tiny_checkpoint import write_tiny_checkpoint

SIZES = dict(page_size=8, context_length=320, precompile_bs_paddings=(8,), precompile_token_paddings=(16, 256))
REQUEST_PROMPTS = prompts((280, 17, 60, 1, 33, 100, 9, 5), seed=4)
WORLDS = "bfloat16", "float32"
TEMPERATURES = 0.0, 1.0
CELLS = [
    Cell(batch=8, chunk=256, radix="off", preempt=False, n=1),
    Cell(batch=8, chunk=16, radix="off", preempt=False, n=1),
    Cell(batch=8, chunk=16, radix="warm", preempt=True, n=1),
    Cell(batch=3, chunk=7, radix="on", preempt=False, n=1),
    Cell(batch=3, chunk=256, radix="warm", preempt=True, n=1),
]


@pytest.fixture(scope="module", params=WORLDS)
def testbed(request):
    with tempfile.TemporaryDirectory() as folder:
        opened = ModelFolder.open(write_tiny_checkpoint(folder, tokenizer=False))
        return Bench(opened.load(jnp.dtype(request.param)), **SIZES)


def sampled_request(index, temperature):
    how = {"prompt_logprobs_from": 0} if index % 2 else {}
    return request(f"p{index}", REQUEST_PROMPTS[index], 24, seed=index, temperature=temperature, **how)


@pytest.fixture(scope="module")
def alone(testbed):
    outputs = {}
    for temperature in TEMPERATURES:
        for index in range(len(REQUEST_PROMPTS)):
            drive = testbed.drive(max_running_requests=1, disable_radix_cache=True)
            drive.run(sampled_request(index, temperature))
            outputs[temperature] = outputs.get(temperature, {}) | exact_outputs(drive)
    return outputs


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_sequence_in_a_batch_equals_itself_alone(testbed, alone, cell, temperature):
    drive = testbed.drive(
        max_running_requests=cell.batch, chunked_prefill_size=cell.chunk, disable_radix_cache=cell.radix == "off"
    )
    order = np.random.default_rng(1).permutation(len(REQUEST_PROMPTS))
    if cell.radix == "warm":
        drive.run(*(request(f"warm{index}", REQUEST_PROMPTS[index], 1) for index in order), check=False)
        drive.outputs.clear()
    retract = (lambda step: step % 3 == 2 and drive.retract_victim()) if cell.preempt else None
    drive.run(*(sampled_request(index, temperature) for index in order), before_step=retract, check=False)
    assert len(drive.outputs) == len(REQUEST_PROMPTS)
    assert (drive.core.ranks[0].num_retracted > 0) == cell.preempt
    for rid, output in exact_outputs(drive).items():
        assert output == alone[temperature][rid], rid


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("index", [1, 4])
def test_a_repeated_call_is_the_same_while_other_prompts_arrive(testbed, alone, index, temperature):
    """Some of its steps hold prompts, and in some every request has one token: neither may round otherwise."""
    rng = np.random.default_rng(6)
    drive = testbed.drive(disable_radix_cache=True)
    others = {
        step: request(f"q{step}", random_prompt(rng, 3 * step), 4, temperature=temperature)
        for step in (3, 4, 9, 15, 16)
    }
    drive.run(
        sampled_request(index, temperature),
        before_step=lambda step: step in others and drive.add(others[step]),
        check=False,
    )
    modes = {batch.mode for batch, _ in drive.log.forwards}
    assert len(drive.outputs) == 6 and len(modes) > 1, modes
    assert exact_outputs(drive)[f"p{index}"] == alone[temperature][f"p{index}"]
