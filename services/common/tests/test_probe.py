"""The health probe against a real server."""

import asyncio

from quartet_common import probe
from quartet_common.config import SecuritySection, ServerSection
from quartet_common.host import ServiceHost


def ask(*arguments: str) -> int:
    return probe.main(["reward", *arguments])


async def test_it_tells_what_the_service_tells(tmp_path, capsys):
    (tmp_path / "token").write_text("secret")
    security = SecuritySection(token_file=tmp_path / "token")  # probes need none
    host = ServiceHost("reward", "127.0.0.1:0", security, ServerSection(metrics=False))
    await host.start()
    file = tmp_path / "run.toml"
    file.write_text(f'[addresses]\nreward = "{host.address}"\n[reward]\nof_its_own = 1\n')
    assert await asyncio.to_thread(ask, str(file)) == 0
    assert capsys.readouterr().out == "SERVING\n"
    await host.set_serving(False)
    assert await asyncio.to_thread(ask, str(file)) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"
    _, port = host.address.split(":")
    everywhere = ("--set", "addresses.reward=gpu7.example:" + port, "--set", "server.bind_host=0.0.0.0")
    assert await asyncio.to_thread(ask, *everywhere) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"
    await host.drain()
