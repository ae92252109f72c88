"""Prints the models of one reader's sections of the run file. Runs in that reader's environment.

.quartet/envs/READER/bin/python docs/tools/run_file_models.py READER            prints {section: JSON schema}
.quartet/envs/READER/bin/python docs/tools/run_file_models.py READER --check    reads a JSON list of run files from
                                    standard input; prints for each null, or the sentence that refuses it
"""

import json
import sys
from importlib import import_module

from quartet_common.config import ConfigError, validate_section
from quartet_common.run_file import RunFile
from quartet_common.sections import Section

# Reader: {section: (module, class)}. The shared sections are read with the development environment's.
READERS = {
    "dev": {
        "run": ("quartet_common.config", "RunSection"),
        "model": ("quartet_common.config", "ModelSection"),
        "addresses": ("quartet_common.config", "AddressesSection"),
        "security": ("quartet_common.config", "SecuritySection"),
        "server": ("quartet_common.config", "ServerSection"),
        "tracing": ("quartet_common.config", "TracingSection"),
        "data": ("quartet_client.data", "DataSection"),
        "launcher": ("quartet_local.config", "LauncherSection"),
        "sft": ("quartet_common.sft", "SftSection"),
    },
    "broker": {"broker": ("quartet_broker.config", "BrokerSection")},
    "reward": {"reward": ("quartet_reward.config", "RewardSection")},
    "rollout": {"rollout": ("quartet_rollout.config", "RolloutSection")},
    "environment": {"environment": ("quartet_environment.config", "EnvironmentServiceSection")},
    "trainer": {"trainer": ("quartet_trainer.config", "TrainerSection")},
}


def models(reader: str) -> dict[str, type[Section]]:
    """Return the sections of a reader with their models."""
    return {name: getattr(import_module(module), kind) for name, (module, kind) in READERS[reader].items()}


def refusal(sections: dict[str, type[Section]], tree: dict) -> str | None:
    """Return the errors of a run file's sections, or None."""
    snippet = RunFile(tree, "this snippet")
    try:
        for name in sections.keys() & tree.keys():
            validate_section(sections[name], tree[name], name, snippet)
    except ConfigError as error:
        return str(error)
    return None


def main() -> None:
    reader, *options = sys.argv[1:]
    sections = models(reader)
    if "--check" in options:
        print(json.dumps([refusal(sections, tree) for tree in json.load(sys.stdin)]))
    else:
        print(json.dumps({name: model.model_json_schema() for name, model in sections.items()}))


if __name__ == "__main__":
    main()
