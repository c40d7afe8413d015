"""inspect-ai: a small task through openai-api/vllm/NAME."""

import json
import os
import urllib.request

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

os.environ |= {"VLLM_BASE_URL": os.environ["COMPAT_URL"] + "/v1", "VLLM_API_KEY": "none"}


def main():
    samples = [
        Sample("What is the capital of France?", target="Paris"),
        Sample("What is the capital of Italy?", target="Rome"),
    ]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    config = GenerateConfig(max_tokens=32, temperature=0, seed=1, max_retries=1).model_dump(exclude_none=True)
    model = f"openai-api/vllm/{os.environ['COMPAT_MODEL']}"
    (log,) = evaluate(task, model=model, display="none", log_dir=os.environ["TMPDIR"], **config)
    assert log.status == "success", log.error
    usage = next(iter(log.stats.model_usage.values()))
    responses = [asked(sample.input) for sample in samples]
    assert [scored.output.completion for scored in log.samples] == [
        answer["choices"][0]["message"]["content"] for answer in responses
    ]
    assert usage.output_tokens == sum(answer["usage"]["completion_tokens"] for answer in responses)
    right = [scored.scores["includes"].value for scored in log.samples]
    assert right == [
        "C" if sample.target in scored.output.completion else "I"
        for sample, scored in zip(samples, log.samples, strict=True)
    ]
    print(
        f"openai-api/vllm: 2 samples, text and {usage.output_tokens} tokens as asked without it, "
        f"scored {''.join(right)}"
    )


def asked(question):
    """The same question by plain HTTP."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0, "seed": 1}
    request = urllib.request.Request(os.environ["COMPAT_URL"] + "/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


main()
