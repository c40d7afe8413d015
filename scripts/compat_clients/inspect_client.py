"""inspect-ai: a small task through openai-api/vllm/NAME."""

import os

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

os.environ |= {"VLLM_BASE_URL": os.environ["COMPAT_URL"] + "/v1", "VLLM_API_KEY": "none"}


def main():
    samples = [Sample("What is the capital of France?", target="Paris"), Sample("What is the capital of Italy?", target="Rome")]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    config = GenerateConfig(max_tokens=32, temperature=0, seed=1, max_retries=1).model_dump(exclude_none=True)
    model = f"openai-api/vllm/{os.environ['COMPAT_MODEL']}"
    (log,) = evaluate(task, model=model, display="none", log_dir=os.environ["TMPDIR"], **config)
    assert log.status == "success", log.error
    usage = next(iter(log.stats.model_usage.values()))
    assert len(log.samples) == 2 and usage.output_tokens > 0
    print(f"openai-api/vllm: {len(log.samples)} samples, {usage.output_tokens} tokens, scored")


main()
