"""`quartet migrate-colossalchat`: what it prints is a run file that every service accepts."""

import json
import shutil
import subprocess
from pathlib import Path

from by_hand import SERVICES, overriding
from preloaded import Pythons

FLAGS = "-m {model} -d {data} -ei 10 -g 4 -tbs 2 -t 1 -b transformers -mnt 64 -p moved -a GRPO"


def test_every_service_accepts_what_is_printed(pythons: Pythons, by_hand, model: Path, tmp_path: Path):
    def run(service: str, *words: str) -> str:
        command = [pythons[service], "-m", f"quartet_{service}", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{service} {words}\n{done.stderr}"
        return done.stdout

    data, path = tmp_path / "data.jsonl", tmp_path / "run.toml"
    shutil.copytree(model, tmp_path / "model")
    model = tmp_path / "model"
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    line = {"messages": {"role": "user", "content": "1+1=?"}, "gt_answer": "2"}
    data.write_text("".join(json.dumps(line) + "\n" for _ in range(8)))
    path.write_text(run("client", "migrate-colossalchat", FLAGS.format(model=model, data=data)))
    services = by_hand()
    services.start_redis()
    settings = {"run.folder": tmp_path / "run", "broker.redis_url": f"redis://127.0.0.1:{services.redis_port}/0"}
    for service in SERVICES:
        run(service, str(path), "--dry-run", *overriding(settings))
