"""evalscope perf: chat streams of random prompts with min_tokens equal to max_tokens, and usage at the end."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
OPTIONS = (
    "--api openai --dataset random --min-prompt-length 16 --max-prompt-length 32 "
    "--prefix-length 0 --min-tokens 8 --max-tokens 8 --stream"
)


def main():
    with tempfile.TemporaryDirectory() as name:
        command = [
            Path(sys.executable).parent / "evalscope",
            "perf",
            "--url",
            f"{url}/v1/chat/completions",
            "--model",
            model,
        ]
        command += [
            *OPTIONS.split(),
            "--number",
            "8",
            "--parallel",
            "2",
            "--tokenizer-path",
            os.environ["COMPAT_TOKENIZER"],
        ]
        subprocess.run([*command, "--outputs-dir", name], check=True)
        (summary,) = Path(name).rglob("benchmark_summary.json")
        report = json.loads(summary.read_text())
        failed = [value for key, value in report.items() if "failed" in key.lower()]
        assert failed == [0], report
        lengths = [value for key, value in report.items() if key == "Avg Output Tokens"]
        assert lengths == [8], report
        print("8 chat streams of exactly 8 tokens, none failed")


main()
