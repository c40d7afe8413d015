"""aiperf: chat streams of synthetic prompts, and the server's metrics scraped meanwhile."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]
OPTIONS = (
    "--endpoint-type chat --streaming --request-count 8 --concurrency 2 "
    "--synthetic-input-tokens-mean 32 --output-tokens-mean 8 --extra-inputs ignore_eos:true --use-server-token-count "
    "--ui none"
)


def main():
    with tempfile.TemporaryDirectory() as name:
        command = [
            Path(sys.executable).parent / "aiperf",
            "profile",
            "--model",
            model,
            "--url",
            url,
            "--artifact-dir",
            name,
        ]
        subprocess.run([*command, "--tokenizer", os.environ["COMPAT_TOKENIZER"], *OPTIONS.split()], check=True)
        report = json.loads((Path(name) / "profile_export_aiperf.json").read_text())
        assert report["completed_request_count"]["avg"] == 8 and report["request_error_rate"]["avg"] == 0, report[
            "error_summary"
        ]
        lengths = report["output_sequence_length"]
        assert lengths["min"] == lengths["max"] == 8, lengths
        scraped = (Path(name) / "server_metrics_export.json").read_text()
        assert "routed_experts_requests_accepted" in scraped
        print(
            "8 chat streams of exactly 8 tokens by usage, none failed; "
            f"{scraped.count('routed_experts_')} of our metrics scraped"
        )


main()
