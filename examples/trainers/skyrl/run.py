"""SkyRL's own entry point with step credit; arguments are SkyRL's. Needs skyrl[fsdp] and OPENAI_API_KEY.

python examples/trainers/skyrl/run.py data.train_data=... trainer.policy.model.path=... [key=value ...]
"""

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray, validate_cfg

from draco_ray.adapters.skyrl import SkyRLCredit


class StepCreditExperiment(BasePPOExp):
    """SkyRL's experiment with another trainer class."""

    def get_trainer(self, *arguments, **options):
        """Make the trainer."""
        credit = SkyRLCredit("openai/gpt-5.4", budget=50.0, store="verdicts.sqlite")
        return credit.trainer(RayPPOTrainer)(*arguments, **options)


@ray.remote(num_cpus=1)
def train(config: SkyRLTrainConfig) -> None:
    """Train, in a process of the cluster."""
    StepCreditExperiment(config).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(train.remote(config))
