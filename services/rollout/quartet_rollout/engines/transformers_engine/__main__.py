"""The process of the transformers engine: `python -m … MODEL_PATH OPTIONS LOG_LEVEL` (`engine_loop`)."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # until the model is loaded
    from quartet_rollout.engines.transformers_engine.engine_loop import main

    main(*sys.argv[1:])
