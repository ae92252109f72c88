"""The learner: the model, its optimizer and its algorithm, spread over the ranks of one job.

| module | holds |
|---|---|
| `base` | the `Learner` protocol that the training loop uses |
| `create` | `create_learner`: the learner that the settings ask for |
| `model_folder` | checks of a Hugging Face folder and the copying of its tokenizer (no torch) |
| `distributed` | `initialize`: ColossalAI's launch, under torchrun or alone; this rank's place |
| `colossalai_cures` | what ColossalAI 0.5.0 needs on a CPU with this torch |
| `policy` | the causal language model, giving log-probs of completion tokens and nothing else |
| `loading` | loads the causal language model, and compares its log-probs with the family's own |
| `attention` | attention over a packed row, by torch's variable-length kernel or SDPA |
| `booster_learner` | `BoosterLearner`: a step, the weights, checkpoints, under any plugin |
| `adapter` | LoRA: adapters in a model, their names, the merged model |
| `vocab_parallel` | log-probs where each rank has a part of the vocabulary |
| `hybrid_checks` | which sizes and ranks the plugin hybrid_parallel takes (no torch) |
| `plugins` | ColossalAI's plugins behind one interface: spread a model, accumulate, gather |
| `planner` | from a global batch to advantages, weights and shares; what they need is computed beforehand |
| `objective` | the loss of a micro-batch from its log-probs |
| `critic` | PPO's value model, its optimizer and its part of a step |
| `value_head`, `head_critic` | its other form: a head on the policy, and its part of the policy's step |
| `ptx`, `ptx_texts` | texts for a language-model loss beside the policy's |
| `accumulation` | one global batch through micro-batches: loss, gradient, sums for metrics |
| `optimizer` | AdamW and its parameter groups, the learning-rate schedule |
| `metrics` | names and meanings of the metrics, and how sums over ranks become them |
| `names` | the names under which tensors are published and saved |
| `storage` | a checkpoint's content: model, optimizer, state |

Only `base`, `create`, `model_folder`, `hybrid_checks` and `ptx_texts` may be imported without torch. The keys of the
run file are in `quartet_trainer.learner_settings` and `plugin_settings`, which import none of this.
"""

from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.base import Learner
from quartet_trainer.learner.create import create_learner
from quartet_trainer.learner_settings import LearnerSettings

__all__ = ["Learner", "LearnerError", "LearnerSettings", "create_learner"]
