"""OpenRLHF's own program with step credit; arguments are OpenRLHF's. Needs openrlhf[vllm] and OPENAI_API_KEY.

python examples/trainers/openrlhf/run.py --actor.model_name_or_path Qwen/Qwen3-4B --train.agent_func_path agent.py \\
    --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --algo.kl.init_coef 0 ...
"""

import runpy

from draco_ray.adapters.openrlhf import OpenRLHFCredit

if __name__ == "__main__":
    OpenRLHFCredit("openai/gpt-5.4", budget=50.0, store="verdicts.sqlite").install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
