"""lm-eval: a multiple choice by logprobs of echoed prompts, ids and the tokenizer asked of the server; and text by chat."""

import json
import os
import subprocess
import sys
import tempfile
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
    """Run one task; its results."""
    args = f"model={model},base_url={url}{path},num_concurrent=2,max_retries=1"
    command = [Path(sys.executable).parent / "lm_eval", "run", "--model", kind, "--tasks", task, "--include_path", folder]
    template, out = ["--apply_chat_template"] if "chat" in kind else [], folder / task
    subprocess.run([*command, "--model_args", ",".join([args, *more]), "--output_path", out, *template], check=True)
    (results,) = out.rglob("results*.json")
    return json.loads(results.read_text())["results"][task]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = folder / "questions.jsonl"
        questions.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
        for task, text in (("compat_choice", CHOICE), ("compat_text", TEXT)):
            (folder / f"{task}.yaml").write_text(text % questions)
        remote = ("tokenizer_backend=remote", "tokenized_requests=True")
        choice = evaluate(folder, "compat_choice", "local-completions", "/v1/completions", *remote)
        assert 0 <= choice["acc,none"] <= 1
        text = evaluate(folder, "compat_text", "local-chat-completions", "/v1/chat/completions")
        assert "exact_match,none" in text
        print(f"local-completions (echo, logprobs, remote tokenizer): acc {choice['acc,none']}; local-chat-completions: generate_until")


main()
