"""scripts/train_demo in small: a tokenizer, a model and an EAGLE-3 head learn, in processes of their own, for the
scripts are no package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import routed_experts

ROOT = Path(routed_experts.__file__).parents[2]
TOKENIZER = """
import demo_tokenizer
words = [chr(97 + n % 26) + chr(97 + n // 26 % 26) + chr(97 + n // 676) for n in range(3000)]
texts = [" ".join(words[first : first + 50]) for first in range(0, 3000, 25)]
tokenizer = demo_tokenizer.train(texts)
assert tokenizer.get_vocab_size() == demo_tokenizer.VOCAB_SIZE
ids = tokenizer.encode(texts[3]).ids
assert tokenizer.decode(ids) == texts[3] and len(ids) < len(texts[3]) / 2
"""
MODEL = """
import tempfile
from pathlib import Path
import jax.numpy as jnp, numpy as np
from flax import nnx
import demo_trainer as trainer, demo_report
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.model_folder import ModelFolder
config = trainer.read_qwen3_moe(trainer.ConfigReader(trainer.CONFIG, "CONFIG"))
text = np.random.default_rng(0).integers(0, 2000, 400).astype(np.int32)
models = [FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32) for _ in range(2)]
sizes = dict(batch_tokens=64, peak=1e-2, length=32, warmup=1)
early, late = (
    trainer.train(model, [text], trainer.Plan(steps=steps, **sizes))[-1][1]
    for model, steps in zip(models, (3, 40), strict=True)
)
assert late < early, (early, late)
folder = Path(tempfile.mkdtemp())
trainer.save(folder, trainer.CONFIG, trainer.hugging_face_tensors(models[1], trainer.weight_sources(config)))
written = ModelFolder.open(folder).load(jnp.dtype("float32"))
demo_report.LENGTH, demo_report.BATCH = 32, 2
losses = [demo_report.score(model, {"text": text})["text"][1].mean() for model in (*models, written)]
assert abs(losses[2] - losses[1]) < 0.05 and losses[1] < losses[0], losses
"""
HEAD = """
import jax.numpy as jnp, numpy as np
from flax import nnx
import demo_head_trainer as trainer
from routed_experts.models.drafts.eagle3_head import Eagle3Head
from routed_experts.models.loading.model_source import demo_model_path
from routed_experts.models.model_folder import ModelFolder
target = ModelFolder.open(demo_model_path()).load(jnp.dtype("float32"))
tokens = np.random.default_rng(0).integers(0, 2000, (8, 24)).astype(np.int32)
head = Eagle3Head(trainer.head_config(), rngs=nnx.Rngs(0), dtype=jnp.float32)
curves = [trainer.train(head, target, tokens, trainer.Plan(steps=steps, rows=4, length=24))[-1] for steps in (2, 40)]
assert all(late < early for early, late in zip(curves[0][1], curves[1][1], strict=True)), curves
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(TOKENIZER, id="tokenizer"),
        pytest.param(MODEL, id="model", marks=pytest.mark.thorough),
        pytest.param(HEAD, id="head"),
    ],
)
def test_training_works_and_lowers_the_loss(code):
    paths = [str(ROOT / "scripts"), str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
