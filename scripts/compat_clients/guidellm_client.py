"""guidellm: two chat streams at a time of synthetic prompts, with usage in every chunk and ignore_eos."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]


def main():
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        options = {
            "backend": f"kind=openai_http,target={url},model={model}",
            "profile": "kind=concurrent,streams=2",
            "constraint": "kind=max_requests,count=8",
            "tokenizer": f"kind=hf_auto,model={os.environ['COMPAT_TOKENIZER']}",
            "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "output": f"kind=json,path={report}",
        }
        flags = [part for key, value in options.items() for part in (f"--{key}", value)]
        subprocess.run(
            [Path(sys.executable).parent / "guidellm", "run", *flags, "--disable-console-interactive"], check=True
        )
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
        totals, tokens = metrics["request_totals"], metrics["output_token_count"]["successful"]
        assert totals["successful"] == 8 and totals["errored"] == 0, totals
        assert (tokens["min"], tokens["max"], tokens["total_sum"]) == (8, 8, 64), tokens
        print("8 streams of exactly 8 tokens (ignore_eos, usage in every chunk), none failed")


main()
