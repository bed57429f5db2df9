"""Any diffusers pipeline whose loop ends in `scheduler.step`, by entering its own call again at one timestep.

Process: read from the scheduler, a flow or VP. Timesteps are the scheduler's own. `guidance_scale` is in the pipeline's
units (families.py): its CFG scale, its true_cfg_scale, or an input of the network. What the pipeline does between the
latents and `scheduler.step` (packing, guidance, renormalisation, sign) is its own code, with gradients.

    families   facts of pipeline classes          encoding   `encode_prompt` taken apart into rows of a Condition
    options    arguments of the call, sizes       images     reference images and first frames
    reentry    one call at chosen timesteps       entrance   facts of a pipeline before it is entered
    adapter    the adapter                        outline    the adapter without weights, for plans
    own_call   its prediction against the call's own, for classes that no test compares
    full_masks   masks of tensors without values, for plans
    stand_ins    what encodes prompts and images there
"""

from pathlib import Path

from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.outline import Outline
from flowrl.models.pipelines.loading import load_pipeline, require_pipeline_class

LEVEL = "tested"
__all__ = ["LEVEL", "Config", "Generic", "build", "skeleton"]


def build(config: Config) -> Generic:
    """The adapter of the configured pipeline, with its weights."""
    if config.pipeline is not None:
        require_pipeline_class(config.pipeline)
    return Generic(load_pipeline(config.pipeline or "DiffusionPipeline", "AutoModel", config, named=False), config)


def skeleton(config: Config, folder: Path) -> Outline:
    """The adapter on the meta device, from a pipeline folder's JSON files alone."""
    return Outline(config, folder)
