"""lm-eval: a multiple choice by logprobs of echoed prompts, with ids and tokenizer from the server; and text by
chat."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
QUESTIONS = [
    {"question": "What is the capital of France?", "choices": [" Paris", " Rome"], "answer": 0},
    {"question": "What is the capital of Italy?", "choices": [" Paris", " Rome"], "answer": 1},
]
CHOICE = """task: compat_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
doc_to_target: answer
metric_list: [{metric: acc}]
"""
TEXT = """task: compat_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def evaluate(folder, task, kind, path, *more):
    """Run one task; its results, and the model's response to each sample, in order."""
    args = f"model={model},base_url={url}{path},num_concurrent=2,max_retries=1"
    command = [
        Path(sys.executable).parent / "lm_eval",
        "run",
        "--model",
        kind,
        "--tasks",
        task,
        "--include_path",
        folder,
    ]
    template, out = ["--apply_chat_template"] if "chat" in kind else [], folder / task
    subprocess.run(
        [*command, "--model_args", ",".join([args, *more]), "--output_path", out, "--log_samples", *template],
        check=True,
    )
    (results,), (samples,) = out.rglob("results*.json"), out.rglob("samples*.jsonl")
    logged = sorted(
        (json.loads(line) for line in samples.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )
    return json.loads(results.read_text())["results"][task], [sample["resps"] for sample in logged]


def post(path, body):
    """An answer by plain HTTP."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def logprob(question, choice):
    """The log probability of a choice after its question, by another route: the sum over its tokens."""
    ids = [post("/tokenize", {"prompt": text})["tokens"] for text in (question, question + choice)]
    return sum(post("/v1/score", {"token_ids": ids[1]})["data"][0]["logprobs"][len(ids[0]) - 1 :])


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = folder / "questions.jsonl"
        questions.write_text("".join(json.dumps(item) + "\n" for item in QUESTIONS))
        for task, text in (("compat_choice", CHOICE), ("compat_text", TEXT)):
            (folder / f"{task}.yaml").write_text(text % questions)
        remote = ("tokenizer_backend=remote", "tokenized_requests=True")
        choice, samples = evaluate(folder, "compat_choice", "local-completions", "/v1/completions", *remote)
        expected = [[logprob(item["question"], text) for text in item["choices"]] for item in QUESTIONS]
        actual = [[float(answer[0][0]) for answer in sample] for sample in samples]
        pairs = zip(
            (value for row in actual for value in row), (value for row in expected for value in row), strict=True
        )
        assert all(abs(item - other) < 1e-3 for item, other in pairs), (actual, expected)
        right = [row.index(max(row)) == item["answer"] for row, item in zip(expected, QUESTIONS, strict=True)]
        assert choice["acc,none"] == sum(right) / len(right), (choice, expected)
        _, samples = evaluate(folder, "compat_text", "local-chat-completions", "/v1/chat/completions")
        for item, sample in zip(QUESTIONS, samples, strict=True):
            body = {
                "messages": [{"role": "user", "content": item["question"]}],
                "max_tokens": 16,
                "temperature": 0,
                "stop": ["\n"],
            }
            assert sample == [[post("/v1/chat/completions", body)["choices"][0]["message"]["content"]]], sample
        print(
            "local-completions (echo, logprobs, remote tokenizer): logprobs are those of /v1/score, "
            f"acc {choice['acc,none']}; "
            "local-chat-completions: generate_until says what chat says"
        )


main()
