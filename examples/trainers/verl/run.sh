#!/bin/sh
# verl's trainer with step credit: arguments are verl's own (data, model, agent loop, GPUs); needs OPENAI_API_KEY.
#   examples/trainers/verl/run.sh data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen3-4B ...
exec python -m verl.trainer.main_ppo \
    trainer.use_v1=True \
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=draco_ray.adapters.verl.StepCreditManager \
    algorithm.adv_estimator=draco \
    +draco.model=openai/gpt-5.4 +draco.budget=50 +draco.store="$PWD/verdicts.sqlite" \
    "$@"
