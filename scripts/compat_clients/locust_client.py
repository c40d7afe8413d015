"""locust: eight users that keep their connections, for some seconds; no request may fail."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
from locust import HttpUser, between, task

class Reader(HttpUser):
    wait_time = between(0.01, 0.05)

    @task(3)
    def complete(self):
        self.client.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 4})

    @task(1)
    def rows(self):
        body = {"text": "The sea", "sampling_params": {"max_new_tokens": 4}, "return_routed_experts": True}
        self.client.post("/generate", json=body)

    @task(1)
    def look(self):
        self.client.get("/health")
"""


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "locustfile.py").write_text(PROGRAM)
        command = [
            Path(sys.executable).parent / "locust",
            "--headless",
            "--users",
            "8",
            "--spawn-rate",
            "8",
            "--run-time",
            "6s",
        ]
        subprocess.run(
            [*command, "--host", os.environ["COMPAT_URL"], "--csv", folder / "requests"], cwd=folder, check=True
        )
        total = (folder / "requests_stats.csv").read_text().splitlines()[-1].split(",")
        assert total[1] == "Aggregated" and int(total[2]) > 50 and int(total[3]) == 0, total
        print(f"8 users, {total[2]} requests over kept connections, none failed")


main()
