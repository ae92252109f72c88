"""`quartet backup` and `restore`: a run's data in Redis, its newest checkpoint and its ledger as one folder."""

from pathlib import Path
from typing import Any

import click

from quartet_client.audit import checkpoint_folder
from quartet_client.backup import RedisHalf, back_up, verify
from quartet_client.backup import restore as restore_backup
from quartet_client.cli.options import Target, checkpoints_option, run_option
from quartet_client.launcher import run_in_environment
from quartet_client.terminal import echo

_folder = click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
config_option = click.option(
    "--config", "path", type=click.Path(path_type=Path), help="Run file (TOML): broker.redis_url, run, checkpoints."
)
overrides_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of it.")


@click.command()
@_folder
@config_option
@overrides_option
@run_option
@checkpoints_option
def backup(
    folder: Path, path: Path | None, overrides: tuple[str, ...], run_id: str | None, checkpoints: Path | None
) -> int:
    """Write a backup of a run to the new folder FOLDER, while the run goes on.

    FOLDER appears when the backup is complete.
    """
    chosen = run_id or Target(path, overrides).config().run.id
    found = checkpoints or checkpoint_folder(path, overrides, chosen)
    made = back_up(folder, chosen, found, _redis(path, overrides, chosen))
    size = sum(file["bytes"] for file in made["files"].values())
    echo(
        f"{folder}: run {chosen} at step {made['policy_version']}, {made['committed_step']} committed, checkpoint at "
        f"step {made['checkpoint_step']}; {len(made['files'])} files, {size / 1e6:.1f} MB"
    )
    return 0


@click.command()
@_folder
@config_option
@overrides_option
@checkpoints_option
@click.option("--replace", is_flag=True, help="Also if Redis has the run: its data there are deleted.")
def restore(
    folder: Path, path: Path | None, overrides: tuple[str, ...], checkpoints: Path | None, replace: bool
) -> int:
    """Check the backup in FOLDER, put back what is missing of checkpoints and ledger, and the run into Redis.

    Stop the trainer and `quartet run` before. A running Redis takes the run; its other runs are not touched.
    """
    manifest = verify(folder)
    run_id = manifest["run_id"]
    found = checkpoints or checkpoint_folder(path, overrides, run_id)
    placed = restore_backup(folder, manifest, found, _redis(path, overrides, run_id, replace))
    echo(
        f"run {run_id} is in Redis as of {manifest['taken_at']}, at step {manifest['policy_version']}; "
        f"{found}: {', '.join(placed) + ' put back' if placed else 'nothing was missing'}"
    )
    echo(
        "start what is stopped: broker, reward, rollouts, then the trainer; or `quartet run`, with --attach if they run"
    )
    return 0


def _redis(path: Path | None, overrides: tuple[str, ...], run_id: str, replace: bool = False) -> RedisHalf:
    """Return what calls `quartet_broker.backup` in the broker's environment."""
    embedded = _embedded(path, overrides, run_id)
    config = [*(["--config", str(path)] if path else []), *(["--replace"] if replace else [])]
    config += [word for each in (*overrides, *embedded) for word in ("--set", each)]

    def call(action: str, run_id: str, folder: Path) -> dict[str, Any]:
        return run_in_environment("broker", "quartet_broker.backup", action, run_id, str(folder), *config)

    return call


def _embedded(path: Path | None, overrides: tuple[str, ...], run_id: str) -> list[str]:
    """Return the setting of the Redis that `quartet run` started for the run, unless the run file names one."""
    config = Target(path, overrides).config()
    if config.file and "redis_url" in config.file.section("broker"):
        return []
    run = config.run.model_copy(update={"id": run_id})
    socket = (run.path / "sockets" / "redis.sock").resolve()
    return [f'broker.redis_url="unix://{socket}"'] if socket.is_socket() else []
