"""What the services do until a run's first step, or its first after a resume: what is loaded, what is waited for."""

from quartet_client.progress import RunProgress
from quartet_client.runs import ServiceStatus

# Of the trainer, by phase; a phase that is not here has nothing to say.
_PHASES = {
    "starting": "loads the model {model}",
    "publishing": "sends weights to the rollouts",
    "evaluating": "evaluates version {version}",
    "waiting_for_batch": "waits for its batch; {ready} of {needed} groups are ready",
    "training": "trains its first batch",
}


def starting(state: RunProgress) -> dict[str, str]:
    """Return what keeps the next step from coming, by service; empty once there was a step, or the run has ended."""
    trainer = state.services.get("trainer")
    if state.ended or (state.stepped and _phase(trainer) != "starting"):
        return {}
    told = {}
    for kind, service in state.services.items():
        if service.error:
            continue
        if service.waiting_for:
            told[kind] = f"waits for {', '.join(service.waiting_for)}"
        elif kind == "trainer" and (phase := _PHASES.get(_phase(service))):
            ready = state.stats.ready + state.stats.leased_to_trainer if state.stats else 0
            values = {"model": state.model, "version": service.details.get("step", 0)}
            told[kind] = phase.format(**values, ready=ready, needed=state.groups_per_step).strip()
    return told


def _phase(trainer: ServiceStatus | None) -> str:
    phase = str(trainer.details.get("phase", "")) if trainer else ""
    return phase.removeprefix("TRAINER_PHASE_").lower()
