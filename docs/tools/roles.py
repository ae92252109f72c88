"""docs/roles.md: the RPCs that each role may call, from the table in quartet_common.identity."""

from quartet.v1 import broker_pb2, environment_pb2, reward_pb2, rollout_pb2, trainer_pb2

from quartet_common.identity import ROLES, allowed_roles

HEAD = """\
# Roles: who may call what

The RPCs that a certificate's role may call ([certificates.md](certificates.md#roles)). This page is generated from
`services/common/quartet_common/identity.py` by `docs/tools/write.py`. `broker`, `reward` and `environment` may call
only health, handshake and reflection, which are open to every role; `operator` may call everything.

| role | service | may call |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    rows = []
    for role in ROLES:
        for module in (broker_pb2, reward_pb2, rollout_pb2, environment_pb2, trainer_pb2):
            for service in module.DESCRIPTOR.services_by_name.values():
                methods = [each.name for each in service.methods]
                may = [name for name in methods if role in allowed_roles(f"/{service.full_name}/{name}")]
                if may and role != "operator":
                    rows.append(f"| `{role}` | `{service.name}` | {', '.join(f'`{name}`' for name in may)} |\n")
    return HEAD + "".join(rows)
